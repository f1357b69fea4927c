"""Two micro-batches at once: numbers as one after another, what is predicted of it, and when the search takes it."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.api import plan_captured
from autopar.api.repricing import repriced
from autopar.api.staging import staged_program
from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.ir.plan_json import from_json, to_json
from autopar.models.hf_tiny import tiny
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.report.table import table_text
from autopar.rewrite.emitted import emitted
from benchmarks.testbed.scenarios import SCENARIOS
from cost_models.cluster import ClusterSpec
from tests.api.test_memory import TOLERANCE, on_rank, planned, predicted_bytes
from tests.api.test_repricing import VERSION
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool
from tests.support.remembering import remembered
from tests.support.training import call, loss_of, whole

SLOW = Path(__file__).parents[2] / "benchmarks" / "testbed" / "cluster_1gbit_calibrated.yaml"
"""Two hosts at 1 Gbit/s."""

SCALAR = 8
"""Bytes up to which collectives are left out: counts of the batch are there once for both, and priced for each."""

TINY = ("gpt2", "llama", "mixtral")


class Dropping(nn.Module):
    """Two linear layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.out(functional.dropout(self.into(x).relu(), 0.5)).square().mean()


def built(name: str) -> tuple[nn.Module, Any]:
    """Return a model and its batch."""
    if name == "dropping":
        torch.manual_seed(0)
        return Dropping(), (torch.randn(16, 8),)
    return tiny(name) if name in TINY else models()[name]


def with_overlap(plan: Plan, at_once: int) -> Plan:
    """Return a plan whose micro-batches run so many at a time, all else as it is."""
    schedule = replace(plan.decisions.schedule, batch_overlap=at_once)
    return replace(plan, decisions=replace(plan.decisions, schedule=schedule))


