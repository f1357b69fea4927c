"""Who reads what: readers of one value share each redistributed copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.costs.segments import Segments
from autopar.ir.graph import Graph, once_per_graph
from autopar.ir.roles import gradient_values, is_view, parameter_like
from autopar.ir.table import Category, Floats

Phase = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class Reader:
    """A place where a value is read: argument `slot` of an operator, or an output of the program."""

    op: str
    slot: int


@dataclass(frozen=True)
class Sharing:
    """A value and the readers that share each redistributed copy of it."""

    producer: str
    index: int
    readers: tuple[Reader, ...]
    category: Category
    phase: Phase


_Key = tuple[str, int, tuple[tuple[str, int], ...], Category, Phase]
"""A `Sharing`, each reader as its operator and slot."""


@once_per_graph
def _last_read(graph: Graph) -> dict[Phase, dict[str, int]]:
    """Return, by phase, where each value is last read, itself or by what views it there; its own place if nowhere."""
    return {phase: _last_read_in(graph, phase) for phase in ("forward", "backward", "both")}


def _last_read_in(graph: Graph, phase: Phase) -> dict[str, int]:
    found = {op.name: position for position, op in enumerate(graph.ops)}
    for position in reversed(range(len(graph.ops))):
        op = graph.ops[position]
        if phase != "both" and op.phase != phase:
            continue
        for slot, ref in enumerate(op.refs):
            through = found[op.name] if slot == 0 and is_view(op) else position
            found[ref.op] = max(found[ref.op], through)
    return found


@once_per_graph
def sharers(graph: Graph) -> dict[Sharing, tuple[Floats, list[tuple[int, int]]]]:
    """Return, for each set of readers that share copies of a value: how often in each segment, and when."""
    segments, parameters = Segments.of(graph), parameter_like(graph)
    gradients = {(ref.op, ref.index) for ref in gradient_values(graph)}
    found: dict[tuple[str, int, Phase], list[tuple[tuple[str, int], int]]] = {}
    for position, op in enumerate(graph.ops):
        reading = graph.representative(op.name)
        for slot, ref in enumerate(op.refs):
            reader = ((reading, slot), position)
            found.setdefault((ref.op, ref.index, "both"), []).append(reader)
            if ref.op in parameters:
                found.setdefault((ref.op, ref.index, op.phase), []).append(reader)
    for output in graph.outputs:
        if output.ref is not None:
            name = output.name if output.kind == "output" else graph.representative(output.name)
            reader = ((f"{output.kind}:{name}", 0), graph.position[output.ref.op])
            found.setdefault((output.ref.op, output.ref.index, "both"), []).append(reader)
    # Plain tuples until the end: deep programs have as many values as equal layers, and few ways to share them.
    shared: dict[_Key, tuple[list[int], list[tuple[int, int]]]] = {}
    last_read = _last_read(graph)
    for (name, index, phase), readers in found.items():
        names = tuple(sorted({reader for reader, _ in readers}))
        # An operator may make gradients beside other values (a normalisation's backward does): nobody waits for those.
        leaves = (name, index) in gradients
        category: Category = "prefetch" if name in parameters else "reduction" if leaves else "critical"
        key = graph.representative(name), index, names, category, phase
        counts, lives = shared.setdefault(key, ([0] * segments.total, []))
        places = [position for _, position in readers]
        first = graph.position[name] if category == "reduction" else min(places)
        # Views have the memory of the copy that they view.
        if name in parameters and phase == "both":
            places.append(last_read[phase][name])
        elif category != "reduction":
            of = phase if name in parameters else "both"
            viewing = [graph.ops[at] for (_, slot), at in readers if slot == 0]
            places += [last_read[of][op.name] for op in viewing if is_view(op)]
        counts[segments.of_op[graph.ops[first].name]] += 1
        lives.append((first, max(places)))
    return {
        Sharing(producer, index, tuple(Reader(*each) for each in names), category, phase): (
            np.array(counts, float),
            lives,
        )
        for (producer, index, names, category, phase), (counts, lives) in shared.items()
    }
