"""The captured program of small transformers models, run on real values, is what eager computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.models.hf_tiny import tiny, tiny_names
from tests.capture.program import run

QUICK = {"llama", "gpt2", "bert", "t5", "vit", "resnet", "mixtral", "whisper"}
CASES = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in tiny_names()]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_eager(name: str):
    model, kwargs = tiny(name)
    before = {key: each.clone() for key, each in model.named_buffers()}

    ran = run(capture(model, kwargs), model, (), kwargs)

    for key, each in model.named_buffers():
        torch.testing.assert_close(each, before[key], rtol=0, atol=0)
    out: Any = model(**kwargs)
    out.loss.backward()
    assert type(ran.result) is type(out)
    torch.testing.assert_close(ran.result.loss, out.loss.detach(), rtol=1e-6, atol=0)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert _distance(ran.gradients[key], parameter.grad) < 1e-5, key
        else:
            assert ran.gradients.get(key) is None, key


def _distance(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))
