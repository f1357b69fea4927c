"""Plans with micro-batches: what they say, cost and refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import autopar
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.plan_json import from_json, to_json
from tests.api.test_known_plans import Mlp


def plan(fix: Mapping[str, object], cluster: str = "h100-sxm-80gb:2x2", batch: int = 64) -> autopar.Plan:
    with torch.device("meta"):
        model, x = Mlp(1024, 4), torch.empty(batch, 1024)
    return autopar.plan(model, cluster, example_inputs=(x, x), fix=fix)


def sent(made: autopar.Plan, axis: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in made.decisions.collectives:
        if each.axis == axis:
            counts[each.phase] = counts.get(each.phase, 0) + each.count
    return counts


def test_a_micro_batch_counts_the_samples_of_a_data_parallel_rank():
    made = plan({"dp_replicate": 2, "tp": 2, "microbatch": 8})

    assert made.workload.microbatch == 8
    assert made.workload.num_microbatches == made.decisions.schedule.num_microbatches == 4
    assert made.decisions.mesh.names == ("dp_replicate", "tp")
    assert all(len(each.placements) == 2 for each in made.decisions.parameters.values())
    assert from_json(to_json(made)) == made


def test_gradients_are_reduced_once_and_activations_for_every_micro_batch():
    # In a node, where little of a collective hides: else some are reduced in each micro-batch, behind it.
    one, four = (
        plan({"dp_replicate": 2, "tp": 2, "microbatch": size}, "h100-sxm-80gb:1x4", 2048) for size in (1024, 256)
    )

    gradients = [each for each in four.decisions.collectives if each.axis == "dp_replicate" and each.bytes > 1024]
    assert gradients
    assert all(not each.overlapped for each in gradients)
    assert sum(each.count * each.bytes for each in gradients) == sum(
        each.count * each.bytes
        for each in one.decisions.collectives
        if each.axis == "dp_replicate" and each.bytes > 1024
    )
    assert sent(four, "tp")["forward"] == 4 * sent(one, "tp")["forward"]


def test_small_micro_batches_take_longer_and_hold_less():
    big, small = (plan({"dp_replicate": 4, "microbatch": size}, batch=1 << 16) for size in (1 << 14, 1 << 12))

    whole_inputs = 2 * (1 << 16) * 1024 * 4  # every rank is given the whole batch
    held = [made.estimates.memory.activations - whole_inputs for made in (big, small)]
    assert held[1] == pytest.approx(held[0] / 4, rel=0.05)
    assert small.estimates.memory.gradients == small.estimates.memory.parameters
    assert small.estimates.step_time_s > big.estimates.step_time_s


def test_an_indivisible_batch_says_what_divides():
    with pytest.raises(UsageError, match=r"a batch of 64 does not divide into micro-batches of 5 samples on each of 4"):
        plan({"dp_replicate": 4, "microbatch": 5})


def test_batch_statistics_cannot_be_cut():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with pytest.raises(
        InfeasibleError, match=r"batch_norm.* needs all samples of a step at once, .*GroupNorm.*\.eval\(\)"
    ):
        autopar.plan(model, "cpu:1", example_inputs=(torch.randn(8, 8),), fix={"microbatch": 2})


class Advantages(nn.Module):
    """Weighs each sample by an input, as part of what all samples have of the largest few."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return (self.out(x).squeeze(-1) * advantages / advantages.topk(3).values.sum()).mean()


def test_an_order_of_an_input_over_the_batch_cannot_be_cut():
    inputs = (torch.randn(8, 8), torch.randn(8))
    with pytest.raises(InfeasibleError, match=r"aten\.topk.* needs all samples of a step at once"):
        autopar.plan(Advantages(), "cpu:1", example_inputs=inputs, fix={"microbatch": 2})


