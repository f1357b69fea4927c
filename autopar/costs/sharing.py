"""Who reads what: readers of one value share each redistributed copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.costs.segments import Segments
from autopar.ir.graph import Graph, Ref, once_per_graph
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
    segments, parameters, gradients = Segments.of(graph), parameter_like(graph), gradient_values(graph)
    found: dict[tuple[str, int, Phase], list[tuple[Reader, int]]] = {}
    for position, op in enumerate(graph.ops):
        for slot, ref in enumerate(op.refs):
            reader = (Reader(graph.representative(op.name), slot), position)
            found.setdefault((ref.op, ref.index, "both"), []).append(reader)
            if ref.op in parameters:
                found.setdefault((ref.op, ref.index, op.phase), []).append(reader)
    for output in graph.outputs:
        if output.ref is not None:
            name = output.name if output.kind == "output" else graph.representative(output.name)
            reader = (Reader(f"{output.kind}:{name}", 0), graph.position[output.ref.op])
            found.setdefault((output.ref.op, output.ref.index, "both"), []).append(reader)
    shared: dict[Sharing, tuple[Floats, list[tuple[int, int]]]] = {}
    for (name, index, phase), readers in found.items():
        names = tuple(sorted({reader for reader, _ in readers}, key=lambda r: (r.op, r.slot)))
        # An operator may make gradients beside other values (a normalisation's backward does): nobody waits for those.
        leaves = Ref(name, index) in gradients
        category: Category = "prefetch" if name in parameters else "reduction" if leaves else "critical"
        sharing = Sharing(graph.representative(name), index, names, category, phase)
        counts, lives = shared.setdefault(sharing, (np.zeros(segments.total), []))
        places = [position for _, position in readers]
        first = graph.position[name] if category == "reduction" else min(places)
        # Views have the memory of the copy that they view.
        if name in parameters and phase == "both":
            places.append(_last_read(graph)[phase][name])
        elif category != "reduction":
            of = phase if name in parameters else "both"
            viewing = [graph.ops[at] for (reader, _), at in zip(readers, places, strict=True) if reader.slot == 0]
            places += [_last_read(graph)[of][op.name] for op in viewing if is_view(op)]
        counts[segments.of_op[graph.ops[first].name]] += 1
        lives.append((first, max(places)))
    return shared
