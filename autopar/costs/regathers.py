"""What is read in forward and again later: software that keeps a rank's part of it has to gather it a second time.

Our programs keep what they gathered. Megatron's linears under sequence parallelism keep their own rows, and gather the
others again in backward for their weights' gradients; so do rings of keys and values for attention's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.costs.segments import Segments
from autopar.costs.sharing import Reader, Sharing
from autopar.ir.graph import Graph, Op, Ref, once_per_graph
from autopar.ir.roles import gradient_like, is_view, parameter_like
from autopar.ir.table import Floats

_FORWARD, _AGAIN, _BACKWARD = range(3)


@dataclass(frozen=True, slots=True)
class Pass:
    """Where one value is computed with in one of three: forward, forward run again, backward."""

    readers: tuple[str, ...]
    """The operators that read it, some for views that others compute with."""

    computing: tuple[str, ...]
    """The operators that compute with it, or with views of it, in order."""

    first: int
    last: int
    """Positions of these."""


def passes(graph: Graph, ref: Ref, readers: Iterable[str]) -> list[Pass]:
    """Return the passes in which some of its readers, or what reads views that they make, compute with a value."""
    found: dict[int, dict[str, list[str]]] = {}
    for reader in readers:
        for name in _computing_for(graph, reader, ref.op):
            found.setdefault(_pass_of(graph)[name], {}).setdefault(reader, []).append(name)
    ordered = []
    for _, by_reader in sorted(found.items()):
        names = sorted({name for each in by_reader.values() for name in each}, key=graph.position.__getitem__)
        ordered.append(Pass(tuple(by_reader), tuple(names), graph.position[names[0]], graph.position[names[-1]]))
    return ordered


@once_per_graph
def read_again(graph: Graph) -> Mapping[Ref, list[Pass]]:
    """Return the passes of each activation that several passes compute with."""
    apart = parameter_like(graph) | gradient_like(graph)
    found = {}
    for op in graph.ops:
        if op.kind != "call" or op.name in apart:
            continue
        for index in range(len(op.outputs)):
            ref = Ref(op.name, index)
            readers = [user for user in graph.users[op.name] if ref in graph.by_name[user].refs]
            if len(mine := passes(graph, ref, readers)) > 1:
                found[ref] = mine
    return found


@once_per_graph
def sharers_again(graph: Graph) -> dict[Sharing, tuple[Floats, list[tuple[int, int]]]]:
    """Return the readers that share a copy made anew in a later pass: how often in each segment, and where it is gone.

    Of each instance, the positions from and to which there is no copy.
    """
    segments = Segments.of(graph)
    found: dict[Sharing, tuple[Floats, list[tuple[int, int]]]] = {}
    for ref, mine in read_again(graph).items():
        for before, late in itertools.pairwise(mine):
            readers = {
                Reader(graph.representative(name), slot)
                for name in late.readers
                for slot, each in enumerate(graph.by_name[name].refs)
                if each == ref
            }
            ordered = tuple(sorted(readers, key=lambda each: (each.op, each.slot)))
            sharing = Sharing(graph.representative(ref.op), ref.index, ordered, "critical", "backward")
            counts, gone = found.setdefault(sharing, (np.zeros(segments.total), []))
            counts[segments.of_op[late.computing[0]]] += 1
            gone.append((before.last + 1, late.first - 1))
    return found


@once_per_graph
def _pass_of(graph: Graph) -> dict[str, int]:
    """Return the pass of each operator: what backward computes without any gradient is forward's, run again."""
    of_gradients: set[str] = set()
    found = {}
    for op in graph.ops:
        if op.kind == "tangent" or any(ref.op in of_gradients for ref in op.refs):
            of_gradients.add(op.name)
        late = _BACKWARD if op.name in of_gradients else _AGAIN
        found[op.name] = _FORWARD if op.phase == "forward" else late
    return found


@once_per_graph
def _computing(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each operator, those that compute with what it makes, or with views of it."""
    found: dict[str, tuple[str, ...]] = {}
    for op in reversed(graph.ops):
        names: dict[str, None] = {}
        for user in graph.users[op.name]:
            names |= dict.fromkeys(found[user] if _views(graph.by_name[user], op.name) else (user,))
        found[op.name] = tuple(names)
    return found


def _computing_for(graph: Graph, reader: str, value: str) -> tuple[str, ...]:
    return _computing(graph)[reader] if _views(graph.by_name[reader], value) else (reader,)


def _views(op: Op, value: str) -> bool:
    return is_view(op) and op.refs[0].op == value
