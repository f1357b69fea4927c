"""Dtypes that operators refuse when they run are refused when the model is captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.errors import CaptureError

_X = torch.randn(4, 3, 8)
_INTS = torch.ones(4, 3, 8, dtype=torch.int64)


class Step(nn.Module):
    """One parameter, and a function of it and an input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=dtype))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.weight).sum()  # here


def _written(x: Tensor, weight: Tensor) -> Tensor:
    made = torch.zeros(4, 8, dtype=torch.bfloat16)
    return made.index_add(0, torch.arange(4), x[:, 0] @ weight)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, str]] = {
    "whole numbers into a layer": (
        lambda x, w: functional.linear(x, w, w[0]),
        _INTS,
        "addmm takes tensors of one dtype, and gets float32 of shape [8], int64 of shape [12, 8], "
        "float32 of shape [8, 8]",
    ),
    "whole numbers into a layer without bias": (
        functional.linear,
        _INTS,
        "a layer of floats gets tensors of whole numbers, say",
    ),
    "float64 data into a layer": (
        functional.linear,
        _X.double(),
        "mm takes tensors of one dtype, and gets float64 of shape",
    ),
    "a layer's bias": (lambda x, w: functional.linear(x, w, w[0].bfloat16()), _X, "addmm takes tensors of one dtype"),
    "a vector": (lambda x, w: w @ x[0, 0], _X.double(), "mv takes tensors of one dtype"),
    "a norm of float64": (lambda x, w: functional.layer_norm(x, (8,), w[0]), _X.double(), "native_layer_norm takes"),
    "rows added to others": (_written, _X, "index_add takes tensors of one dtype, and gets bfloat16 of shape [4, 8]"),
    "whole numbers into an activation": (
        lambda x, w: functional.gelu(x) * w,
        torch.ones(8, 8, dtype=torch.int64),
        "gelu takes floats, and gets int64 of shape [8, 8]",
    ),
    "shares of whole numbers": (lambda x, w: x.softmax(0) * w, _INTS[0, 0], "softmax takes floats, and gets int64"),
    "a spread of whole numbers": (lambda x, w: x.var() * w, _INTS, "var takes floats, and gets int64"),
    "targets that are no shares": (
        lambda x, w: functional.binary_cross_entropy(w[0].sigmoid(), x),
        _INTS[0, 0],
        "binary_cross_entropy takes tensors of one dtype, and gets float32 of shape [8], int64 of shape [8]",
    ),
    "classes of 32 bits": (
        lambda x, w: functional.cross_entropy((x * w[0])[:, 0], torch.arange(4, dtype=torch.int32)),
        _X,
        "its loss takes classes of int64, and gets int32 of shape [4]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_to_run_is_refused_with_its_line(name: str):
    function, x, text = REFUSED[name]

    with pytest.raises(RuntimeError):
        Step(function)(x)
    with pytest.raises(CaptureError) as caught:
        capture(Step(function), (x,))

    assert text in str(caught.value)
    assert "\n  at tests/capture/test_dtypes.py:" in str(caught.value)


RUN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "whole numbers by whole numbers": (lambda x, w: (x @ x.transpose(1, 2)).to(w.dtype) * w[0, 0], _INTS),
    "a norm of 16 bits with weights of 32": (lambda x, w: functional.layer_norm(x, (8,), w[0], w[1]), _X.bfloat16()),
    "promotion": (lambda x, w: x * w[0] + 1, _X.double()),
}


@pytest.mark.parametrize("name", RUN)
def test_what_torch_runs_is_captured(name: str):
    function, x = RUN[name]

    Step(function)(x)
    assert capture(Step(function), (x,)).graph.ops


def test_autocast_makes_the_dtypes_of_a_layer_one():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert capture(Step(functional.linear), (_X,)).graph.ops