def step(name: str, plan: Plan) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step of a plan."""
    model, example = built(name)
    cluster = ClusterSpec.from_dict(plan.cluster)
    mine = autopar.compile(copy.deepcopy(model), cluster, example_inputs=example, plan=plan)
    torch.manual_seed(1)
    loss = loss_of(call(mine, example))
    loss.backward()
    return loss.item(), {key: whole(each.grad) for key, each in mine.named_parameters() if each.grad is not None}


def compared(_rank: int, name: str, ranks: int, fix: dict[str, Any]) -> tuple[int, float, list[str]]:
    """Return how many micro-batches there are, the largest error of a gradient, and what is not equal to the bit."""
    model, example = built(name)
    plan = autopar.plan(model, f"cpu:{ranks}", example_inputs=example, fix=fix)
    (one_loss, one), (two_loss, two) = (step(name, with_overlap(plan, each)) for each in (1, 2))
    worst = max(float((two[key] - one[key]).norm() / one[key].norm()) for key in one)
    differ = [key for key in one if not torch.equal(one[key], two[key])]
    return plan.workload.num_microbatches, worst, differ + (["loss"] if one_loss != two_loss else [])


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("mlp", {"tp": 2, "microbatch": 2}),
        ("tied", {"tp": 2, "microbatch": 2}),
        ("weighted", {"dp_shard": 2, "zero": 3, "microbatch": 1}),
        ("penalised", {"tp": 2, "microbatch": 2}),
        ("messages", {"tp": 2, "microbatch": 2}),
        ("dropping", {"tp": 2, "microbatch": 4}),
        ("dropping", {"dp_replicate": 2, "microbatch": 2}),
        ("gpt2", {"tp": 2, "microbatch": 1}),
        ("llama", {"tp": 2, "microbatch": 2, "recompute": "full"}),
        ("mixtral", {"ep": 2, "microbatch": 1}),
    ],
    ids=str,
)
def test_numbers_are_those_of_one_micro_batch_after_another(pool: RankPool, name: str, fix: dict[str, Any]):
    for count, worst, differ in pool.values(compared, name, 2, fix):
        assert count >= 2
        assert (worst, differ) == (0.0, [])


def test_gradients_that_each_micro_batch_would_reduce_are_reduced_once(pool: RankPool):
    for _, worst, _ in pool.values(compared, "llama", 2, {"dp_shard": 2, "zero": 2, "microbatch": 1}):
        assert worst < 1e-6


def test_one_rank_runs_two_at_once_too():
    assert compared(0, "weighted", 1, {"microbatch": 2})[1:] == (0.0, [])


def test_inputs_get_their_gradients_and_outputs_their_rows():
    model, (x, *_) = models()["plain"][0], models()["plain"][1]
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    fix = {"microbatch": 2, "batch_overlap": 2}
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(own,), fix=fix)

    (loss, made), (wanted, rows) = mine(own), model(theirs)
    loss.backward()
    wanted.backward()

    torch.testing.assert_close(made, rows)
    torch.testing.assert_close(own.grad, theirs.grad)
    with torch.no_grad():
        torch.testing.assert_close(mine(own), model(own))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("llama", {"tp": 2, "microbatch": 1}),
        ("mixtral", {"ep": 2, "microbatch": 1}),
        ("llama", {"dp_shard": 2, "zero": 2, "microbatch": 1}),
    ],
    ids=str,
)
def test_ranks_hold_what_the_plan_says(pool: RankPool, name: str, fix: dict[str, Any]):
    pytest.importorskip("transformers")
    plan = planned(name, 2, fix | {"batch_overlap": 2})

    outcomes = pool.run(on_rank, name, to_json(plan))

    assert [each.error for each in outcomes] == ["", ""]
    assert predicted_bytes(plan) == pytest.approx(max(each.value for each in outcomes), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("llama", {"tp": 2, "microbatch": 1}),
        ("llama", {"dp_shard": 2, "zero": 3, "microbatch": 1}),
        ("llama", {"dp_shard": 2, "zero": 2, "microbatch": 1}),
        ("mixtral", {"ep": 2, "microbatch": 1}),
    ],
    ids=str,
)
def test_emitted_collectives_are_the_priced_ones(name: str, fix: dict[str, Any]):
    captured = remembered(*tiny(name))
    options = PlanOptions.parse(fix=fix | {"batch_overlap": 2})
    plan = plan_captured(captured, name, ClusterSpec.parse("cpu:2"), options, Silent())
    staged = staged_program(captured, plan.decisions, 0, split=(), device="cpu").staged.stages[0]
    pairs = plan.workload.num_microbatches // 2

    found: Counter[tuple[str, str, int, str]] = Counter()
    for program, times in ((staged.begin, 1), (staged.forward, pairs), (staged.backward, pairs), (staged.finish, 1)):
        for each in () if program is None else emitted(program, {axis.name for axis in plan.decisions.mesh.axes}):
            found[each.op, each.axis, each.bytes, each.phase] += times if each.bytes > SCALAR else 0
    priced: Counter[tuple[str, str, int, str]] = Counter()
    for each in plan.decisions.collectives:
        priced[each.op, each.axis, each.bytes, each.phase] += each.count if each.bytes > SCALAR else 0
    assert found == priced
    assert found


@cache
def on_slow_hosts(**fix: int) -> Plan:
    """Return a plan of a small GPT in tensor parallelism over two hosts."""
    model, batch = SCENARIOS["gpt_balanced"].build()
    return autopar.plan(model, SLOW, example_inputs=batch, optimizer="adamw", fix={"tp": 2, **fix})


def test_collectives_that_one_micro_batch_waits_for_are_hidden_and_memory_is_paid_for_it():
    one, two = on_slow_hosts(microbatch=8, batch_overlap=1), on_slow_hosts(microbatch=8, batch_overlap=2)

    assert (one.decisions.schedule.batch_overlap, two.decisions.schedule.batch_overlap) == (1, 2)
    assert two.estimates.step_time_s < 0.9 * one.estimates.step_time_s
    exposed_s = [each.estimates.breakdown.exposed_communication_s for each in (one, two)]
    assert exposed_s[1] < exposed_s[0]
    assert two.estimates.step_time_s >= two.estimates.breakdown.compute_s
    assert two.estimates.peak_memory_bytes > one.estimates.peak_memory_bytes


def test_the_search_takes_it_where_it_is_faster_and_says_so():
    free = on_slow_hosts()
    without = on_slow_hosts(batch_overlap=1)

    assert free.decisions.schedule.batch_overlap == 2
    assert free.estimates.step_time_s < without.estimates.step_time_s
    assert free.solver.bound <= free.estimates.breakdown.compute_s  # what is proven of one after another says nothing
    assert "two at once" in table_text(free)


def test_a_plan_is_read_back_and_priced_as_it_was_searched():
    plan = on_slow_hosts(microbatch=8, batch_overlap=2)
    model, batch = SCENARIOS["gpt_balanced"].build()
    graph = autopar.capture.capture(model, batch).graph

    assert from_json(to_json(plan)).decisions == plan.decisions
    again = repriced(plan, graph, ClusterSpec.from_file(SLOW), VERSION)
    assert again.estimates.step_time_s == pytest.approx(plan.estimates.step_time_s, rel=1e-12)
    assert again.estimates.memory == plan.estimates.memory


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ({"batch_overlap": 3}, r"--fix batch_overlap=3: micro-batches run one at a time \(1\) or two \(2\)"),
        ({"batch_overlap": 2, "pp": 2}, r"--fix batch_overlap=2 runs two .* and --fix pp=2 asks for stages"),
        ({"batch_overlap": 2, "microbatch": 8}, r"a batch of 8 is no even number of micro-batches of 8 samples"),
    ],
    ids=str,
)
def test_what_cannot_run_two_at_once_is_said(fix: dict[str, Any], words: str):
    model, example = models()["mlp"]
    with pytest.raises(UsageError, match=words):
        autopar.plan(model, "cpu:2", example_inputs=example, fix=fix)
