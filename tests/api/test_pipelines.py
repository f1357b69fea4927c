"""Plans with pipeline stages, and their steps on two gloo ranks against the model's own."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.pipelining import Wanted
from autopar.api.staging import Budget, staged_program
from autopar.api.wishes import read_wishes
from autopar.errors import AutoparError, InfeasibleError, ScheduleError, UsageError
from autopar.ir.plan_json import from_json, to_json
from autopar.options import PlanOptions
from benchmarks import unet
from cost_models.cluster import ClusterSpec
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool
from tests.support.remembering import remembered
from tests.support.training import Trained, call, loss_of, train, whole


class Layers(nn.Module):
    """Blocks of unequal size; a table is read by the first and, tied, by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 8)) for w in (8, 16, 8, 24))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        hidden = self.embed(ids)
        first = hidden
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden + first)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Prefixed(nn.Module):
    """Layers whose targets begin with a tensor that is no state of the model, and count what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers()
        self.ignored = torch.full((1,), -100)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        return self.body(ids, torch.cat([self.ignored.expand(len(labels), -1), labels[:, 1:]], 1))


class Mean(nn.Module):
    """The mean square of what a model makes, as its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.body(x).square().mean()


def layers(kind: type[nn.Module] = Layers) -> tuple[nn.Module, Any]:
    torch.manual_seed(2)
    ids, labels = torch.randint(0, 16, (2, 12, 6))
    labels[:5, 2:] = -100
    return kind(), (ids, labels)


def example(name: str) -> tuple[nn.Module, Any]:
    if name == "unet":
        return unet.example(6)
    kinds = {"layers": Layers, "prefixed": Prefixed}
    return layers(kinds[name]) if name in kinds else models()[name]


def run(_rank: int, name: str, fix: dict[str, Any], ranks: int = 2) -> Trained:
    return train(*example(name), f"cpu:{ranks}", fix)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("layers", {"microbatch": 2}),
        ("layers", {"microbatch": 4}),
        ("layers", {"microbatch": 2, "schedule": "gpipe"}),
        ("layers", {"microbatch": 3, "interleave": 2}),
        ("layers", {"microbatch": 2, "schedule": "zb_h1"}),
        ("layers", {"microbatch": 3, "schedule": "zbv"}),
        ("layers", {"microbatch": 12, "schedule": "zbv"}),
        ("prefixed", {"microbatch": 2}),
        ("weighted", {"microbatch": 2, "schedule": "zb_h1"}),
        ("mlp", {"microbatch": 2}),
        ("tied", {"microbatch": 1}),
        ("penalised", {"microbatch": 2}),
        ("weighted", {"microbatch": 2}),
        ("experts", {"microbatch": 4}),
        ("unet", {"microbatch": 2}),
    ],
    ids=str,
)
def test_steps_in_stages_equal_the_models_own(pool: RankPool, name: str, fix: dict[str, Any]):
    require_the_models_own(name, pool.values(run, name, {"pp": 2, **fix}))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("unet", {"pp": 4, "microbatch": 1}),
        ("layers", {"pp": 2, "dp_replicate": 2, "microbatch": 2}),
        ("layers", {"pp": 2, "tp": 2, "microbatch": 4}),
    ],
    ids=str,
)
def test_steps_in_stages_of_several_ranks_equal_the_models_own(four: RankPool, name: str, fix: dict[str, Any]):
    require_the_models_own(name, four.values(run, name, fix, 4))


@pytest.mark.parametrize(
    ("name", "zero", "pp"),
    [
        ("layers", 1, 1), ("layers", 2, 1), ("layers", 3, 1), ("weighted", 1, 2), ("tied", 2, 2), ("experts", 3, 2),
    ],
)  # fmt: skip
def test_sharded_parameters_with_microbatches_equal_the_models_own(
    pool: RankPool, four: RankPool, name: str, zero: int, pp: int
):
    fix = {"dp_shard": 2, "zero": zero, "microbatch": 2, **({"pp": 2, "schedule": "zb_h1"} if pp == 2 else {})}
    done = (pool if pp == 1 else four).values(run, name, fix, 2 * pp)
    assert all(each.losses == done[0].losses for each in done)
    assert max(each.worst_gradient for each in done) < 1e-4


