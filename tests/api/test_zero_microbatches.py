"""Parameters sharded at rest in steps of several micro-batches: what memory asks for, and no more."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from autopar.api.planning import Planner, Program
from autopar.errors import InfeasibleError
from autopar.ir.placement import Shard
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from tests.support.remembering import remembered
from tests.support.two_hosts import cluster


class Deep(nn.Module):
    """Square layers that hold much and compute little, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Convolved(nn.Module):
    """Convolutions whose weight and bias have their gradients from one operator, in layouts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Contracted(nn.Module):
    """Layers whose weights of four dimensions a product reads as matrices, and makes the gradients of as such."""

    def __init__(self) -> None:
        super().__init__()
        cores = [torch.randn(3, 4, 5) / 4, torch.randn(5, 5, 6, 2) / 4, torch.randn(2, 2, 3) / 4]
        self.cores = nn.ModuleList(nn.ParameterList(each.clone() for each in cores) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(72, 30) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (first, second, third), back in zip(self.cores, self.back, strict=True):
            parts = x.unflatten(-1, (3, 5, 2))
            x = x + back(torch.einsum("...ijk,iar,rjbs,skc->...abc", parts, first, second, third).flatten(-3))
        return x.square().mean()


def plans_as_memory_shrinks() -> list[Plan]:
    # More samples than a layer is wide: else they would travel, not the layers.
    program = Program(remembered(Deep(), (torch.empty(96, 128),)).graph, "deep", "", None)
    options = PlanOptions.parse(
        fix={"pp": 1, "dp_shard": 2, "microbatch": 8, "recompute": "none"}, memory_margin=0, gap=0.0
    )
    found = []
    memory = 1 << 30
    with suppress(InfeasibleError):
        while True:
            found.append(Planner(program, cluster(int(memory)), options).plan())
            memory = min(memory, found[-1].estimates.peak_memory_bytes) * 0.97
    return found


def test_gradients_are_reduced_in_each_microbatch_where_their_whole_sums_do_not_fit():
    plans = plans_as_memory_shrinks()

    times = [plan.estimates.step_time_s for plan in plans]
    sums = [plan.estimates.memory.gradients for plan in plans]
    last = plans[-1].decisions
    assert times == sorted(times)
    assert len(set(times)) >= 4
    assert sums[-1] == min(sums) < 0.75 * max(sums)
    early = {name for name, each in last.parameters.items() if each.reduce == "microbatch"}
    assert early
    assert {each.gather for each in plans[0].decisions.parameters.values()} >= {"once"}
    assert {each.gather for each in last.parameters.values()} == {"per_phase"}
    scatters = [each for each in last.collectives if each.op == "reduce_scatter"]
    micro = plans[-1].workload.num_microbatches
    assert sum(each.count for each in scatters) == micro * len(early) + len(last.parameters) - len(early)


def test_sums_of_gradients_that_one_operator_makes_are_counted_each_in_its_own_layout():
    program = Program(remembered(Convolved(), (torch.empty(12, 3, 8, 8),)).graph, "convolved", "", None)
    options = PlanOptions.parse(fix={"tp": 2, "microbatch": 4}, gap=0.1)

    plan = Planner(program, cluster(1 << 30), options).plan()

    assert any(each.reduce == "microbatch" for each in plan.decisions.parameters.values())
    held = sum(4 * each.numel() for each in Convolved().parameters())
    assert held / 2 <= plan.estimates.memory.gradients <= 2 * held


@pytest.mark.parametrize("fix", [{"tp": 2}, {"dp_shard": 2, "zero": 2}], ids=["tp", "zero"])
def test_sums_of_gradients_that_are_made_in_other_dimensions_than_their_parameters_are_counted(fix: dict[str, int]):
    program = Program(remembered(Contracted(), (torch.empty(8, 5, 30),)).graph, "contracted", "", None)
    options = PlanOptions.parse(fix={**fix, "microbatch": 2}, gap=0.1)

    plan = Planner(program, cluster(1 << 30), options).plan()

    placed = plan.decisions.parameters
    cores = [placed[f"cores.{layer}.{place}"] for layer in range(2) for place in range(3)]
    # Under tp both ways to reduce are as fast.
    assert "zero" not in fix or {each.reduce for each in cores} == {"microbatch"}
    halves = {name for name, each in placed.items() if isinstance(each.placements[0], Shard)}
    sums = (4 * each.numel() // (1 + (name in halves)) for name, each in Contracted().named_parameters())
    assert plan.estimates.memory.gradients == sum(sums)


def test_no_plan_is_said_to_be_further_from_the_best_than_from_the_devices_peak():
    program = Program(remembered(Deep(), (torch.empty(32, 128),)).graph, "deep", "", None)
    plan = Planner(program, cluster(1 << 30), PlanOptions.parse(time_limit=0.01)).plan()

    forward, backward = 6 * 2 * 32 * 128 * 128, (2 * 6 - 1) * 2 * 32 * 128 * 128
    peak = cluster(1 << 30).device.flops_for("float32")
    assert plan.solver.bound >= (forward + backward) / (2 * peak) * (1 - 1e-9)


def test_what_is_kept_is_gathered_once_for_both_passes_though_they_read_it_transposed_and_as_it_lies():
    program = Program(remembered(Deep(), (torch.empty(96, 128),)).graph, "deep", "", None)

    def gathered_bytes(zero: int) -> int:
        options = PlanOptions.parse(fix={"pp": 1, "dp_shard": 2, "zero": zero}, gap=0.0)
        plan = Planner(program, cluster(1 << 30), options).plan()
        assert {each.gather for each in plan.decisions.parameters.values()} == {"once" if zero < 3 else "per_phase"}
        return sum(each.bytes * each.count for each in plan.decisions.collectives if each.op == "all_gather")

    layer = 4 * 128 * 128
    assert gathered_bytes(1) == 6 * layer
    # Nothing is asked for the gradient of the input, and so the first layer is not read in backward.
    assert gathered_bytes(3) == 11 * layer
