"""Equal layers, found by structure: an operator of one layer stands for its counterparts in all equal layers.

Layers are children with integer names of one module (`layers.0`, `layers.1`, also nested: `stages.2.blocks.5`). The
operators of a layer, forward and backward, are those that its modules called, and its parameters. Two layers are equal
if their operators are the same one by one (target, plain arguments, shapes, which operator of the layer they read), and
what they read from outside corresponds: the same value, or the same operator of a layer at the same distance. At the
border of a run of equal layers another value of the same shape may stand in the place of that neighbour: what the
first layer reads is no layer's output.

A chain of layers without a path around their weights may want to alternate (a weight split by columns, the next one by
rows); there, only every second layer is equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Graph, Op, Ref

Path = tuple[str, ...]


def find_blocks(graph: Graph) -> dict[str, str]:
    """Return, for every operator that one of an earlier equal layer stands for, the name of that one."""
    search = _Search(graph)
    search.run()
    return {name: _last(search.fold, name) for name in search.fold}


def _last(fold: Mapping[str, str], name: str) -> str:
    """Return where following the fold ends: a layer's representative may itself hold equal inner layers."""
    while name in fold:
        name = fold[name]
    return name


class _Search:
    """Goes through the containers, outer ones first, and through the parts of layers that are not equal as a whole."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kinds = _output_kinds(graph)
        self.fold: dict[str, str] = {}

    def run(self) -> None:
        """Fill `fold`."""
        for container, instances in sorted(layers_of(self._graph).items(), key=lambda item: (len(item[0]), item[0])):
            unfolded = [instances[i] for i in sorted(instances) if instances[i][0].name not in self.fold]
            if len(unfolded) > 1:
                self._equal_layers(unfolded, len(container) + 1)

    def _equal_layers(self, instances: list[list[Op]], depth: int) -> None:
        """Fold the layers whose paths are `depth` parts long, and the equal parts of those that differ."""
        around = _Surroundings(depth, instances)
        layers = Layers(self._graph, self._kinds, instances, around)
        self._fold(layers)
        different = [ops for ops in instances if ops[0].name not in self.fold]
        if len(different) > 1 and not layers.alternating:
            self._equal_parts(different, depth, around)

    def _equal_parts(self, instances: list[list[Op]], depth: int, around: _Surroundings) -> None:
        """Fold the equal ones of children of the same name (`layers.0.mlp`, `layers.5.mlp`), and go into the others."""
        children: dict[str, list[list[Op]]] = {}
        for ops in instances:
            mine: dict[str, list[Op]] = {}
            for op in ops:
                path = _module_of(op)
                if len(path) > depth and op.name not in self.fold:
                    mine.setdefault(path[depth], []).append(op)
            for name, part in mine.items():
                children.setdefault(name, []).append(part)
        for parts in children.values():
            if len(parts) > 1:
                layers = Layers(self._graph, self._kinds, parts, around)
                self._fold(layers)
                different = [part for part in parts if part[0].name not in self.fold]
                if len(different) > 1:
                    self._equal_parts(different, depth + 1, around)

    def _fold(self, layers: Layers) -> None:
        for position, standing in layers.equal():
            self.fold.update(zip(layers.names[position], layers.names[standing], strict=True))


def _output_kinds(graph: Graph) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return what each operator's values are to the program's caller."""
    kinds: dict[str, tuple[tuple[str, int], ...]] = {}
    for output in graph.outputs:
        if output.ref is not None:
            kinds[output.ref.op] = (*kinds.get(output.ref.op, ()), (output.kind, output.ref.index))
    return kinds


def _module_of(op: Op) -> Path:
    """Return the path of the module that called an operator or holds a parameter."""
    if op.kind in {"parameter", "buffer"}:
        return tuple(op.target.split("."))[:-1]
    return tuple(op.module.split(".")) if op.module else ()


