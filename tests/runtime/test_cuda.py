"""On a GPU: programs compute there what plain PyTorch computes there, by the GPU's own kernels."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.models.hf_tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
KINDS = ("llama", "gpt2", "bert", "t5", "vit", "resnet", "mamba", "gemma3_text", "falcon")


def on_gpu(kind: str, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = tiny(kind, **settings)
    return model.to(DEVICE), {name: _moved(each) for name, each in inputs.items()}


def _moved(each: Any) -> Any:
    return each.to(DEVICE) if torch.is_tensor(each) else each


def loss_of(output: Any) -> torch.Tensor:
    found = output["loss"] if isinstance(output, dict) else output if torch.is_tensor(output) else output.loss
    assert torch.is_tensor(found)
    return found


def compiled(model: nn.Module, inputs: dict[str, Any], **options: Any) -> nn.Module:
    return autopar.compile(copy.deepcopy(model), "h100-sxm-80gb:1", example_inputs=inputs, **options)


def far(got: nn.Module, want: nn.Module) -> dict[str, float]:
    """Return how far each gradient is off, over the largest of all."""
    wanted = {name: each.grad for name, each in want.named_parameters() if each.grad is not None}
    largest = max(float(each.abs().max()) for each in wanted.values())
    mine = dict(got.named_parameters())
    return {name: float((mine[name].grad - each).abs().max()) / largest for name, each in wanted.items()}


RECOMPUTED = {"microbatch": 2, "recompute": "full"}
CASES = [
    *(pytest.param(kind, {}, id=kind) for kind in KINDS),
    # Batch norm has other statistics in parts of a batch.
    *(pytest.param(kind, RECOMPUTED, id=f"{kind}, recomputed") for kind in KINDS if kind != "resnet"),
]


@pytest.mark.parametrize(("kind", "fix"), CASES)
def test_gradients_are_those_of_plain_pytorch(kind: str, fix: dict[str, Any]):
    model, inputs = on_gpu(kind)
    mine = compiled(model, inputs, fix=fix)
    losses = [loss_of(each(**inputs)) for each in (model, mine)]
    for each in losses:
        each.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert max(far(mine, model).values()) < 2e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "vit", "qwen3_moe", "mixtral"])
def test_autocast_programs_lose_what_autocast_loses(kind: str):
    model, inputs = on_gpu(kind)
    mine = compiled(model, inputs, precision="bf16")
    with torch.autocast(DEVICE, torch.bfloat16):
        want = loss_of(model(**inputs))
    want.backward()
    got = loss_of(mine(**inputs))
    got.backward()
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    assert max(far(mine, model).values()) < 0.1


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_dropout_in_attention_trains_by_the_gpus_kernels(kind: str):
    names = {"gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"), "bert": ("attention_probs_dropout_prob",)}[kind]
    model, inputs = on_gpu(kind, **dict.fromkeys(names, 0.2))
    mine = compiled(model, inputs, precision="bf16")
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = loss_of(mine(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    assert len(set(losses)) > 20


def test_products_of_odd_sizes_and_norms_of_16_bits_by_weights_of_32_are_computed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 1001)).to(DEVICE)
    x = torch.randn(512, 256, device=DEVICE)
    mine = compiled(model, (x,), precision="bf16")  # type: ignore[arg-type]
    with torch.autocast(DEVICE, torch.bfloat16):
        want = model(x)
    got = mine(x)
    for each in (want, got):
        each.float().square().mean().backward()
    torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=5e-2)
    assert max(far(mine, model).values()) < 0.05


class Biased(nn.Module):
    """Attention whose scores have a trained bias, and drops some."""

    def __init__(self, drops: float) -> None:
        super().__init__()
        self.of = nn.Linear(64, 192)
        self.bias = nn.Parameter(torch.randn(4, 32, 32))
        self.drops = drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.of(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, self.bias.to(q.dtype), self.drops)
        return found.float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trained_bias_of_attention_has_its_gradient(precision: str):
    torch.manual_seed(0)
    model, x = Biased(0.0).to(DEVICE), torch.randn(8, 32, 64, device=DEVICE)
    mine = compiled(model, (x,), precision=precision)  # type: ignore[arg-type]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
        model(x).backward()
    mine(x).backward()
    assert max(far(mine, model).values()) < (0.05 if precision == "bf16" else 1e-3)


def test_dropped_scores_of_a_biased_attention_are_dropped_alike_in_backward():
    torch.manual_seed(0)
    model, x = Biased(0.3).to(DEVICE), torch.randn(8, 32, 64, device=DEVICE)
    mine = compiled(model, (x,), precision="fp32")  # type: ignore[arg-type]
    total = sum_of = None
    for _ in range(200):
        mine.zero_grad()
        mine(x).backward()
        sum_of = mine.bias.grad.clone()
        total = sum_of if total is None else total + sum_of
    plain = None
    for _ in range(200):
        model.zero_grad()
        model(x).backward()
        plain = model.bias.grad.clone() if plain is None else plain + model.bias.grad
    assert float((total - plain).norm() / plain.norm()) < 0.5


def test_fp16_scales_gradients_and_skips_steps_that_overflow():
    model, inputs = on_gpu("gpt2")
    mine = compiled(model, inputs, precision="fp16")
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40)
    before = [each.detach().clone() for each in mine.parameters()]
    for _ in range(40):
        scaler.scale(loss_of(mine(**inputs))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**40
    assert all(torch.isfinite(each).all() for each in mine.parameters())
    assert any(not torch.equal(each, old) for each, old in zip(mine.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_the_inductor_backend_computes_the_same():
    model, inputs = on_gpu("llama")
    mine = compiled(model, inputs, backend="inductor")
    losses = [loss_of(each(**inputs)) for each in (model, mine)]
    for each in losses:
        each.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert max(far(mine, model).values()) < 2e-3


def test_a_script_that_knows_nothing_of_autopar_runs_planned_and_is_profiled(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, autopar\n"
        "from autopar.models.hf_tiny import tiny\n"
        "model, inputs = tiny('llama')\n"
        "inputs = {name: each.cuda() for name, each in inputs.items()}\n"
        "mine = autopar.compile(model.cuda(), 'h100-sxm-80gb:1', example_inputs=inputs, optimizer='adamw')\n"
        "optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)\n"
        "for step in range(12):\n"
        "    loss = mine(**inputs)['loss']\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "print('loss', float(loss))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "AUTOPAR_PROFILE": str(tmp_path / "profile")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    events = json.loads((tmp_path / "profile" / "rank0.json").read_text())
    assert events


def test_calibration_measures_the_gpu(tmp_path: Path):
    out = tmp_path / "calibration.json"
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "calibrate", "--quick", "-o", str(out)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["machine"]["kind"] == "gpu"
    figures = {each["figure"] for each in found["device_figures"]}
    assert figures >= {"kernel_launch", "memory_bandwidth", "matmul.bfloat16", "matmul.tf32", "attention_efficiency"}