def require_the_models_own(name: str, done: list[Trained]) -> None:
    """Check that all ranks trained as one device does, and that together they hold every parameter, none alone."""
    names = {key for key, _ in example(name)[0].named_parameters(remove_duplicate=False)}
    assert all(each.losses == done[0].losses for each in done)
    assert max(each.worst_gradient for each in done) < 1e-4
    assert {key for each in done for key in each.held} == names
    assert any({*each.held} != names for each in done)


def test_a_plan_says_its_stages_and_survives_the_file():
    model, batch = layers()

    fix = {"pp": 2, "schedule": "1f1b", "dp_replicate": 2, "microbatch": 2}
    plan = autopar.plan(model, "cpu:4", example_inputs=batch, fix=fix)

    assert plan.decisions.degrees["pp"] == 2
    assert [stage.ranks for stage in plan.decisions.stages] == [(0, 1), (2, 3)]
    assert [path for stage in plan.decisions.stages for path in stage.blocks] == [f"layers.{i}" for i in range(4)]
    assert plan.decisions.schedule.name == "1f1b"
    assert plan.decisions.schedule.num_microbatches == 3
    parts = plan.estimates.breakdown
    total = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s
    assert total == pytest.approx(plan.estimates.step_time_s, rel=0.2)
    assert parts.bubble_s > 0
    assert from_json(to_json(plan)) == plan


def test_messages_are_priced_on_the_link_between_their_stages():
    model, batch = layers()
    links, nic = ({"bandwidth": speed, "latency": "1us"} for speed in ("10GB/s", "1MB/s"))
    cluster = ClusterSpec.from_dict({
        "version": 1,
        "name": "two-by-two",
        "devices": {"core": {"preset": "cpu"}},
        "nodes": {"host": {"device": "core", "count": 2, "links": links, "nic": nic}},
        "groups": [{"node": "host", "count": 2}],
    })  # fmt: skip

    plan = autopar.plan(model, cluster, example_inputs=batch, fix={"pp": 4, "schedule": "gpipe", "microbatch": 3})

    inside, across, again = [each.send_forward_s for each in plan.estimates.per_stage[:3]]
    assert again == inside
    assert across == pytest.approx(2 * 3 * 6 * 8 * 4 / 1e6, rel=0.2)  # two values of 3 samples, 6 tokens, 8 numbers
    assert inside < across / 100


def test_collectives_inside_stages_are_communication_and_no_computation():
    model, batch = layers()

    whole, split = (
        autopar.plan(model, "cpu:4", example_inputs=batch, fix={"microbatch": 4, **fix})
        for fix in ({"pp": 4}, {"pp": 2, "tp": 2})
    )

    inside = [
        max(stage.step_time_s for stage in each.estimates.per_stage) - each.estimates.breakdown.compute_s
        for each in (whole, split)
    ]
    assert inside[0] == pytest.approx(0.0, abs=1e-12)
    of_stages = sum(each.predicted_s for each in split.decisions.collectives if each.axis == "tp")
    assert 0.2 * of_stages < inside[1] < of_stages
    assert split.estimates.breakdown.exposed_communication_s > inside[1]


def test_zero_bubble_is_predicted_faster_than_1f1b_in_memory_of_the_same_order():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)), nn.Linear(4096, 1))
        batch = (torch.empty(16 * 2048, 4096),)
    model = Mean(model)

    plans = {
        name: autopar.plan(
            model, "h100-sxm-80gb:4", example_inputs=batch, fix={"pp": 4, "microbatch": 2048, "schedule": name}
        ).estimates
        for name in ("1f1b", "zb_h1", "zbv")
    }

    steps = {name: each.step_time_s for name, each in plans.items()}
    assert steps["zb_h1"] < steps["1f1b"]
    assert plans["zb_h1"].breakdown.bubble_s < plans["1f1b"].breakdown.bubble_s / 2
    static = plans["1f1b"].memory.total - plans["1f1b"].memory.activations
    held = {name: max(stage.peak_memory_bytes for stage in each.per_stage) - static for name, each in plans.items()}
    assert held["zb_h1"] <= 2.5 * held["1f1b"]
    assert held["zbv"] <= 2.5 * held["1f1b"]


