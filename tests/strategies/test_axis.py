"""Where strategies come from, and what is said of operators that nothing knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.experimental import register_sharding

from autopar.ir.graph import Const, Op, Ref
from autopar.ir.placement import Shard
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta
from autopar.strategies import axis_strategies
from tests.strategies.make import c, f

_register: Any = register_sharding


@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    """Return operators that only this module knows."""
    made: Any = torch.library.Library("only_here", "DEF")  # type: ignore[no-untyped-call]
    made.define("twice(Tensor x, int times) -> Tensor")
    made.define("odd(Tensor x) -> Tensor")
    for name in ("twice", "odd"):
        made.impl(name, lambda x, *_: x * 2, "CompositeExplicitAutograd")
    return made


def op(target: str, *shapes: tuple[int, ...], literals: tuple[object, ...] = ()) -> tuple[Op, tuple[TensorMeta, ...]]:
    """Return an operator that keeps the shape of its first tensor, and the metas of what it reads."""
    metas = tuple(TensorMeta(shape, "float32") for shape in shapes)
    args = (*(Ref(f"t{i}") for i in range(len(metas))), *literals)
    return Op(name="op", kind="call", target=target, args=args, outputs=metas[:1]), metas  # type: ignore[arg-type]


def shown(found: tuple[Strategy, ...]) -> list[str]:
    """Return strategies as text."""
    return [str(each) for each in found]


def test_unknown_operator_is_replicated_and_said_to_be_unknown(library: torch.library.Library) -> None:
    found = axis_strategies(*op("only_here.odd.default", (4, 6)), 2, ())

    assert shown(found.strategies) == ["R->R"]
    assert not found.known


def test_operator_that_torch_lacks_is_unknown() -> None:
    found = axis_strategies(*op("nowhere.at_all.default", (4, 6)), 2, ())

    assert (shown(found.strategies), found.known) == (["R->R"], False)


def test_rule_of_the_user_is_taken(library: torch.library.Library) -> None:
    @_register(torch.ops.only_here.twice.default)
    def _rule(x: object, times: int) -> list[tuple[list[object], list[object]]]:
        return [([Whole()], [Whole(), None]), ([Split(1)], [Split(1), None])]

    found = axis_strategies(*op("only_here.twice.default", (4, 6), literals=(3,)), 2, ())

    assert shown(found.strategies) == ["R->R", "S1->S1"]
    assert found.known


def test_rule_of_the_user_comes_before_our_own() -> None:
    tables = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    target = torch.ops.aten.mm.default
    before = tables.get(target)
    try:

        @_register(target)
        def _rule(a: object, b: object) -> list[tuple[list[object], list[object]]]:
            return [([Split(0)], [Split(0), Whole()])]

        found = axis_strategies(*op("aten.mm.default", (4, 4), (4, 4)), 2, ())
    finally:
        tables.pop(target)
        if before is not None:
            tables[target] = before

    assert shown(found.strategies) == ["R,R->R", "S0,R->S0"]


def test_rule_of_the_user_that_does_not_fit_is_refused(library: torch.library.Library) -> None:
    @_register(torch.ops.only_here.twice.default)
    def _rule(x: object, times: int) -> list[tuple[list[object], list[object]]]:
        return [([Whole()], [None, None])]

    with pytest.raises(
        ValueError, match=r"only_here.twice.default places 0 inputs and 1 outputs; this call has 1 and 1"
    ):
        axis_strategies(*op("only_here.twice.default", (4, 6), literals=(3,)), 2, ())


def test_operator_of_dtensor_alone_is_asked_of_its_registry() -> None:
    metas = (TensorMeta((4, 6, 3), "float32"),) * 2
    cross = Op(
        name="op",
        kind="call",
        target="aten.linalg_cross.default",
        args=(Ref("a"), Ref("b")),
        kwargs=(("dim", -1),),
        outputs=metas[:1],
    )
    aminmax = Op(
        name="op",
        kind="call",
        target="aten._foreach_abs.default",
        args=((Ref("a"), Ref("b")),),
        outputs=metas,
    )

    for each, reads in ((cross, metas), (aminmax, metas)):
        found = axis_strategies(each, reads, 2, ())
        assert shown(found.strategies)[0] == f"{','.join('R' * len(reads))}->{','.join('R' * len(each.outputs))}"


def test_asking_needs_no_process_group_and_leaves_none() -> None:
    axis_strategies(*op("aten._foreach_abs.default", (4, 6)), 2, ())

    assert not dist.is_initialized()


def test_only_even_splits_are_offered() -> None:
    found = axis_strategies(*op("aten.relu.default", (4, 6)), 4, ())

    assert shown(found.strategies) == ["R->R", "S0->S0"]


def test_terms_of_truth_values_are_not_offered() -> None:
    case = c("view.default", torch.ones(4, 6, dtype=torch.bool), [24])

    assert all("P" not in str(each) for each in case.strategies(2))


def test_merged_sequence_split_is_carried_through_a_layer() -> None:
    merge = c("view.default", f(2, 8, 6), [16, 6])
    product = c("mm.default", f(16, 6), f(6, 4))

    made = {each.outputs[0] for each in axis_strategies(merge.op, merge.metas, 4, ()).strategies}
    found = axis_strategies(product.op, product.metas, 4, (frozenset({Shard(0, 2)}), frozenset()))

    assert Shard(0, 2) in made
    assert "S0/2,R->S0/2" in shown(found.strategies)


def test_fused_projection_splits_by_heads() -> None:
    split = c("split.Tensor", f(4, 24), 8, 1)

    found = axis_strategies(split.op, split.metas, 4, ())

    assert "S1/3->S1,S1,S1" in shown(found.strategies)


def test_literals_of_all_kinds_reach_the_registry() -> None:
    meta, summed = TensorMeta((4, 6), "float32"), TensorMeta((6,), "float32")
    made = Op(
        name="op",
        kind="call",
        target="aten.sum.IntList_out",
        args=(Ref("a"), (0,)),
        kwargs=(("dtype", Const("dtype", "float32")), ("out", Ref("b"))),
        outputs=(summed,),
    )

    assert axis_strategies(made, (meta, summed), 2, ()).strategies[0].outputs[0] is not None


def test_vocabulary_parallel_loss_never_gathers_scores() -> None:
    scores = f(8, 12)
    softmax = c("_log_softmax.default", scores, 1, False)
    loss = c("nll_loss_forward.default", torch.log_softmax(scores, 1), torch.zeros(8, dtype=torch.long), None, 1, -100)

    assert "S1->S1 (class)" in shown(softmax.strategies(2))
    assert "S1,R->P,R (vocab)" in shown(loss.strategies(2))
