"""Every rule, every strategy, run on real parts against the whole: a new rule is tested by a call in `calls.py`."""

from __future__ import annotations

import pytest

from autopar.ir.placement import Replicate
from autopar.ir.strategy import Strategy
from autopar.strategies import axis_strategies
from autopar.strategies.random import RULES as DRAWN
from autopar.strategies.table import RULES
from tests.strategies.calls import all_calls
from tests.strategies.one_op import Case, check, mesh_of, on_mesh, sample

CALLS = all_calls()

PAIRS = [pytest.param(case, strategy, id=case.id(strategy)) for case in CALLS for strategy in case.strategies(2)]

WITHOUT_CPU_KERNEL = {
    "aten._fused_rms_norm_backward.default",
    "aten._scaled_dot_product_attention_math_for_mps.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_mm.default",
}
"""Operators of other devices; `test_device_kernels.py` checks the shapes that they make."""


@pytest.mark.parametrize(("case", "strategy"), PAIRS)
def test_parts_make_the_whole(case: Case, strategy: Strategy) -> None:
    alone = on_mesh(case, (strategy,), (2,))

    assert alone is not None
    check(case, alone, mesh_of((2,)))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id("2x2")) for case in CALLS])
def test_parts_of_two_axes_make_the_whole(case: Case) -> None:
    for strategy in sample(case, (2, 2), 6, seed=1):
        check(case, strategy, mesh_of((2, 2)))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id("2x2x2")) for case in CALLS[::7]])
def test_parts_of_three_axes_make_the_whole(case: Case) -> None:
    for strategy in sample(case, (2, 2, 2), 2, seed=2):
        check(case, strategy, mesh_of((2, 2, 2)))


@pytest.mark.parametrize("target", sorted(set(RULES) - WITHOUT_CPU_KERNEL - set(DRAWN)))
def test_every_rule_has_a_call(target: str) -> None:
    assert target in {case.target for case in CALLS}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id("R")) for case in CALLS])
def test_the_first_strategy_is_replicated(case: Case) -> None:
    found = axis_strategies(case.op, case.metas, 2)

    assert found.known
    assert all(
        placement in {Replicate(), None} for placement in (*found.strategies[0].inputs, *found.strategies[0].outputs)
    )