def test_buffers_over_the_budget_are_refused_before_anything_runs():
    model, batch = layers()
    plan = autopar.plan(model, "cpu:2", example_inputs=batch, fix={"pp": 2, "microbatch": 2, "schedule": "gpipe"})
    captured = remembered(model, batch)

    def launch(budget_bytes: int) -> None:
        budget = Budget(budget_bytes, 0, "adamw")
        staged_program(captured, plan.decisions, 0, split=(), device="cpu", budget=budget)

    launch(10**6)
    with pytest.raises(ScheduleError, match=r"rank 0 exceeds its memory from 0F[1-5] \(forward of stage 0, micro"):
        launch(14_000)


def stop(rank: int, how: str) -> str:
    model, batch = layers()
    fix = {"pp": 2, "schedule": "1f1b", "microbatch": 2}
    mine = autopar.compile(model, "cpu:2", example_inputs=batch, fix=fix)
    loss_of(call(mine, batch)).backward()
    if rank == 0:
        with pytest.raises(AutoparError) as error:
            call(mine, batch)
        return str(error.value)
    (bound,) = mine.__dict__["_autopar"]._known[True, True]
    stage = bound._ways[True].stages[1]
    run = stage.run

    def failing(kind: str, microbatch: int, *rest: Any) -> Any:
        if (kind, microbatch) == ("B", 2):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such thing")
        return run(kind, microbatch, *rest)

    stage.run = failing
    try:
        call(mine, batch)
    finally:
        os._exit(1)  # as a script that nothing catches the error of


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "rank 1 (stage 1) failed in the backward of stage 1, micro-batch 2: ValueError: no such thing"),
        ("killed", "rank 1 (stage 1) did not send "),
    ],
)
def test_a_rank_that_stops_in_mid_step_is_named_by_the_others(how: str, text: str):
    with RankPool(2) as ranks:
        first = ranks.run(stop, how, may_die=True, timeout_s=100)[0]

    assert not first.error, first.trace
    assert first.value.startswith(text)


def overflow(rank: int) -> tuple[bool, float]:
    """Take a step in which one rank's gradient overflows; return whether parameters changed, and the new scale."""
    model, batch = layers()
    mine = autopar.compile(model, "cpu:2", example_inputs=batch, fix={"pp": 2})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
    before = [each.detach().clone() for each in mine.parameters()]
    call(mine, batch)
    (bound,) = mine.__dict__["_autopar"]._known[True, True]
    run = bound.run

    def overflowing(*args: Any, **how: Any) -> Any:
        outputs, gradients = run(*args, **how)
        if rank == 1:
            gradients[0].fill_(torch.inf)
        return outputs, gradients

    bound.run = overflowing
    scaler.scale(loss_of(call(mine, batch))).backward()
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, b) for a, b in zip(before, mine.parameters(), strict=True))
    return not same, scaler.get_scale()


def test_a_gradient_scaler_skips_the_step_on_all_stages_where_one_overflows(pool: RankPool):
    assert pool.values(overflow) == [(False, 2.0)] * 2


