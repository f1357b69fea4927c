"""Every rule, every strategy, run on real parts against the whole: a new rule is tested by a call in `calls.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Replicate
from autopar.ir.strategy import MeshStrategy
from autopar.strategies import axis_strategies
from autopar.strategies.random import RULES as DRAWN
from autopar.strategies.table import RULES
from tests.strategies.calls import all_calls
from tests.strategies.one_op import Case, check, mesh_of, on_mesh, sample

CALLS = all_calls()

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


def each_makes_the_whole(case: Case, strategies: Iterable[MeshStrategy], mesh: Mesh) -> None:
    """Check every strategy of a call, and raise what was found of all of them together."""
    wrong = []
    for strategy in strategies:
        try:
            check(case, strategy, mesh)
        except Exception as error:  # noqa: BLE001
            error.add_note(f"of the strategy {' x '.join(map(str, strategy.axes))}")
            wrong.append(error)
    if wrong:
        raise ExceptionGroup(f"{len(wrong)} strategies of {case.id('')}", wrong)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id("2")) for case in CALLS])
def test_parts_make_the_whole(case: Case) -> None:
    alone = [on_mesh(case, (strategy,), (2,)) for strategy in case.strategies(2)]

    assert None not in alone
    each_makes_the_whole(case, alone, mesh_of((2,)))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id("2x2")) for case in CALLS])
def test_parts_of_two_axes_make_the_whole(case: Case) -> None:
    each_makes_the_whole(case, sample(case, (2, 2), 6, seed=1), mesh_of((2, 2)))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id("2x2x2")) for case in CALLS[::7]])
def test_parts_of_three_axes_make_the_whole(case: Case) -> None:
    each_makes_the_whole(case, sample(case, (2, 2, 2), 2, seed=2), mesh_of((2, 2, 2)))


def test_every_wrong_strategy_is_told() -> None:
    sums = next(case for case in CALLS if case.target == "aten.sum.dim_IntList")
    wrong = Case(sums.target, sums.args, sums.kwargs)
    vars(wrong)["whole"] = tuple(each + 1 for each in sums.whole if each is not None)
    strategies = [on_mesh(sums, (strategy,), (2,)) for strategy in sums.strategies(2)]

    with pytest.raises(ExceptionGroup) as caught:
        each_makes_the_whole(wrong, [each for each in strategies if each is not None], mesh_of((2,)))

    assert [each.__notes__ for each in caught.value.exceptions] == [
        [f"of the strategy {each}"] for each in sums.strategies(2)
    ]


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
