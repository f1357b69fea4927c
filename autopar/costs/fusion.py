"""Which values never reach memory where memory-bound operators in a row are one kernel.

        mm → [bias → gelu → dropout] → mm

What a fusing compiler, or a hand-written kernel, does with a run of operators between two that compute is to read
what comes from outside once and write what is read outside. A run ends at matrix products, convolutions and
attention kernels, and where forward ends: what backward reads is in memory. What backward computes again from such
values belongs to the run that reads it. Not modelled: how many operators, or which reductions, one kernel can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.roles import base_of, computes, is_view


@dataclass(frozen=True, slots=True)
class Inside:
    """What of an operator's traffic stays inside one kernel."""

    reads: tuple[bool, ...]
    """Of each tensor that it reads: whether it is at hand already."""

    writes: tuple[bool, ...]
    """Of each output: whether nobody reads it from memory."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What of an operator's traffic fusion keeps off memory."""

    run: Inside
    """Where its whole run is one kernel."""

    part: Inside
    """Where what a run does for one module (a norm, a gated activation, a rotation) is one kernel."""


Kernel = tuple[object, ...] | None
"""What operators of one kernel have in common; None: of an operator that is a kernel of its own."""


@once_per_graph
def fused_traffic(graph: Graph) -> dict[str, Fused]:
    """Return what fusion saves of each memory-bound operator."""
    runs = _runs(graph)
    parts = {op.name: None if runs[op.name] is None else (runs[op.name], op.module) for op in graph.ops}
    by_run, by_part = _inside(graph, runs), _inside(graph, parts)
    return {name: Fused(run, by_part[name]) for name, run in by_run.items()}


def _runs(graph: Graph) -> dict[str, Kernel]:
    """Return the run of each operator: its phase, and how many operators that compute are before it."""
    base = base_of(graph)
    run: dict[str, Kernel] = {}
    level: dict[str, int] = {}
    for op in graph.ops:
        sources = [base[ref.op, ref.index][0] for ref in op.refs]
        level[op.name] = max((level[each] + (run[each] is None) for each in sources), default=0)
        ends = op.kind != "call" or computes(op)
        run[op.name] = None if ends else (op.phase, level[op.name])
    for name, late in _computed_again(graph, level).items():
        if run[name] is not None:
            run[name] = ("backward", late)
    return run


def _computed_again(graph: Graph, level: Mapping[str, int]) -> dict[str, int]:
    """Return what backward makes of forward's values alone, with the level of the first that reads it."""
    again: set[str] = set()
    for op in graph.ops:
        if op.kind == "call" and op.phase == "backward":
            sources = [graph.by_name[ref.op] for ref in op.refs]
            if all(source.phase != "backward" or source.name in again for source in sources) and not computes(op):
                again.add(op.name)
    late: dict[str, int] = {}
    for op in reversed(graph.ops):
        mine = late.get(op.name, level[op.name])
        for name in {ref.op for ref in op.refs} & again:
            late[name] = min(mine, late.get(name, mine))
    return late


def _inside(graph: Graph, kernel: Mapping[str, Kernel]) -> dict[str, Inside]:
    """Return what stays inside if each run of operators in `kernel` is one."""
    base = base_of(graph)
    readers: dict[tuple[str, int], list[Op]] = {}
    for op in graph.ops:
        for ref in op.refs:
            if not is_view(op):
                readers.setdefault(base[ref.op, ref.index], []).append(op)
    leaving = {base[o.ref.op, o.ref.index] for o in graph.outputs if o.ref is not None}
    found: dict[str, Inside] = {}
    at_hand: set[tuple[object, tuple[str, int]]] = set()
    for op in graph.ops:
        mine = kernel[op.name]
        if mine is None or is_view(op):
            continue
        reads = []
        for ref in op.refs:
            value = base[ref.op, ref.index]
            reads.append(kernel[value[0]] == mine or (mine, value) in at_hand)
            at_hand.add((mine, value))
        writes = tuple(
            (op.name, index) not in leaving
            and all(kernel[reader.name] == mine for reader in readers.get((op.name, index), ()))
            for index in range(len(op.outputs))
        )
        found[op.name] = Inside(tuple(reads), writes)
    return found
