"""A short program that stands for a deep one of equal layers, the inverse of `capture.deepen`.

        forward: 0 → 1 → 2 → 3 → ... → 91 → 92 → 93
    becomes
        forward: 0 → 1 → 2 → 3 → 92 → 93

What an axis of a mesh admits of an operator depends on what is around it, and that is the same in all layers but those
at the borders. Operators keep their names, and all that stand for others are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Arg, Graph, Op, Ref, once_per_graph
from autopar.ir.repetition import Repetition, repetition_of
from autopar.ir.stages import homes


@once_per_graph
def thinned(graph: Graph) -> Graph:
    """Return the program with the fewest blocks that stand for all; as it is where they do not repeat.

    That is where nothing repeats, where what is not their neighbour reads the blocks that would be left out, or where
    an operator in these stands for others.
    """
    blocks = _blocks(graph)
    row = repetition_of([tuple(graph.representative(op.name) for op in ops) for ops in blocks])
    # One more at each border: what comes first of the equal ones stands for them, in backward that is the last.
    row = row and row.with_margins()
    if row is None or row.more < 1:
        return graph
    return _without(graph, blocks, row) or graph


def _blocks(graph: Graph) -> list[list[Op]]:
    """Return the operators of every block, in order."""
    home = homes(graph)
    found: list[list[Op]] = [[] for _ in range(max(home.values(), default=-1) + 1)]
    for op in graph.ops:
        found[home[op.name]].append(op)
    return found


def _without(graph: Graph, blocks: Sequence[Sequence[Op]], row: Repetition) -> Graph | None:
    """Return the program without the blocks in the midst of the row; `None` where something needs them."""
    stop = row.layers - row.behind
    start = stop - row.more * row.period
    at = {op.name: (block, place) for block, ops in enumerate(blocks) for place, op in enumerate(ops)}
    left_out = {op.name for ops in blocks[start:stop] for op in ops}
    if any(op.name in left_out for op in graph.representatives):
        return None

    def nearest(reader: int, ref: Ref) -> Ref:
        """Return what is read in place of a value of a block that is left out: the same of the block beyond.

        Raises:
            LookupError: the block is no neighbour of the reader's.
        """
        block, place = at[ref.op]
        behind = reader >= stop
        beyond = block - (stop - start) if behind else block + (stop - start)
        if not (start - row.period <= beyond < start if behind else stop <= beyond < stop + row.period):
            raise LookupError(ref.op)
        return Ref(blocks[beyond][place].name, ref.index)

    def read(reader: int, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return nearest(reader, arg) if arg.op in left_out else arg
        return tuple(read(reader, each) for each in arg) if isinstance(arg, tuple) else arg

    def joined(op: Op) -> Op:
        if not any(ref.op in left_out for ref in op.refs):
            return op
        block = at[op.name][0]
        kwargs = tuple((key, read(block, value)) for key, value in op.kwargs)
        return replace(op, args=tuple(read(block, arg) for arg in op.args), kwargs=kwargs)

    try:
        ops = tuple(joined(op) for op in graph.ops if op.name not in left_out)
    except LookupError:
        return None
    outputs = (each for each in graph.outputs if each.name not in left_out)
    return replace(
        graph,
        ops=ops,
        outputs=tuple(each for each in outputs if each.ref is None or each.ref.op not in left_out),
        fold={one: other for one, other in graph.fold.items() if one not in left_out},
    )
