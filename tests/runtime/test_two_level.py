"""Collectives in two levels on four gloo ranks, two by two: equal to flat ones within rounding."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.api import plan_captured
from autopar.capture import Captured
from autopar.ir.plan import Collective, Decisions
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import rewrite
from autopar.rewrite.emitted import message_bytes
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.level_ops import LEVELS
from autopar.rewrite.marks import C10D, COLLECTIVES, WAIT, Mark
from autopar.rewrite.two_level import RunInLevels
from autopar.runtime import Ranks
from autopar.runtime.executable import compile_graph
from autopar.runtime.experts import rows_sent
from autopar.runtime.ranks import Groups
from autopar.runtime.two_level import Levels
from cost_models.cluster import ClusterSpec
from tests.support.compiling import compile_with
from tests.support.decide import mesh_of
from tests.support.models import cases
from tests.support.ranks import RankPool

LINE = mesh_of(dp_replicate=4)


CALLS = {
    "all_reduce": (C10D.all_reduce.default, ("sum",)),
    "all_reduce of maxima": (C10D.all_reduce.default, ("max",)),
    "several all_reduces": (C10D.all_reduce_coalesced.default, ("sum",)),
    "all_gather": (C10D.all_gather_into_tensor.default, (4,)),
    "several all_gathers": (C10D.all_gather_into_tensor_coalesced.default, (4,)),
    "reduce_scatter": (C10D.reduce_scatter_tensor.default, ("sum", 4)),
    "several reduce_scatters": (C10D.reduce_scatter_tensor_coalesced.default, ("sum", 4)),
    "all_to_all": (C10D.all_to_all_single.default, ([2, 2, 2, 2], [2, 2, 2, 2])),
}


def program(name: str, shapes: tuple[tuple[int, ...], ...]) -> fx.GraphModule:
    """Return a program of one flat collective of the axis, with what the rewriter notes on its nodes."""
    target, settings = CALLS[name]
    several = "several" in name
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    start = graph.call_function(target, (values if several else values[0], *settings, "dp_replicate"))
    start.meta["autopar"] = Mark("sum", "backward", "start")
    for value, shape in zip(values, shapes, strict=True):
        value.meta["val"] = torch.empty(shape, dtype=torch.float64, device="meta")
    scale = 4 if "gather" in name else 1
    kept = 4 if "scatter" in name else 1
    made = [torch.empty((s[0] * scale // kept, *s[1:]), dtype=torch.float64, device="meta") for s in shapes]
    start.meta["val"] = made if several else made[0]
    parts = [graph.call_function(operator.getitem, (start, i)) for i in range(len(shapes))]
    waits = [graph.call_function(WAIT, (part,)) for part in (parts if several else [start])]
    graph.output(tuple(waits))
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)


def both_ways(rank: int, name: str, chunks: int) -> list[float]:
    shapes = ((4, 3), (8,), (12, 2)) if "several" in name else ((8, 5),)
    groups = Groups.of(LINE, Ranks.join("cpu"), {}, {("dp_replicate", 2)})
    generator = torch.Generator().manual_seed(rank)
    flat, levels = program(name, shapes), program(name, shapes)
    start = next(node for node in levels.graph.nodes if node.target in COLLECTIVES)
    kind = (COLLECTIVES[start.target], "dp_replicate", message_bytes(start))
    assert RunInLevels({kind: (2, chunks)})(levels) == 1
    levels.graph.lint()
    off = []
    for _ in range(3):
        given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        want = compile_graph(flat, groups.names, boxed=False)(*[each.clone() for each in given])
        got = compile_graph(levels, groups.names, boxed=False)(*[each.clone() for each in given])
        off += [float((a - b).abs().max()) for a, b in zip(want, got, strict=True)]
        off += [float(a.shape != b.shape) for a, b in zip(want, got, strict=True)]
    return off


@pytest.mark.parametrize(("name", "chunks"), [*((name, 1) for name in CALLS), *((name, 3) for name in list(CALLS)[:3])])
def test_a_collective_in_two_levels_gives_what_the_flat_one_gives(four: RankPool, name: str, chunks: int):
    for off in four.values(both_ways, name, chunks):
        assert max(off) <= 1e-14


def by_library(rank: int) -> list[float]:
    """Return how far the collectives of devices with streams are from flat ones, here on gloo's tensors."""
    names = Groups.of(LINE, Ranks.join("cpu"), {}, {("dp_replicate", 2)}).names
    sent = Levels.named(names["dp_replicate:inner2"], names["dp_replicate:outer2"], torch.device("cpu"))
    levels = Levels(replace(sent.inner, direct=False), replace(sent.outer, direct=False))
    value = torch.randn(16, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    reduced, gathered, scattered = value.clone(), value.new_empty(64, 3), value.new_empty(4, 3)
    exchanged, swapped = torch.empty_like(value), torch.empty_like(value)
    levels.all_reduce([reduced], "sum", 1)
    levels.all_gather([value], [gathered])
    levels.reduce_scatter([value], [scattered], "sum")
    levels.all_to_all([value], [exchanged])
    whole, every = value.clone(), value.new_empty(64, 3)
    dist.all_reduce(whole)
    dist.all_gather_into_tensor(every, value)
    dist.all_to_all_single(swapped, value)
    pairs = ((reduced, whole), (gathered, every), (scattered, whole[4 * rank : 4 * rank + 4]), (exchanged, swapped))
    return [float((a - b).abs().max()) for a, b in pairs]


def test_the_chains_of_devices_with_streams_give_what_flat_collectives_give(four: RankPool):
    for off in four.values(by_library):
        assert max(off) <= 1e-14


UNEVEN = [[3, 0, 1, 2, 0, 0, 4, 1], [0, 0, 0, 0, 0, 0, 0, 5], [2, 2, 2, 2, 2, 2, 2, 2], [0, 1, 0, 0, 3, 0, 0, 0]]
"""How many rows each rank has for each of 8 experts, two a rank."""


def rows_exchanged(rank: int, back: bool) -> list[bool]:
    """Return whether rows for experts go as at once: in two levels by operators, and by the library's collectives."""
    names = Groups.of(LINE, Ranks.join("cpu"), {}, {("dp_replicate", 2)}).names
    sizes = torch.tensor(UNEVEN)
    known = EXPERTS.known(sizes.cumsum(1).to(torch.int32).flatten(), 4)
    sent = rows_sent(known, back=back)
    rows = torch.randn((int(sent[rank].sum()), 3), generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    flat = WAIT(EXPERTS.exchange(rows, known, rank, back, names["dp_replicate"]))
    groups = tuple(names[f"dp_replicate{level}"] for level in (":inner2", ":outer2", ""))
    (levels,) = map(WAIT, LEVELS.exchange([rows], known, rank, back, *groups))
    direct = Levels.named(*groups[:2], torch.device("cpu"))
    by_library = Levels(replace(direct.inner, direct=False), replace(direct.outer, direct=False))
    brought = torch.empty_like(flat)
    by_library.exchange(rows, brought, sent)
    return [torch.equal(flat, levels), torch.equal(flat, brought), flat.shape[0] == int(sent[:, rank].sum()) > 0]


@pytest.mark.parametrize("back", [False, True])
def test_rows_reach_their_experts_in_two_levels_as_at_once(four: RankPool, back: bool):
    assert four.values(rows_exchanged, back) == [[True, True, True]] * 4


FIXED = {"replicated": {"dp_replicate": 4}, "sharded": {"dp_shard": 4, "zero": 3}}


def in_levels(captured: Captured, decisions: Decisions) -> Decisions:
    """Return the decisions with all collectives in two levels of two."""
    emitted = rewrite(captured.joint, captured.graph, decisions, 0).emitted
    made = {
        (each.op, each.axis, each.bytes): Collective(
            op=each.op, axis=each.axis, level="", bytes=each.bytes, count=1, phase=each.phase, tensor=each.tensor,
            overlapped=True, predicted_s=0.0, stream=each.axis, inner=2, chunks=2,
        )
        for each in emitted
    }  # fmt: skip
    return replace(decisions, collectives=tuple(made.values()), streams={})


def planned(captured: Captured, name: str, levels: bool) -> Decisions:
    options = PlanOptions.parse(fix=FIXED[name], two_level=False)
    decisions = plan_captured(captured, "mlp", ClusterSpec.parse("cpu:2x2"), options, Silent()).decisions
    made = in_levels(captured, decisions) if levels else replace(decisions, streams={})
    issued = rewrite(captured.joint, captured.graph, made, 0).emitted
    assert len(issued) > 1
    assert {each.inner for each in issued} == {2 if levels else 1}
    return made


def gradients(rank: int, name: str, levels: bool) -> list[torch.Tensor]:
    model, example = cases()["mlp"]
    mesh = mesh_of(**{key: size for key, size in FIXED[name].items() if key != "zero"})
    mine = compile_with(model, example, mesh, decide_by=lambda captured: planned(captured, name, levels))
    for _ in range(3):
        mine.zero_grad()
        mine(*example)[1].backward()
    return [parameter.grad.to_local().clone() for parameter in mine.parameters()]


@pytest.mark.parametrize("name", FIXED)
def test_gradients_are_those_of_flat_collectives_within_rounding(four: RankPool, name: str):
    flat, levels = four.values(gradients, name, False), four.values(gradients, name, True)
    for wanted, found in zip(flat, levels, strict=True):
        torch.testing.assert_close(found, wanted)
    if name == "replicated":
        for other in levels[1:]:
            assert all(torch.equal(a, b) for a, b in zip(levels[0], other, strict=True))
