"""What the runtime does around gloo's faults, on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.runtime import Ranks
from autopar.runtime.executable import compile_graph
from autopar.runtime.gloo import exchange_to_reduce
from autopar.runtime.ranks import Groups
from tests.support.decide import mesh_of
from tests.support.ranks import RankPool

C10D = torch.ops._c10d_functional


def scattering(reduce: str, group: str) -> fx.GraphModule:
    """Return a program that reduces [4, 3] over two ranks and keeps [2, 3]."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(C10D.reduce_scatter_tensor.default, (x, reduce, 2, group))
    start.meta["val"] = torch.empty(2, 3, device="meta")
    graph.output((graph.call_function(C10D.wait_tensor.default, (start,)),))
    return fx.GraphModule({}, graph)


def both_ways(rank: int) -> bool:
    group = dist.group.WORLD.group_name
    x = torch.arange(12, dtype=torch.float64).reshape(4, 3) * (rank + 1)
    own = scattering("sum", group)
    (want,) = compile_graph(own, {}, boxed=False)(x)
    (got,) = compile_graph(exchange_to_reduce(own), {}, boxed=False)(x)
    return torch.equal(want, got)


def test_the_exchange_gives_what_reduce_scatter_gives():
    with RankPool(2) as pool:
        assert pool.values(both_ways) == [True, True]


@pytest.mark.parametrize(("reduce", "calls"), [("sum", C10D.all_to_all_single.default), ("max", None)])
def test_only_sums_are_exchanged_and_the_given_program_stays(reduce, calls):
    gm = scattering(reduce, "g")

    made = exchange_to_reduce(gm)

    own = C10D.reduce_scatter_tensor.default
    assert [node.target for node in gm.graph.nodes].count(own) == 1
    assert [node.target for node in made.graph.nodes].count(calls or own) == 1


def threads_of_an_axis(rank: int) -> tuple[int, list[float]]:
    groups = Groups.of(mesh_of(tp=2), Ranks.join("cpu"))
    group = groups.device_mesh.get_group("tp")
    gather, wait = C10D.all_gather_into_tensor.default, C10D.wait_tensor.default
    started = [gather(torch.full((1,), float(rank + 2 * i)), 2, groups.names["tp"]) for i in range(100)]
    found = torch.cat([wait(each) for each in started])
    return group._get_backend(torch.device("cpu")).options._threads, found.tolist()


def test_collectives_of_a_mesh_axis_complete_on_one_thread():
    """Two threads of one group would write the name of the last collective at once, and corrupt the heap."""
    with RankPool(2) as pool:
        for threads, gathered in pool.values(threads_of_an_axis):
            assert threads == 1
            assert gathered == list(range(200))
