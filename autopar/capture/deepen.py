"""A deep program out of a shallow capture: equal layers are repeated in the graph, as if all had been captured.

        forward: 0 → 1 → 2          backward: 2 → 1 → 0
    becomes
        forward: 0 → 1 → 1' → 1'' → 2    backward: 2 → 1'' → 1' → 1 → 0

Tracing takes time in proportion to the layers, and what all but the border layers do is the same. The repeated layer is
one with a neighbour on both sides, so that the copies read what it reads, each of its own neighbours. Where layers
differ in turns (local and global attention, say), it is a period of them that is repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from autopar.capture.blocks import Path, layers_of
from autopar.capture.naming import names_in_order, renamed_ops, renamed_outputs
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Graph, Op, Output, Ref
from autopar.ir.repetition import FEW, Repetition

_NameOf = Callable[[tuple[int, int], str], str]
"""Part and place of an operator of the row, and its name, to the name that takes its place."""


class LayersDifferError(CaptureError):
    """Layers that are to stand for all compute something else than their neighbours."""


def deepened(graph: Graph, rows: Mapping[str, Repetition]) -> Graph:
    """Return the graph with as many layers in each row as `rows` says, by the path of the row's module.

    The graph's rows are the shortest that stand for these (`Repetition.few`). Layers before and behind those that
    repeat stay as they are. The graph is equal to that of the deep model, names included.

    Raises:
        LayersDifferError: a row has no repetition with an equal one on both sides.
        CaptureError: something reads from the midst of a row, or a constant is in it.
    """
    for path, row in rows.items():
        container = tuple(path.split("."))
        layers = layers_of(graph).get(container, {})
        whole = row.before + FEW * row.period
        # A last layer whose result nobody reads is not in the graph.
        if sorted(layers) != list(range(len(layers))) or not whole <= len(layers) <= row.few:
            raise _not_equal(path)
        if row.more > 0:
            graph = _Row(graph, container, [layers[index] for index in sorted(layers)], row).repeated()
    names = names_in_order(graph.ops)
    return dataclasses.replace(
        graph,
        ops=tuple(renamed_ops(graph.ops, names)),
        outputs=tuple(renamed_outputs(graph.outputs, names)),
        fold={names[one]: names[other] for one, other in graph.fold.items()},
    )


class _Row:
    """One row of layers, and copies of the second of its equal parts (a layer, or a period of them) behind that."""

    def __init__(self, graph: Graph, container: Path, layers: Sequence[Sequence[Op]], row: Repetition) -> None:
        self._graph = graph
        self._prefix = ".".join(container)
        self._extra = row.more
        self._period = row.period
        starts = [row.before + each * row.period for each in range(FEW)]
        self._row = [[op for layer in layers[at : at + row.period] for op in layer] for at in starts]
        self._at = {op.name: (part, place) for part, ops in enumerate(self._row) for place, op in enumerate(ops)}
        self._number = {op.name: number for number, ops in enumerate(layers) for op in ops}
        self._behind = {op.name for ops in layers[starts[-1] + row.period :] for op in ops}
        kinds = [[graph.representative(op.name) for op in ops] for ops in self._row]
        if any(kind != kinds[0] for kind in kinds):
            raise _not_equal(self._prefix)
        # The graph does not say what value a constant has: those of two layers may differ.
        if any(op.kind == "constant" for op in self._row[1]):
            raise _constant(self._prefix)
        for near, far in ((0, 2), (2, 0)):
            for op in self._row[near]:
                if any(self._at.get(ref.op, (near, 0))[0] == far for ref in op.refs):
                    raise _read_in_midst(op, self._prefix)

    def repeated(self) -> Graph:
        """Return the graph with the copies in it."""
        graph = self._graph
        template = sorted(self._row[1], key=lambda op: graph.position[op.name])
        names = {op.name for op in template}
        ends = {_group(op): op.name for op in template}
        first_back = next((op.name for op in template if _group(op) == "backward"), "")
        ops: list[Op] = []
        for op in graph.ops:
            if op.name == first_back:
                copies = range(self._extra, 0, -1)
                ops += [self._copy(each, copy) for copy in copies for each in template if _group(each) == "backward"]
            ops.append(self._moved(op))
            group = _group(op)
            if op.name in names and group != "backward" and ends[group] == op.name:
                copies = range(1, self._extra + 1)
                ops += [self._copy(each, copy) for copy in copies for each in template if _group(each) == group]
        fold = dict(graph.fold)
        for op in template:
            fold |= {_named(op.name, copy): graph.representative(op.name) for copy in range(1, self._extra + 1)}
        made = dataclasses.replace(graph, ops=tuple(ops), outputs=tuple(self._outputs()), fold=fold)
        _check_order(made, self._prefix)
        return made

    def _outputs(self) -> Iterator[Output]:
        """Yield the outputs, those of the copies behind the template's."""
        mine = [each for each in self._graph.outputs if self._at.get(each.name, (0, 0))[0] == 1]
        for each in self._graph.outputs:
            yield each
            if mine and each is mine[-1]:
                for copy in range(1, self._extra + 1):
                    for one in mine:
                        ref = one.ref and Ref(_named(one.ref.op, copy), one.ref.index)
                        yield dataclasses.replace(one, name=_named(one.name, copy), ref=ref)

    def _moved(self, op: Op) -> Op:
        """Return an operator of the shallow program: layers behind the copies have a later number and other inputs."""
        layer, _ = self._at.get(op.name, (-1, 0))
        if layer == 0:
            return op
        if layer == 1:
            return self._reading(op, lambda at, name: _named(self._row[1][at[1]].name, 1) if at[0] == 2 else name)
        if layer == -1 and any(self._at.get(ref.op, (-1, 0))[0] == 1 for ref in op.refs):
            raise _read_in_midst(op, self._prefix)
        moved = self._reading(op, lambda at, name: _named(name, self._extra) if at[0] == 1 else name)
        return self._renumbered(moved, self._extra) if layer == 2 or op.name in self._behind else moved

    def _copy(self, op: Op, copy: int) -> Op:
        """Return copy number `copy`, 1 first, of an operator of the template."""
        template = self._row[1]

        def own(at: tuple[int, int], name: str) -> str:
            layer, place = at
            if layer == 1:
                return _named(name, copy)
            if layer == 0:
                return _named(template[place].name, copy - 1)
            if layer == 2:
                return name if copy == self._extra else _named(template[place].name, copy + 1)
            raise _read_in_midst(op, self._prefix)

        renamed = dataclasses.replace(self._reading(op, own), name=_named(op.name, copy))
        return self._renumbered(renamed, copy, op.name)

    def _reading(self, op: Op, name_of: _NameOf) -> Op:
        def swap(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                at = self._at.get(arg.op)
                return arg if at is None else Ref(name_of(at, arg.op), arg.index)
            return tuple(map(swap, arg)) if isinstance(arg, tuple) else arg

        if not any(ref.op in self._at for ref in op.refs):
            return op
        kwargs = tuple((key, swap(value)) for key, value in op.kwargs)
        return dataclasses.replace(op, args=tuple(map(swap, op.args)), kwargs=kwargs)

    def _renumbered(self, op: Op, parts: int, name: str = "") -> Op:
        """Return an operator with the number of its layer, later by `parts`, in its module path and a parameter's name.

        `name` is the operator's in the shallow program.
        """
        number = self._number[name or op.name]
        old, new = (f"{self._prefix}.{each}".lstrip(".") for each in (number, number + parts * self._period))

        def changed(path: str) -> str:
            return new + path[len(old) :] if path == old or path.startswith(f"{old}.") else path

        target = changed(op.target) if op.kind in {"parameter", "buffer"} else op.target
        return dataclasses.replace(op, module=changed(op.module), target=target)


def _group(op: Op) -> str:
    """Return what an operator is inserted with: its phase, or for what a program starts from, its kind."""
    return op.phase if op.kind == "call" else op.kind


def _named(name: str, copy: int) -> str:
    return f"{name}_deep{copy}" if copy else name


def _check_order(graph: Graph, prefix: str) -> None:
    seen: set[str] = set()
    for op in graph.ops:
        for ref in op.refs:
            if ref.op not in seen:
                raise _read_in_midst(op, prefix)
        seen.add(op.name)


def _not_equal(prefix: str) -> LayersDifferError:
    return LayersDifferError(
        f"the layers of {prefix} differ, so that a few of them do not stand for all; capture the model at full depth"
    )


def _constant(prefix: str) -> CaptureError:
    return CaptureError(
        f"the layers of {prefix} read constants, whose values may differ, so that a few of them do not stand for all; "
        "capture the model at full depth"
    )


def _read_in_midst(op: Op, prefix: str) -> CaptureError:
    return CaptureError(
        f"{op.where} reads from the midst of {prefix}, so that a few layers do not stand for all; capture the model at "
        "full depth"
    )