class Twice(nn.Module):
    """Reads its input in the first block and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return (hidden * x).square().mean()


def graded(_rank: int) -> float:
    """Return the largest error of the gradient of an input that two stages read."""
    torch.manual_seed(0)
    reference, x = Twice(), torch.randn(8, 6)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    mine = autopar.compile(copy.deepcopy(reference), "cpu:2", example_inputs=(xs[0],), fix={"pp": 2, "microbatch": 2})
    for each, given in zip((reference, mine), xs, strict=True):
        (3 * each(given)).backward()
    return (xs[0].grad - xs[1].grad).abs().max().item()


def test_the_gradient_of_an_input_is_the_sum_over_the_stages_that_read_it(pool: RankPool):
    assert max(pool.values(graded)) < 1e-6


def split(_rank: int, fix: dict[str, Any], inputs: str) -> tuple[float, float, float]:
    """Return the loss, the model's own, and the largest error of a gradient, on four ranks."""
    reference, batch = layers()
    mine = autopar.compile(copy.deepcopy(reference), "cpu:4", example_inputs=batch, fix=fix, inputs=inputs)
    part, parts = autopar.input_part(mine)
    given = tuple(each.chunk(parts)[part] for each in batch)
    want, got = loss_of(call(reference, batch)), loss_of(call(mine, given))
    want.backward()
    got.backward()
    wanted = dict(reference.named_parameters())
    errors = [
        ((whole(p.grad) - wanted[name].grad).norm() / (wanted[name].grad.norm() + 1e-6)).item()
        for name, p in mine.named_parameters()
    ]
    return got.item(), want.item(), max(errors)


@pytest.mark.parametrize(
    ("fix", "inputs"),
    [
        ({"pp": 2, "dp_replicate": 2, "microbatch": 2}, "local"),
        ({"pp": 2, "dp_shard": 2, "microbatch": 2, "schedule": "zbv"}, "global"),
        ({"pp": 2, "tp": 2, "microbatch": 4, "schedule": "zb_h1"}, "global"),
    ],
    ids=str,
)
def test_stages_of_several_ranks_equal_the_models_own(four: RankPool, fix: dict[str, Any], inputs: str):
    for got, want, error in four.values(split, fix, inputs):
        assert got == pytest.approx(want, rel=1e-5)
        assert error < 1e-4


@pytest.mark.parametrize(
    ("fix", "kind", "text"),
    [
        ({"pp": 8}, InfeasibleError, "8 pipeline stages, and the model has 4 blocks to cut between"),
        ({"pp": 2, "microbatch": 5}, UsageError, "does not divide into micro-batches of 5"),
        ({"pp": 3}, InfeasibleError, "do not divide the cluster's 8 devices"),
        ({"schedule": "gpipe", "pp": 1}, UsageError, "needs pipeline stages: add --fix pp=N"),
        ({"pp": 2, "interleave": 3}, InfeasibleError, r"6 pipeline stages \(2 ranks of 3\), .* at most 4 \(pp x inter"),
        (
            {"schedule": "gpipe", "dp_replicate": 8},
            InfeasibleError,
            "to 4 divides 1, .* that --fix dp_replicate=8 leave of",
        ),
        ({"schedule": "interleaved_1f1b", "interleave": 3}, InfeasibleError, "too few blocks .* for 3 stages on each"),
        ({"schedule": "zbv", "interleave": 1}, UsageError, "'zbv' has 2 stages a rank, not 1: use --fix interleave=2"),
    ],
    ids=["stages", "micro-batch", "degree", "schedule", "stages a rank", "no rank left", "few blocks", "interleave"],
)
def test_impossible_pipelines_say_why(fix: dict[str, Any], kind: type[Exception], text: str):
    model, batch = layers()

    with pytest.raises(kind, match=text):
        autopar.plan(model, "cpu:8", example_inputs=batch, fix=fix)


def test_one_stage_a_rank_rules_out_schedules_with_several_and_no_others():
    wishes = read_wishes(PlanOptions.parse(fix={"interleave": 1}))

    assert wishes.schedule_is_open
    assert wishes.wanted(4) == Wanted(4, "1f1b", 1)
    assert "interleave" in wishes.never


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_what_a_step_is_made_of_adds_up_where_the_slowest_optimizer_is_not_the_last_to_end(schedule: str):
    class Lopsided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20000, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.table(x)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            for _ in range(40):  # the second stage computes more, the first has the optimizer's work
                x = torch.tanh(x @ self.layers[3].weight)
            return x.square().mean()

    fix = {"pp": 2, "schedule": schedule, "microbatch": 4}
    plan = autopar.plan(Lopsided(), "cpu:2", example_inputs=(torch.zeros(16, 8, dtype=torch.long),), fix=fix)

    parts = plan.estimates.breakdown
    total = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s
    assert total == pytest.approx(plan.estimates.step_time_s, rel=1e-9)