def layers_of(graph: Graph) -> dict[Path, dict[int, list[Op]]]:
    """Return the operators of every child with an integer name (what layers share left out), by its parent's path."""
    found: dict[Path, dict[int, list[Op]]] = {}
    for op in graph.ops:
        path = _module_of(op)
        for depth, part in enumerate(path):
            if part.isdigit():
                found.setdefault(path[:depth], {}).setdefault(int(part), []).append(op)
    own = {container: _own(graph, instances) for container, instances in found.items() if len(instances) > 1}
    return {container: instances for container, instances in own.items() if len(instances) > 1}


def _own(graph: Graph, instances: Mapping[int, list[Op]]) -> dict[int, list[Op]]:
    """Return the layers without what they compute of outside values for other layers as well (a table's view, say).

    The first layer that needed such a value is the one that made it; it is no part of that layer.
    """
    layer = {op.name: index for index, ops in instances.items() for op in ops}
    ordered = sorted((op for ops in instances.values() for op in ops), key=lambda op: graph.position[op.name])
    free: set[str] = set()
    for op in ordered:
        if op.kind in {"call", "constant"} and all(ref.op in free or ref.op not in layer for ref in op.refs):
            free.add(op.name)
    shared: set[str] = set()
    for op in reversed(ordered):
        users = graph.users[op.name]
        if op.name in free and any(
            user in shared or layer.get(user, layer[op.name]) != layer[op.name] for user in users
        ):
            shared.add(op.name)
    own = {index: _ordered([op for op in ops if op.name not in shared]) for index, ops in instances.items()}
    return {index: ops for index, ops in own.items() if ops}


