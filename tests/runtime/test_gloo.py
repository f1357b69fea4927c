"""What the runtime does around gloo's faults, on two gloo ranks."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.runtime import Ranks
from autopar.runtime.executable import compile_graph
from autopar.runtime.gloo import by_messages
from autopar.runtime.ranks import Groups
from tests.support.decide import mesh_of
from tests.support.ranks import RankPool

C10D = torch.ops._c10d_functional


CALLS = {
    "all_gather": (C10D.all_gather_into_tensor.default, (2,)),
    "several all_gathers": (C10D.all_gather_into_tensor_coalesced.default, (2,)),
    "several all_reduces": (C10D.all_reduce_coalesced.default, ("sum",)),
    "several all_reduces of maxima": (C10D.all_reduce_coalesced.default, ("max",)),
    "reduce_scatter": (C10D.reduce_scatter_tensor.default, ("sum", 2)),
    "several reduce_scatters": (C10D.reduce_scatter_tensor_coalesced.default, ("sum", 2)),
    "reduce_scatter of maxima": (C10D.reduce_scatter_tensor.default, ("max", 2)),
    "reduce_scatter of means": (C10D.reduce_scatter_tensor.default, ("avg", 2)),
}
SHAPES = ((4, 3), (2,), (4, 65536), (6, 2))
"""Two small ones, one that is sent, or summed, by itself, and one more that is small."""


def program(name: str, group: str) -> fx.GraphModule:
    """Return a program of one collective."""
    target, settings = CALLS[name]
    several = "several" in name
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(len(SHAPES) if several else 1)]
    start = graph.call_function(target, (values if several else values[0], *settings, group))
    parts = [graph.call_function(operator.getitem, (start, i)) for i in range(len(values))] if several else [start]
    graph.output(tuple(graph.call_function(C10D.wait_tensor.default, (part,)) for part in parts))
    return fx.GraphModule({}, graph)


def both_ways(rank: int, name: str) -> bool:
    generator = torch.Generator().manual_seed(rank)
    flat = program(name, dist.group.WORLD.group_name)
    found = []
    for _ in range(3):
        given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        given = given if "several" in name else given[:1]
        want = compile_graph(flat, {}, boxed=False)(*given)
        got = compile_graph(by_messages(flat), {}, boxed=False)(*given)
        found += [torch.equal(a, b) for a, b in zip(want, got, strict=True)]
    return all(found)


def exchanged(rank: int) -> list[float]:
    """Return what a rank gets of an exchange of unequal parts, of which one is empty."""
    sent, received = ([1, 0], [1, 2]) if rank == 0 else ([2, 1], [0, 1])
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(C10D.all_to_all_single.default, (x, received, sent, dist.group.WORLD.group_name))
    graph.output((graph.call_function(C10D.wait_tensor.default, (start,)),))
    (got,) = compile_graph(by_messages(fx.GraphModule({}, graph)), {}, boxed=False)(
        torch.arange(float(sum(sent))) + 10 * rank
    )
    return got.tolist()


@pytest.mark.parametrize("name", [name for name in CALLS if "means" not in name])
def test_messages_from_rank_to_rank_give_what_the_collective_gives(pool: RankPool, name: str):
    assert pool.values(both_ways, name) == [True, True]


def test_exchanged_parts_may_be_unequal_or_empty(pool: RankPool):
    assert pool.values(exchanged) == [[0.0, 10.0, 11.0], [12.0]]


@pytest.mark.parametrize("name", CALLS)
def test_what_messages_can_do_is_done_by_them_and_the_given_program_stays(name: str):
    gm = program(name, "g")

    made = by_messages(gm)

    spaces = {getattr(node.target, "namespace", "") for node in made.graph.nodes}
    assert ("autopar_direct" in spaces) is ("means" not in name)
    assert [node.target for node in gm.graph.nodes].count(CALLS[name][0]) == 1


def threads_of_an_axis(rank: int) -> tuple[int, list[float]]:
    groups = Groups.of(mesh_of(tp=2), Ranks.join("cpu"))
    group = groups.device_mesh.get_group("tp")
    gather, wait = C10D.all_gather_into_tensor.default, C10D.wait_tensor.default
    started = [gather(torch.full((1,), float(rank + 2 * i)), 2, groups.names["tp"]) for i in range(100)]
    found = torch.cat([wait(each) for each in started])
    return group._get_backend(torch.device("cpu")).options._threads, found.tolist()


def test_collectives_of_a_mesh_axis_complete_on_one_thread(pool: RankPool):
    """Two threads of one group would write the name of the last collective at once, and corrupt the heap."""
    for threads, gathered in pool.values(threads_of_an_axis):
        assert threads == 1
        assert gathered == list(range(200))
