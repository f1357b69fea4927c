"""The lockstep runner itself: what collectives give, and which programs it refuses."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.ir.mesh import Axis, Mesh
from tests.support.lockstep import Issued, LockstepError, run

ops = torch.ops._c10d_functional
MESH = Mesh((Axis("tp", 2), Axis("dp", 2)))
PAIR = Mesh((Axis("tp", 2),))


def graph(write: Callable[[fx.Graph, fx.Node], Any]) -> fx.Graph:
    """Return a program of one input, whose output `write` gives."""
    made = fx.Graph()
    made.output(write(made, made.placeholder("x")))
    return made


def collective(made: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Append a collective and the wait for it."""
    return made.call_function(ops.wait_tensor.default, (made.call_function(target, args),))


def values(program: fx.Graph, mesh: Mesh, *inputs: torch.Tensor, issued: list[list[Issued]] | None = None) -> list[Any]:
    """Return what the same program gives on every rank."""
    return run([program] * mesh.world_size, [[x] for x in inputs], mesh, issued=issued)


def test_all_reduce_joins_the_ranks_of_its_axis_alone() -> None:
    program = graph(lambda g, x: collective(g, ops.all_reduce.default, x, "sum", "tp"))
    inputs = [torch.tensor([float(10**rank)]) for rank in range(4)]

    made = values(program, MESH, *inputs)

    assert [int(each) for each in made] == [101, 1010, 101, 1010]


@pytest.mark.parametrize(("reduce", "wanted"), [("max", 3.0), ("min", 1.0), ("avg", 2.0), ("product", 3.0)])
def test_all_reduce_knows_its_reductions(reduce: str, wanted: float) -> None:
    program = graph(lambda g, x: collective(g, ops.all_reduce.default, x, reduce, "tp"))

    assert [each.item() for each in values(program, PAIR, torch.tensor(1.0), torch.tensor(3.0))] == [wanted] * 2


def test_gather_scatter_and_exchange_move_parts() -> None:
    a, b = torch.arange(4.0), torch.arange(4.0) + 10
    gather = graph(lambda g, x: collective(g, ops.all_gather_into_tensor.default, x, 2, "tp"))
    scatter = graph(lambda g, x: collective(g, ops.reduce_scatter_tensor.default, x, "sum", 2, "tp"))
    exchange = graph(lambda g, x: collective(g, ops.all_to_all_single.default, x, [2, 2], [2, 2], "tp"))

    assert values(gather, PAIR, a, b)[1].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [each.tolist() for each in values(scatter, PAIR, a, b)] == [[10, 12], [14, 16]]
    assert [each.tolist() for each in values(exchange, PAIR, a, b)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_coalesced_collectives_do_each_tensor() -> None:
    def write(g: fx.Graph, x: fx.Node) -> Any:
        both = g.call_function(ops.all_reduce_coalesced.default, ([x, x], "sum", "tp"))
        parts = [g.call_function(operator.getitem, (both, i)) for i in range(2)]
        return tuple(g.call_function(ops.wait_tensor.default, (each,)) for each in parts)

    issued: list[list[Issued]] = []
    made = values(graph(write), PAIR, torch.ones(3), torch.ones(3), issued=issued)

    assert [each.tolist() for each in made[0]] == [[2, 2, 2], [2, 2, 2]]
    assert issued[0] == [Issued("all_reduce", 0, 24, "sum")]


def test_message_is_the_larger_local_buffer() -> None:
    issued: list[list[Issued]] = []
    program = graph(lambda g, x: collective(g, ops.all_gather_into_tensor.default, x, 2, "tp"))

    values(program, PAIR, torch.ones(3), torch.ones(3), issued=issued)

    assert issued == [[Issued("all_gather", 0, 24)]] * 2


def test_result_read_before_its_wait_is_refused() -> None:
    def write(g: fx.Graph, x: fx.Node) -> fx.Node:
        started = g.call_function(ops.all_reduce.default, (x, "sum", "tp"))
        return g.call_function(torch.ops.aten.neg.default, (started,))

    with pytest.raises(LockstepError, match="neg_default reads all_reduce_default before it was waited for"):
        values(graph(write), PAIR, torch.ones(1), torch.ones(1))


def test_groups_in_different_order_on_two_ranks_are_said_to_hang() -> None:
    def write(first: str, second: str) -> fx.Graph:
        return graph(
            lambda g, x: collective(
                g, ops.all_reduce.default, collective(g, ops.all_reduce.default, x, "sum", first), "sum", second
            )
        )

    orders = [write("tp", "dp"), write("dp", "tp"), write("dp", "tp"), write("tp", "dp")]
    with pytest.raises(LockstepError, match="no group is complete, the program hangs: rank 0: all_reduce in tp"):
        run(orders, [[torch.ones(1)]] * 4, MESH)


def test_different_collectives_of_one_group_are_refused() -> None:
    programs = [graph(lambda g, x, r=r: collective(g, ops.all_reduce.default, x, r, "tp")) for r in ("sum", "max")]

    with pytest.raises(LockstepError, match=r"issue different collectives: all_reduce\('sum', 'tp'\)"):
        run(programs, [[torch.ones(1)]] * 2, PAIR)


def test_different_shapes_in_one_group_are_refused() -> None:
    program = graph(lambda g, x: collective(g, ops.all_reduce.default, x, "sum", "tp"))

    with pytest.raises(LockstepError, match=r"meet in all_reduce with shapes \[\(1,\), \(2,\)\]"):
        values(program, PAIR, torch.ones(1), torch.ones(2))


def test_rank_that_ends_early_leaves_the_others_hanging() -> None:
    program = graph(lambda g, x: collective(g, ops.all_reduce.default, x, "sum", "tp"))

    with pytest.raises(LockstepError, match="the program hangs: rank 0"):
        run([program, graph(lambda g, x: x)], [[torch.ones(1)]] * 2, PAIR)
