"""Which operators pass terms of a sum on: what is linear, of real and of complex numbers."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.placement import Partial
from tests.strategies.make import c, f, i
from tests.strategies.one_op import Case

_X = torch.complex(f(4, 6), f(4, 6))

LINEAR = (
    c("_fft_r2c.default", f(4, 6), [1], 0, True),
    c("_fft_c2r.default", _X, [1], 0, 10),
    c("_fft_c2c.default", _X, [1], 0, True),
    c("complex.default", f(4, 6), f(4, 6)),
    c("sum.dim_IntList", _X, [1]),
    c("cumsum.default", _X, 1),
    c("tril.default", _X),
    c("grid_sampler_2d.default", f(4, 2, 6, 6), f(4, 3, 3, 2), 0, 0, False),
    c("channel_shuffle.default", f(4, 8, 6), 2),
)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.target) for case in LINEAR])
def test_of_terms_come_terms(case: Case) -> None:
    found = case.strategies(2)

    assert any(Partial() in each.inputs and set(each.outputs) == {Partial()} for each in found)


@pytest.mark.parametrize("source", [_X, f(4, 6)], ids=["complex", "real"])
@pytest.mark.parametrize("target", ["new_zeros.default", "zeros_like.default"])
def test_a_constant_may_be_shaped_like_terms(target: str, source: torch.Tensor) -> None:
    case = c(target, source, *([[4, 8]] if "new" in target else []))

    assert any(each.inputs == (Partial(),) for each in case.strategies(2))


def test_whole_numbers_are_no_terms() -> None:
    for case in (c("zeros_like.default", i(8, 4, 6)), c("tril.default", i(8, 4, 6)), c("cumsum.default", i(8, 4), 0)):
        assert not any(Partial() in each.inputs for each in case.strategies(2))