class _Surroundings:
    """Where operators stand in a row of layers: which layer, and what they are within it."""

    def __init__(self, depth: int, layers: Sequence[Sequence[Op]]) -> None:
        self.count = len(layers)
        self._place = {
            op.name: (position, (*_module_of(op)[depth:], op.target if op.kind == "call" else op.kind, op.phase))
            for position, ops in enumerate(layers)
            for op in ops
        }

    def place(self, name: str) -> tuple[int, tuple[str, ...]] | None:
        """Return the layer of an operator, and its path in it with its target and phase; `None` for one of no layer."""
        return self._place.get(name)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A value that a layer reads from outside."""

    ref: Ref
    forward: bool
    relative: tuple[int, Any] | None
    """Distance to the layer that makes it, and which operator of that layer; `None` where no layer makes it."""


class Layers:
    """Layers, or parts of the same name in different layers, by position."""

    def __init__(
        self,
        graph: Graph,
        kinds: Mapping[str, tuple[tuple[str, int], ...]],
        layers: Sequence[list[Op]],
        around: _Surroundings,
    ) -> None:
        self._graph = graph
        self._kinds = kinds
        self._around = around
        self._layers = layers
        self.names = [[op.name for op in ops] for ops in layers]
        self._place = {
            name: (position, local) for position, names in enumerate(self.names) for local, name in enumerate(names)
        }
        structures: dict[Any, int] = {}
        described = [self._describe(position) for position in range(len(layers))]
        self._structure = [structures.setdefault(shape, len(structures)) for shape, _ in described]
        self._slots = [
            [self._slot(position, ref, forward) for ref, forward in outside]
            for position, (_, outside) in enumerate(described)
        ]
        self.alternating = self._find_alternating()
        """Structures whose layers pass what they read from other layers on through weights only."""

    def equal(self) -> Iterator[tuple[int, int]]:
        """Yield the position of each layer that another stands for, and the position of that one."""
        classes: dict[tuple[int, int], list[tuple[int, list[_Slot]]]] = {}
        for position, structure in enumerate(self._structure):
            turn = position % 2 if structure in self.alternating else 0
            known = classes.setdefault((structure, turn), [])
            for at, (first, pattern) in enumerate(known):
                merged = self._merge(first, pattern, position)
                if merged is not None:
                    known[at] = (first, merged)
                    yield position, first
                    break
            else:
                known.append((position, self._slots[position]))

    def _describe(self, position: int) -> tuple[Any, list[tuple[Ref, bool]]]:
        """Return the structure of a layer, and what it reads from outside in order of first reading."""
        outside: dict[Ref, int] = {}
        forward: list[bool] = []
        shape = []
        for op in self._layers[position]:
            reads: list[tuple[Any, ...]] = []
            for ref in op.refs:
                at = self._place.get(ref.op)
                if at is not None and at[0] == position:
                    reads.append((0, at[1], ref.index))
                else:
                    if ref not in outside:
                        outside[ref] = len(outside)
                        forward.append(op.phase == "forward")
                    reads.append((1, outside[ref], self._graph.meta(ref)))
            own = "" if op.kind == "constant" else _plain(op)
            target = op.target if op.kind == "call" else op.kind
            shape.append(
                (target, own, tuple(reads), op.outputs, op.phase, op.requires_grad, self._kinds.get(op.name, ()))
            )
        return tuple(shape), list(zip(outside, forward, strict=True))

    def _slot(self, position: int, ref: Ref, forward: bool) -> _Slot:
        at = self._place.get(ref.op)
        if at is not None:
            return _Slot(ref, forward, (at[0] - position, (self._structure[at[0]], at[1], ref.index)))
        there = self._around.place(ref.op)
        here = self._around.place(self.names[position][-1])
        if there is None or here is None:
            return _Slot(ref, forward, None)
        return _Slot(ref, forward, (there[0] - here[0], (-1, there[1], ref.index)))

    def _merge(self, first: int, pattern: list[_Slot], position: int) -> list[_Slot] | None:
        """Return what all layers of the class read, the one at `position` included; `None` if that one differs."""
        merged = []
        for known, new in zip(pattern, self._slots[position], strict=True):
            if known.ref == new.ref or (known.relative is not None and known.relative == new.relative):
                merged.append(known)
            elif new.relative is not None and self._is_border(first, new.relative):
                merged.append(new)
            elif known.relative is not None and self._is_border(position, known.relative):
                merged.append(known)
            else:
                return None
        return merged

    def _is_border(self, position: int, relative: tuple[int, Any]) -> bool:
        """Return whether the layer lacks the neighbour that its equals read from."""
        distance, (structure, *_) = relative
        if structure < 0:
            here = self._around.place(self.names[position][-1])
            return here is None or not 0 <= here[0] + distance < self._around.count
        neighbour = position + distance
        return not 0 <= neighbour < len(self._structure) or self._structure[neighbour] != structure

    def _find_alternating(self) -> set[int]:
        entries = [
            {slot.ref for slot in slots if slot.forward and slot.relative is not None and slot.relative[0]}
            for slots in self._slots
        ]
        chained: set[int] = set()
        bypassed: set[int] = set()
        for position, structure in enumerate(self._structure):
            if entries[position]:
                chained.add(structure)
                if self._has_bypass(self._layers[position], entries[position]):
                    bypassed.add(structure)
        return chained - bypassed

    def _has_bypass(self, ops: Sequence[Op], entries: set[Ref]) -> bool:
        """Return whether what the layer reads leaves it on a path without weights (parameters of two or more dims)."""
        own = {op.name for op in ops}
        weights: set[str] = set()
        reached: set[str] = set()
        for op in ops:
            if op.phase != "forward":
                continue
            refs = op.refs
            if op.kind == "parameter" or (refs and all(ref.op in weights for ref in refs)):
                weights.add(op.name)
            elif any(ref in entries or ref.op in reached for ref in refs) and not any(
                ref.op in weights and len(self._graph.meta(ref).shape) > 1 for ref in refs
            ):
                reached.add(op.name)
        by_name = self._graph.by_name
        return any(
            user not in own and by_name[user].phase == "forward" for name in reached for user in self._graph.users[name]
        )


def _ordered(ops: Sequence[Op]) -> list[Op]:
    """Return parameters and buffers by name, then the operators in program order."""
    states = [op for op in ops if op.kind in {"parameter", "buffer"}]
    return [*sorted(states, key=lambda op: op.target), *(op for op in ops if op.kind not in {"parameter", "buffer"})]


def _plain(op: Op) -> Any:
    """Return the operator's arguments with every tensor replaced by a mark."""
    return repr(_mask(op.args)), repr(tuple((name, _mask(value)) for name, value in op.kwargs))


def _mask(value: Any) -> Any:
    if isinstance(value, Ref):
        return Ref("")
    if isinstance(value, tuple):
        return tuple(map(_mask, value))
    return value
