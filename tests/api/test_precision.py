"""Mixed precision: casts come before gathers, and programs compute what autocast does on one device."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.support.ranks import RankPool

WIDTH = 64


class Net(nn.Module):
    """Three layers with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x.float(), y)


def net() -> tuple[Net, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(48, WIDTH), torch.randn(48, WIDTH))


def step(_rank: int, options: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], dict[str, int]]:
    """Return the loss, whole gradients, and the bytes that gloo was given in one step, by collective and type."""
    model, batch = net()
    compiled = autopar.compile(model, "cpu:2", example_inputs=batch, **options)
    for _ in range(2):  # in which ranks compare their batches, too
        compiled(*batch).backward()
        compiled.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        loss = compiled(*batch)
        loss.backward()
    moved: Counter[str] = Counter()
    for event in profile.profiler.kineto_results.events():
        if event.name().startswith("gloo:"):
            for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True):
                size = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}[dtype]
                moved[f"{event.name().removeprefix('gloo:')} {dtype.removeprefix('c10::')}"] += size * math.prod(shape)
    gradients = {name: full(each.grad) for name, each in compiled.named_parameters()}
    return loss.item(), gradients, dict(moved)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def single(dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of the same model on one device under autocast."""
    model, batch = net()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = model(*batch)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


ZERO = {"dp_shard": 2, "zero": 3}
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH)
READ_BACK = 2 * WIDTH * WIDTH
"""Elements of the parameters that backward gathers again: the weights of all layers but the first.

A rank sends the other its half of what is gathered, and the other's half of the gradients: of 16 bits, one byte an
element.
"""


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        (
            {"precision": "fp32", "fix": ZERO},
            {"send float": 2 * (PARAMETERS + READ_BACK) + 2 * PARAMETERS},
        ),
        (
            {"precision": "bf16", "fix": ZERO},
            {"send BFloat16": PARAMETERS + READ_BACK + PARAMETERS},
        ),
        (
            {"precision": "bf16", "fix": ZERO, "reduce_dtype": "fp32"},
            {"send BFloat16": PARAMETERS + READ_BACK, "send float": 2 * PARAMETERS},
        ),
        ({"precision": "bf16", "fix": {"dp_replicate": 2}}, {"all_reduce BFloat16": 2 * PARAMETERS}),
        ({"precision": "bf16", "fix": {"dp_replicate": 2, "microbatch": 2}}, {"all_reduce float": 4 * PARAMETERS}),
        ({"precision": "bf16", "fix": {"tp": 2}}, {}),
        (
            {"precision": "fp16", "fix": ZERO},
            {"send Half": PARAMETERS + READ_BACK + PARAMETERS},
        ),
    ],
    ids=str,
)
def test_ranks_exchange_the_small_type_and_compute_what_autocast_does(
    pool: RankPool, options: dict[str, Any], moves: dict[str, int]
):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options["precision"]]
    want, wanted = single(dtype)

    for loss, gradients, moved in pool.values(step, options):
        for what, size in moves.items():
            assert moved[what] == pytest.approx(size, abs=64), moved  # beside it, the loss is a sum of numbers
        assert loss == pytest.approx(want, rel=2 * torch.finfo(dtype).eps)
        for name, gradient in gradients.items():
            error = (gradient - wanted[name]).norm() / wanted[name].norm()
            assert error < 2 * torch.finfo(dtype).eps, name


def overflow(rank: int, fix: dict[str, Any]) -> tuple[bool, float]:
    """Step with an infinite gradient on one rank; return whether parameters moved, and the scale then."""
    model, batch = net()
    compiled = autopar.compile(model, "cpu:2", example_inputs=batch, precision="fp16", fix=fix)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=1.0)
    before = [full(each).detach().clone() for each in compiled.parameters()]
    scaler.scale(compiled(*batch)).backward()
    first = next(iter(compiled.parameters())).grad
    if rank == 1:
        getattr(first, "_local_tensor", first).fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, full(b)) for a, b in zip(before, compiled.parameters(), strict=True))
    return not same, scaler.get_scale()


@pytest.mark.parametrize("fix", [ZERO, {"tp": 2}], ids=str)
def test_a_gradient_scaler_skips_the_step_on_all_ranks_where_a_shard_overflows(pool: RankPool, fix: dict[str, Any]):
    assert pool.values(overflow, fix) == [(False, 2.0)] * 2


def test_auto_is_the_faster_precision_and_says_what_it_chose():
    model, batch = net()
    own = {
        name: autopar.plan(model, "h100-sxm-80gb:2", example_inputs=batch, precision=name) for name in ("fp32", "bf16")
    }

    plan = autopar.plan(model, "h100-sxm-80gb:2", example_inputs=batch, precision="auto")

    best, other = sorted(own.values(), key=lambda each: each.estimates.step_time_s)
    assert plan.decisions == best.decisions
    assert plan.estimates.step_time_s == best.estimates.step_time_s
    assert plan.solver.bound == min(each.solver.bound for each in own.values())
    assert plan.alternatives[0].why_not.startswith(f"computes in {other.workload.precision}: ")
    assert any(each.code == "precision-chosen" for each in plan.warnings) == (plan.workload.precision == "bf16")


def chosen(_rank: int) -> tuple[str, float]:
    """Return the precision that a job computes in, and its loss."""
    model, (x, y) = net()
    compiled = autopar.compile(model, "cpu:2", example_inputs=(x, y), precision="auto")
    plan = autopar.plan(net()[0], "cpu:2", example_inputs=(x, y), precision="auto")
    return plan.workload.precision, float(compiled(x, y))


def test_all_ranks_compute_in_the_precision_that_was_chosen(pool: RankPool):
    found = pool.values(chosen)

    assert len(set(found)) == 1
    precision, loss = found[0]
    want = single({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])[0]
    assert math.isclose(loss, want, rel_tol=1e-4)
