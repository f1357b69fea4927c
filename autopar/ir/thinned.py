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


@once_per_graph
def thinned(graph: Graph) -> Graph:
    """Return the program with the fewest layers that stand for all; as it is where they do not repeat.

    A layer is a module whose name is a number, of the outer ones where these are nested. All rows of them are
    shortened, but those where nothing repeats, where another than their neighbour reads the layers that would be left
    out, or where an operator in these stands for others.
    """
    for layers in sorted(_rows(graph).values(), key=len, reverse=True):
        row = repetition_of([tuple(graph.representative(op.name) for op in ops) for ops in layers])
        # One more at each border: what comes first of the equal ones stands for them, in backward that is the last.
        row = row and row.with_margins()
        if row is not None and row.more > 0:
            graph = _without(graph, layers, row) or graph
    return graph


def _rows(graph: Graph) -> dict[str, list[list[Op]]]:
    """Return the operators of every layer, parameters and backward among them, by the path of the row's module."""
    places: dict[str, tuple[str, int] | None] = {}
    found: dict[str, dict[int, list[Op]]] = {}
    for op in graph.ops:
        path = op.target if op.kind in {"parameter", "buffer"} else op.module
        if path not in places:
            places[path] = _place(path)
        place = places[path]
        if place is not None:
            found.setdefault(place[0], {}).setdefault(place[1], []).append(op)
    return {row: [layers[number] for number in sorted(layers)] for row, layers in found.items()}


def _place(path: str) -> tuple[str, int] | None:
    """Return the row and number of the layer that a path is in or below; `None` if it is in none."""
    words = path.split(".")
    at = next((at for at, word in enumerate(words) if word.isdigit()), None)
    return None if at is None else (".".join(words[:at]), int(words[at]))


def _without(graph: Graph, layers: Sequence[Sequence[Op]], row: Repetition) -> Graph | None:
    """Return the program without the layers in the midst of the row; `None` where something needs them."""
    stop = row.layers - row.behind
    start = stop - row.more * row.period
    left_out = {op.name for ops in layers[start:stop] for op in ops}
    if not left_out.isdisjoint(graph.fold.get(name, name) for name in left_out):
        return None
    numbers = {op.name: number for number, ops in enumerate(layers) for op in ops}
    places = {op.name: place for ops in layers[start:stop] for place, op in enumerate(ops)}

    def nearest(reader: int, ref: Ref) -> Ref:
        """Return what is read in place of a value of a layer that is left out: the same of the layer beyond.

        Raises:
            LookupError: the layer is no neighbour of the reader's.
        """
        number, behind = numbers[ref.op], reader >= stop
        beyond = number - (stop - start) if behind else number + (stop - start)
        if not (start - row.period <= beyond < start if behind else stop <= beyond < stop + row.period):
            raise LookupError(ref.op)
        return Ref(layers[beyond][places[ref.op]].name, ref.index)

    def read(reader: int, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return nearest(reader, arg) if arg.op in left_out else arg
        return tuple(read(reader, each) for each in arg) if isinstance(arg, tuple) else arg

    def joined(op: Op) -> Op:
        if not any(ref.op in left_out for ref in op.refs):
            return op
        if op.name not in numbers:
            raise LookupError(op.name)
        number = numbers[op.name]
        kwargs = tuple((key, read(number, value)) for key, value in op.kwargs)
        return replace(op, args=tuple(read(number, arg) for arg in op.args), kwargs=kwargs)

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
