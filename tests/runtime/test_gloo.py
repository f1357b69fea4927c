"""Reduce-scatter by exchange against torch's own, on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.runtime.executable import compile_graph
from autopar.runtime.gloo import exchange_to_reduce
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
