"""What operators do along the axis of micro-batches, run in float64 on the parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

from autopar.ir.placement import Partial, Replicate
from autopar.ir.strategy import Strategy
from autopar.strategies import axis_strategies
from autopar.strategies.call import Call
from autopar.strategies.compose import AxisSpec, compose
from autopar.strategies.own_rows import linear
from autopar.strategies.row_facts import Fact, Seen
from tests.strategies.calls import all_calls
from tests.strategies.one_op import Case
from tests.support.remembering import remembered
from tests.support.routing import Experts, routing

COUNT = 4


def along(model: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> dict[str, list[str]]:
    """Return what operators do in time, by target, in program order."""
    graph = remembered(model, example).graph
    choices = compose(graph, (AxisSpec(COUNT, "time", shard_parameters=False),), axis_strategies)
    told: dict[str, list[str]] = {}
    for op in graph.ops:
        if op.kind == "call":
            told.setdefault(op.target, []).append(str(choices.of[graph.representative(op.name)][0].axes[0]))
    return told


def of_terms(case: Case) -> Strategy | None:
    """Return what an operator makes of terms of its first input, or of the gradients that it is given."""
    call = Call(case.op, case.metas, COUNT, ())
    slots = call.gradients or [0]
    now = tuple(Partial() if slot in slots else Replicate() for slot in range(len(case.metas)))
    found = linear(Seen(case.op, call, now, (Fact(),) * len(now), {}))
    return None if found is None else found[0]


def made(case: Case, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return what the operator of a case gives for other tensors."""
    given = iter(tensors)
    put = partial(pytree.tree_map, lambda each: next(given) if isinstance(each, torch.Tensor) else each)
    return Case(case.target, tuple(put(list(case.args))), put(case.kwargs)).whole


def test_tokens_are_sorted_counted_and_put_back_within_a_micro_batch():
    told = along(*routing()["experts"])

    assert set(told["aten.sort.default"]) == {"S0->S0,S0 (own)"}
    assert set(told["aten.histc.default"]) == {"S0->P"}
    assert set(told["aten.cumsum.default"]) == {"P->P (own)"}
    assert "S0,R,P->S0 (own)" in told["transformers.grouped_mm_fallback.default"]
    assert {"S0,S0->S0 (own)"} == set(told["aten.index.Tensor"])


def test_one_row_is_read_and_written_for_each_sample():
    told = along(*routing()["picked"])

    assert "S0,S0,S0->S0 (own)" in told["aten.index.Tensor"]
    assert "S0,S0,S0,S0->S0 (own)" in told["aten.index_put.default"]


def test_one_row_is_read_and_written_for_each_of_two_batches_behind_each_other():
    told = along(*routing()["pairs"])

    assert told["aten.index.Tensor"] == ["S0/2,S0,S0/2->S0/2 (own)"]
    assert told["aten.index_put.default"] == ["S0/2,S0,S0/2,S0/2->S0/2 (own)"]


def test_counts_of_other_tokens_than_the_sorted_ones_group_nothing():
    class Other(Experts):
        def mixed(self, tokens, best, experts, w):
            return super().mixed(tokens, best, experts, w) + self.apart(tokens, experts, w)

        def apart(self, tokens, experts, w):
            order = experts[:, 0].sort()[1]
            ends = torch.histc(experts[:, 1].float(), 4, min=0, max=3).cumsum(0, dtype=torch.int32)
            return torch.ops.transformers.grouped_mm_fallback(tokens[order], w, ends)

    told = along(Other(layers=1), (torch.randn(8, 3, 8),))

    assert "S0,R,P->S0 (own)" in told["transformers.grouped_mm_fallback.default"]
    assert "R,R,R->R" in told["transformers.grouped_mm_fallback.default"]


TERMS = [(case, found) for case in all_calls() if (found := of_terms(case)) is not None]


@pytest.mark.parametrize(("case", "strategy"), TERMS, ids=[case.id(strategy) for case, strategy in TERMS])
def test_terms_of_a_gradient_make_terms_of_what_it_gives(case: Case, strategy: Strategy):
    terms = [
        [torch.randn_like(t) if p == Partial() else t for t, p in zip(case.tensors, strategy.inputs, strict=True)]
        for _ in range(COUNT)
    ]
    beside = zip(*terms, strict=True)
    summed = [sum(each) if p == Partial() else each[0] for each, p in zip(beside, strategy.inputs, strict=True)]

    parts = [made(case, each) for each in terms]

    for index, want in enumerate(made(case, summed)):
        if case.op.outputs[index] is not None:
            torch.testing.assert_close(sum(part[index] for part in parts), want)


def test_products_and_gradients_are_among_these():
    targets = {case.target for case, _ in TERMS}

    assert {"aten.mm.default", "aten.bmm.default", "aten.convolution_backward.default"} <= targets
    assert {"aten._weight_norm_interface_backward.default", "aten.native_layer_norm_backward.default"} <= targets
