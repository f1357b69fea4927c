"""Branches that ask only whether values are finite: captured as healthy training takes them, and checked."""

from __future__ import annotations

from contextvars import ContextVar

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, NotFiniteError

KEPT: ContextVar[float] = ContextVar("kept", default=0.5)


class _Clamping(nn.Module):
    """What DETR and its kin do after each layer in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if not torch.isfinite(hidden).all():
            hidden = hidden.clamp(-10.0, 10.0)
        return hidden.square().mean()


class _Raising(_Clamping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if torch.isnan(hidden).any() or hidden.isinf().sum() > 0:
            raise FloatingPointError("not finite")
        return hidden.square().mean()


class _Asking(_Clamping):
    """Asks about something that nothing else reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if not hidden.exp().isfinite().all():
            hidden = hidden.clamp(-10.0, 10.0)
        return hidden.square().mean()


class _Choosing(_Clamping):
    """Asks for more than finite values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if (hidden > 1.0).any():
            hidden = hidden.clamp(-1.0, 1.0)
        return hidden.square().mean()


class _Context(_Clamping):
    """Reads a context variable, and sets it for a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x) * KEPT.get()
        token = KEPT.set(3.0)
        hidden = hidden + KEPT.get()
        KEPT.reset(token)
        return (hidden * KEPT.get()).square().mean()


class _Told(_Clamping):
    """Makes its mask for itself unless it is compiled, as LongT5 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = None if torch.compiler.is_compiling() else torch.ones_like(x)  # type: ignore[assignment]
        return (self.layer(x) * mask.to(x.dtype)).square().mean()


def _compiled(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return autopar.compile(model, "cpu:1", example_inputs=(x,))


@pytest.mark.parametrize("kind", [_Clamping, _Raising, _Asking, _Context, _Told])
def test_finite_values_give_what_one_device_computes(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    wanted = model(x)
    wanted.backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    compiled = _compiled(model, x)
    loss = compiled(x)
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    assert len(gradients) == 2
    for each, grad in zip(compiled.parameters(), gradients, strict=True):
        torch.testing.assert_close(each.grad, grad)


@pytest.mark.parametrize("kind", [_Clamping, _Raising, _Asking])
def test_values_that_are_not_finite_are_told_with_the_line_that_asks(kind: type[nn.Module]) -> None:
    compiled = _compiled(kind(), torch.randn(3, 4))
    x = torch.randn(3, 4)
    x[1, 2] = float("inf")
    with pytest.raises(NotFiniteError, match=r"4 of 12 values that \S*test_finite.py:\d+ asks about are not finite"):
        compiled(x)


def test_other_branches_on_values_are_refused_as_before() -> None:
    with pytest.raises(CaptureError, match="control flow depends on tensor values"):
        capture(_Choosing(), (torch.randn(3, 4),))
