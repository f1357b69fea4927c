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


def test_hidden_states_of_a_model_inside_of_models_are_recorded_once():
    """Backbones have recorders from the start; those of the model around them came on top, and each state twice."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    torch.manual_seed(0)
    stages = [f"stage{i}" for i in range(1, 5)]
    backbone = Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14,
        out_features=stages, reshape_hidden_states=False, apply_layernorm=True,
    )  # fmt: skip
    config = DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=16, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        patch_size=14, head_hidden_size=8,
    )  # fmt: skip
    model, pictures = DepthAnythingForDepthEstimation(config).train(), torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)  # as they are made, layers hardly differ in what they give

    program = capture(model, {"pixel_values": pictures}, with_backward=False)

    ran = run(program, model, (), {"pixel_values": pictures})
    with torch.no_grad():
        wanted = model(pictures).predicted_depth
    assert wanted.std() > 0
    torch.testing.assert_close(ran.result.predicted_depth, wanted, rtol=1e-3, atol=1e-3)


def _distance(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))
