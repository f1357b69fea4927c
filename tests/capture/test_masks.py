"""Masks made of constants become what kernels have an argument for; all others stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from autopar.capture import capture

SEQ = 6


class Masked(nn.Module):
    """Attention under a mask made in forward, from positions or from what the caller gives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(8, 8)

    def mask(self, keep: torch.Tensor) -> torch.Tensor:
        i, j = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None, :]
        return {
            "causal": lambda: (j <= i)[None, None],
            "empty": lambda: torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool),
            "added": lambda: torch.zeros(SEQ, SEQ).masked_fill(j > i, torch.finfo(torch.float32).min),
            "window": lambda: (j <= i) & (j > i - 3),
            "bias": lambda: -(i - j).abs().float(),
            "given": lambda: (j <= i)[None, None] & keep[:, None, None, :],
        }[self.kind]()

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q = self.inner(x).view(2, SEQ, 2, 4).transpose(1, 2)
        return nnf.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(keep)).sum()


def attention(kind: str):
    """Return the joint program and its attention operators."""
    torch.manual_seed(0)
    model = Masked(kind)
    keep = torch.ones(2, SEQ, dtype=torch.bool)
    captured = capture(model, (torch.randn(2, SEQ, 8), keep))
    found = [op for op in captured.graph.ops if "flash_attention" in op.target]
    return captured, found


@pytest.mark.parametrize(
    ("kind", "causal"), [("causal", True), ("added", True), ("empty", False)], ids=lambda each: str(each)
)
def test_a_constant_mask_becomes_the_kernels_argument(kind, causal):
    captured, found = attention(kind)

    assert len(found) == 2
    assert [op.args[-1] for op in found] == [causal, causal]
    assert all("attn_mask" not in dict(op.kwargs) for op in found)
    assert not [op for op in captured.graph.ops if op.target.startswith(("aten.where", "aten.arange"))]


@pytest.mark.parametrize("kind", ["window", "bias", "given"])
def test_any_other_mask_stays(kind):
    _, found = attention(kind)

    assert len(found) == 2
    assert all("attn_mask" in dict(op.kwargs) for op in found)


@pytest.mark.parametrize("kind", ["causal", "added", "empty", "window", "bias", "given"])
def test_numbers_are_those_of_the_model(kind):
    import autopar

    torch.manual_seed(0)
    model = Masked(kind)
    inputs = (torch.randn(2, SEQ, 8), torch.ones(2, SEQ, dtype=torch.bool))
    want = model(*inputs)
    want.backward()
    gradient = model.inner.weight.grad.clone()
    model.zero_grad()
    compiled = autopar.compile(model, "cpu:1", example_inputs=inputs)

    got = compiled(*inputs)
    got.backward()

    torch.testing.assert_close(got, want)
    torch.testing.assert_close(compiled.inner.weight.grad, gradient)
