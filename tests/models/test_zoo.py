"""The zoo: sizes as published, and models that train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.models import resolve, zoo
from tests.capture.program import run
from tests.support.remembering import remembered

TINY = ["mlp", *(name for name in zoo.ZOO if name.endswith("-tiny"))]

# Billions of parameters as published with each model.
PUBLISHED = {
    "gpt2": 0.124, "gpt2-medium": 0.355, "gpt2-large": 0.774, "gpt2-xl": 1.558, "gpt3-1.3b": 1.3, "gpt3-6.7b": 6.7,
    "gpt3-13b": 13.0, "gpt3-175b": 175.0, "llama2-7b": 6.74, "llama2-13b": 13.02, "llama2-70b": 68.98,
    "llama3-1b": 1.236, "llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85, "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.6, "bert-base": 0.110, "bert-large": 0.336, "t5-small": 0.0605, "t5-base": 0.223,
    "t5-large": 0.738, "vit-b": 0.0866, "vit-l": 0.304, "vit-h": 0.632, "resnet18": 0.0117, "resnet50": 0.0256,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one(name: str):
    model = resolve(f"zoo:{name}").model

    assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.04)


@pytest.mark.parametrize("name", TINY)
def test_captured_loss_and_gradients_equal_eager(name: str):
    settings = zoo.settings_of(name, {"hidden": "64"} if name == "mlp" else {})
    torch.manual_seed(0)
    model = settings.model()
    inputs = tuple(
        torch.randint(16, each.shape) if each.dtype == torch.int64 else torch.randn(each.shape)
        for each in settings.inputs(8, 32)
    )

    ran = run(remembered(model, inputs), model, inputs)

    loss = model(*inputs)
    loss.backward()
    torch.testing.assert_close(ran.result, loss.detach(), rtol=1e-6, atol=0)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(ran.gradients[key], parameter.grad, rtol=1e-5, atol=1e-7)


def test_experts_with_room_for_all_compute_every_choice():
    settings = zoo.LlamaSettings(
        layers=1, hidden=16, heads=2, kv_heads=2, intermediate=32, vocab=32, experts=4, capacity_factor=4.0
    )
    torch.manual_seed(0)
    experts = settings.model().layers[0].mlp.double()
    x = torch.randn(2, 8, 16, dtype=torch.float64)

    weight, chosen = experts.router(x).float().softmax(-1).topk(2, dim=-1)
    weight = (weight / weight.sum(-1, keepdim=True)).double()
    every = torch.stack(
        [
            (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
            for gate, up, down in zip(experts.gate, experts.up, experts.down, strict=True)
        ],
        dim=2,
    )
    expected = (every.gather(2, chosen[..., None].expand(-1, -1, -1, 16)) * weight[..., None]).sum(2)

    torch.testing.assert_close(experts(x), expected)


@pytest.mark.parametrize("room", [4.0, 0.5])
def test_weights_inside_an_experts_activation_are_those_behind_it(room: float):
    settings = zoo.LlamaSettings(
        layers=1, hidden=16, heads=2, kv_heads=2, intermediate=32, vocab=32, experts=4, capacity_factor=room
    )
    torch.manual_seed(0)
    behind = settings.model().layers[0].mlp.double()
    inside = replace(settings, weighs_inside=True).model().layers[0].mlp.double()
    inside.load_state_dict(behind.state_dict())
    x = torch.randn(2, 32, 16, dtype=torch.float64)

    made = [experts(x) for experts in (behind, inside)]
    for each in made:
        each.square().sum().backward()

    torch.testing.assert_close(made[1], made[0])
    for one, other in zip(inside.parameters(), behind.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_tokens_over_an_experts_room_are_dropped():
    settings = zoo.LlamaSettings(
        layers=1, hidden=16, heads=2, kv_heads=2, intermediate=32, vocab=32, experts=4, experts_per_token=1
    )
    torch.manual_seed(0)
    experts = settings.model().layers[0].mlp
    with torch.no_grad():
        experts.router.weight.zero_()  # every token ties for expert 0

    done = experts(torch.randn(1, 64, 16))

    used = done.abs().sum(-1) > 0
    assert int(used.sum()) == 24  # ceil(1.25 * 64 / 4) = 20, in eights
    assert bool(used[0, :24].all())


@pytest.mark.parametrize(("name", "tokens"), [("llama3-8b", 128 * 8192), ("resnet50", None)])
def test_tokens_per_step_are_those_of_the_global_batch(name: str, tokens: int | None):
    assert resolve(f"zoo:{name}", batch=128, seq=8192).tokens_per_step == tokens