class Tabled(nn.Module):
    """Adds something to each sample: a row of a table, or the same row to all."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.out(x + self.table.sin() * 2).squeeze(-1) * torch.ones(8)).mean()


def test_a_table_with_a_row_a_sample_is_refused_by_planning():
    with pytest.raises(InfeasibleError, match=r"differs from micro-batch to micro-batch and comes from table"):
        autopar.plan(Tabled(torch.randn(8, 8)), "cpu:1", example_inputs=(torch.randn(8, 8),), fix={"microbatch": 2})


def test_a_row_that_all_samples_share_is_not():
    model = Tabled(torch.randn(8).expand(8, 8))
    plan = autopar.plan(model, "cpu:1", example_inputs=(torch.randn(8, 8),), fix={"microbatch": 2})

    assert plan.workload.num_microbatches == 4


class Counted(nn.Module):
    """Counts in a buffer of whole numbers how often each expert was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.register_buffer("load", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        with torch.no_grad():
            self.load.add_(nn.functional.one_hot(scores.argmax(-1), 4).sum(0))
        return scores.square().mean()


def test_a_buffer_of_whole_numbers_that_counts_the_samples_of_a_step_is_named():
    with pytest.raises(InfeasibleError, match=r"the new value of buffer load comes of all samples of a step"):
        autopar.plan(Counted(), "cpu:1", example_inputs=(torch.randn(8, 8),), fix={"microbatch": 2})


@torch.library.custom_op("autopar_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Return half of each value."""
    return x / 2


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda _context, gradient: gradient / 2)


class Halved(nn.Module):
    """Calls an operator of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return halved(self.linear(x)).square().mean()


def test_an_operator_without_a_rule_is_cut_once_it_has_one():
    def made() -> autopar.Plan:
        return autopar.plan(Halved(), "cpu:1", example_inputs=(torch.randn(8, 8),), fix={"microbatch": 2})

    with pytest.raises(InfeasibleError, match=r"halved.* has no sharding rule, .* say so with .*register_sharding, or"):
        made()

    by_rows = [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
    cast(Any, register_sharding)(torch.ops.autopar_tests.halved.default)(lambda _x: by_rows)

    assert made().workload.num_microbatches == 4


class Noised(nn.Module):
    """Draws a step for each sample, as diffusion does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(4, 4), nn.Embedding(1000, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return (self.linear(x) + self.steps(torch.randint(0, 1000, (x.shape[0],)))).square().mean()


def test_samples_of_different_micro_batches_draw_different_numbers():
    x = torch.randn(64, 4)
    model = autopar.compile(Noised(), "cpu:1", example_inputs=(x,), fix={"microbatch": 16})

    model(x).backward()

    used = model.steps.weight.grad.abs().sum(1).nonzero()
    assert len(used) > 32  # of 64 samples; 16 at most if all micro-batches drew alike


class WritesItsInput(nn.Module):
    """Masks the first word of each sample, in the tensor that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids[:, 0] = 0
        return self.words(ids).square().mean()


def test_an_argument_that_forward_writes_into_is_named():
    with pytest.raises(InfeasibleError, match=r"forward writes into its argument ids .*ids\.clone\(\)"):
        autopar.plan(WritesItsInput(), "cpu:1", example_inputs=(torch.zeros(8, 4).long(),), fix={"microbatch": 2})


class Projected(nn.Module):
    """Adds each sample's parts at places of its own, which nothing in the program bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        parts = self.out(x).softmax(-1)
        begins = (torch.arange(len(x)) * 5)[:, None]
        target = torch.zeros_like(parts)
        target.view(-1).index_add_(0, (at.floor().long() + begins).view(-1), parts.detach().view(-1))
        return (target * parts.log()).sum(-1).mean()


def test_what_is_filled_at_places_without_a_bound_is_refused_with_the_write_and_what_shows_the_bound():
    inputs = (torch.randn(8, 8), torch.rand(8, 5) * 4)
    with pytest.raises(InfeasibleError, match=r"aten\.index_add.* needs all samples .*, the 8 rows of .*places % rows"):
        autopar.plan(Projected(), "cpu:1", example_inputs=inputs, fix={"microbatch": 2})
