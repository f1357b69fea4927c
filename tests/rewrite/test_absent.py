"""Backward when only some of a program's outputs have a gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.rewrite import rewrite
from tests.support import lockstep
from tests.support.decide import decide, drawn, mesh_of
from tests.support.models import cases
from tests.support.whole import Whole, part


@pytest.mark.parametrize("name", ["twin", "plain"])
@pytest.mark.parametrize("mesh", [mesh_of(), mesh_of(tp=2)], ids=["one rank", "two ranks"])
def test_absent_tangents_give_what_zero_tangents_give(name: str, mesh):
    whole = Whole.of(*cases()[name])
    graph = whole.captured.graph
    decisions = drawn(graph, mesh, 1, greedy=True) if mesh.axes else decide(graph, mesh)
    everyone = range(mesh.world_size)
    programs = [rewrite(whole.captured.joint, graph, decisions, rank) for rank in everyone]
    first = programs[0]
    tangents = [each.name for each in first.tangents]
    given = [[part(whole.values[v.name], v.layout, mesh, r) for v in first.inputs] for r in everyone]
    with torch.no_grad():
        made = lockstep.run([p.forward for p in programs], given, mesh)
    start = len(first.outputs) + len(first.mutations)
    saved = [
        [{"input": given[r], "output": made[r], "value": made[r][start:]}[s.source][s.index] for s in first.saved]
        for r in everyone
    ]

    subsets = (itertools.combinations(tangents, count + 1) for count in range(len(tangents)))
    for absent in itertools.chain.from_iterable(subsets):
        zeroed = {n: torch.zeros_like(t) if n in absent else t for n, t in whole.values.items()}
        held = [[part(zeroed[v.name], v.layout, mesh, r) for v in first.tangents] for r in everyone]
        arguments = [[*saved[r], *held[r]] for r in everyone]
        with torch.no_grad():
            full = lockstep.run([p.backward for p in programs], arguments, mesh)
            short = lockstep.run([p.backward_without(absent) for p in programs], arguments, mesh)
        for mine, want in zip(itertools.chain(*short), itertools.chain(*full), strict=True):
            if mine is None:
                assert want is None or not want.any()
            else:
                torch.testing.assert_close(mine, want)


def test_nothing_reads_an_absent_tangent():
    whole = Whole.of(*cases()["twin"])
    programs = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh_of()), 0)
    left = next(op.name for op in whole.captured.graph.ops if op.kind == "tangent" and op.target == "left")

    without = programs.backward_without([left])

    node = next(n for n in without.graph.find_nodes(op="placeholder") if n.name == left)
    assert not node.users
    assert len(without.graph.nodes) < len(programs.backward.graph.nodes)
