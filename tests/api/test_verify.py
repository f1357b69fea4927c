"""`autopar verify`: sound plans pass, and each check notices what it is for."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.api import verifying
from autopar.api.verifying import verify_on_rank
from autopar.cli import INTERNAL_ERROR, main
from autopar.errors import StalePlanError, UsageError
from autopar.ir.plan import Plan
from autopar.models.values import resolve_with_values
from autopar.report.verification import Check, verification_json, verification_text
from autopar.runtime.witness import first_difference
from tests.support.ranks import RankPool

FACTORY = """
import os
import torch
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x).relu()
        return functional.mse_loss(x, y)

def make():
    torch.manual_seed(0)
    return Model(), (torch.randn(8, 32), torch.randn(8, 32))

def dies():
    if "RANK" in os.environ:
        os._exit(3)
    return make()

def bare():
    return Model()

def empty():
    with torch.device("meta"):
        return Model(), (torch.randn(8, 32), torch.randn(8, 32))
"""


class Layers(nn.Module):
    """Residual layers, with dropout if wanted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + functional.dropout(layer(x).relu(), self.dropout, self.training)
        return functional.mse_loss(x, y)


class Told(Layers):
    """The same under a mask of infinite numbers, with what the loss was made of in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 1), -torch.inf).triu())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last activations and the loss."""
        for layer in self.layers:
            x = x + layer(x).relu() * self.mask.softmax(0)[:1]
        return x, functional.mse_loss(x, y)


class Pointing(nn.Module):
    """Scores of places under a softmax: the gradient of their bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.score(torch.tanh(self.first(x))).squeeze(-1), y)


def pointing_example() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Pointing(), (torch.randn(16, 24, 8), torch.randint(24, (16,)))


def pointing(_rank: int, plan: Plan, folder: Path) -> list[Check]:
    return verify_on_rank(plan, *pointing_example(), folder)


def told(_rank: int, plan: Plan, folder: Path) -> list[Check]:
    return verify_on_rank(plan, *told_example(), folder)


def told_example() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Told(), (torch.randn(8, 32), torch.randn(8, 32))


def example(dropout: float = 0.0) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Layers(dropout), (torch.randn(8, 32), torch.randn(8, 32))


def planned(fix: dict[str, int], dropout: float = 0.0) -> Plan:
    model, batch = example(dropout)
    return autopar.plan(model, "cpu:2", example_inputs=batch, fix=fix)


def checked(_rank: int, plan: Plan, folder: Path, dropout: float, spoil: str) -> list[Check]:
    """Verify on a rank; `spoil` names what goes wrong there."""
    model, batch = example(dropout)
    if spoil == "memory":  # so small a model is less than what is allowed for scraps
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verifying, "SCRAP_BYTES", 0)
            return verify_on_rank(plan, model, batch, folder)
    if spoil == "optimizer" and _rank == 1:
        plain = torch.optim.AdamW.step

        def step(self: torch.optim.AdamW, closure: None = None) -> None:
            plain(self, closure)
            with torch.no_grad():
                for each in self.param_groups[0]["params"]:
                    each.mul_(1.01)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", step)
            return verify_on_rank(plan, model, batch, folder)
    return verify_on_rank(plan, model, batch, folder)


@pytest.mark.parametrize(
    "fix",
    [
        {"dp_replicate": 2},
        {"dp_replicate": 2, "microbatch": 2},
        {"dp_shard": 2, "zero": 3},
        {"tp": 2},
        {"pp": 2, "microbatch": 2},
    ],
    ids=str,
)
def test_a_sound_plan_passes_every_check(pool: RankPool, tmp_path: Path, fix: dict[str, int]):
    first, second = pool.values(checked, planned(fix), tmp_path, 0.0, "")

    assert first == second
    assert [(each.name, each.outcome) for each in first] == [
        (name, "ok") for name in ("loss", "gradients", "state", "replicas", "collective order", "memory")
    ]
    assert ("0 collectives" in first[4].found) == ("pp" in fix)


@pytest.mark.parametrize("fix", [{"tp": 2}, {"pp": 2, "microbatch": 2}], ids=str)
def test_what_a_model_gives_beside_its_loss_is_not_trained_on(pool: RankPool, tmp_path: Path, fix: dict[str, int]):
    model, batch = told_example()
    plan = autopar.plan(model, "cpu:2", example_inputs=batch, fix=fix)

    assert {each.outcome for each in pool.values(told, plan, tmp_path)[0]} == {"ok"}


@pytest.mark.parametrize("fix", [{"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_a_gradient_that_is_rounding_alone_is_not_called_wrong(pool: RankPool, tmp_path: Path, fix: dict[str, int]):
    model, batch = pointing_example()
    plan = autopar.plan(model, "cpu:2", example_inputs=batch, fix=fix)

    assert {each.outcome for each in pool.values(pointing, plan, tmp_path)[0]} == {"ok"}


def test_values_that_drift_apart_on_one_rank_are_found_by_two_checks(pool: RankPool, tmp_path: Path):
    found = {c.name: c for c in pool.values(checked, planned({"dp_replicate": 2}), tmp_path, 0.0, "optimizer")[0]}

    assert {name for name, each in found.items() if each.outcome == "failed"} == {"loss", "state", "replicas"}
    assert "layers.0.bias" in found["replicas"].found
    assert "(limit 1e-04), after 3 adamw steps, 8 parameters and buffers together" in found["state"].found


def test_more_memory_than_planned_is_found(pool: RankPool, tmp_path: Path):
    plan = planned({"dp_replicate": 2})
    memory = plan.estimates.memory
    less = replace(memory, optimizer=0, reserved=memory.reserved + memory.optimizer)
    short = replace(plan, estimates=replace(plan.estimates, memory=less))
    found = pool.values(checked, short, tmp_path, 0.0, "memory")[0]

    assert [each.name for each in found if each.outcome == "failed"] == ["memory"]


def test_numbers_of_a_model_with_dropout_are_not_compared_and_the_rest_is(pool: RankPool, tmp_path: Path):
    first = pool.values(checked, planned({"dp_replicate": 2}, 0.5), tmp_path, 0.5, "")[0]

    assert [(each.name, each.outcome) for each in first] == [
        ("numerics", "skipped"), ("replicas", "ok"), ("collective order", "ok"), ("memory", "ok"),
    ]  # fmt: skip
    assert "dropout 0" in first[0].found


def test_another_order_or_one_collective_less_on_a_rank_is_named():
    both = {(0, 1): ["all_gather a", "all_reduce b"], (0,): ["all_reduce c"]}
    alone = {(0, 1): ["all_gather a", "all_reduce b"]}

    assert first_difference([both, alone]) is None
    assert first_difference([both, {(0, 1): ["all_gather a"]}]) == (
        "on the group of ranks 0, 1, collective 2 is 'all_reduce b' on rank 0, 'nothing' on rank 1"
    )
    assert first_difference([{(0, 1): ["x", "y"]}, {(0, 1): ["y", "x"]}]) == (
        "on the group of ranks 0, 1, collective 1 is 'x' on rank 0, 'y' on rank 1"
    )


def test_the_command_prints_a_line_a_check_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.py").write_text(FACTORY)
    plan, reference = str(tmp_path / "plan.json"), f"{tmp_path / 'model.py'}:make"
    assert main(["plan", reference, "-c", "cpu:2", "--fix", "tp=2", "-o", plan]) == 0
    capsys.readouterr()

    assert main(["verify", plan, reference, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"]
    assert told["ranks"] == 2
    assert {each["name"] for each in told["checks"]} >= {"loss", "gradients", "state", "memory"}


def as_a_rank(_rank: int, command: list[str]) -> int:
    return main(command)


def test_the_command_tells_that_the_plan_is_of_another_program(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model.py").write_text(FACTORY)
    plan = str(tmp_path / "plan.json")
    assert main(["plan", f"{tmp_path / 'model.py'}:make", "-c", "cpu:2", "--fix", "tp=2", "-o", plan]) == 0
    capsys.readouterr()

    def on_ranks_that_are_there(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        pool.values(as_a_rank, command[command.index("autopar") + 1 :])
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(subprocess, "run", on_ranks_that_are_there)

    assert main(["verify", plan, "zoo:mlp"]) == StalePlanError.exit_code
    assert "is stale" in capsys.readouterr().err


def test_a_rank_that_dies_is_no_finding_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.py").write_text(FACTORY)
    plan, reference = str(tmp_path / "plan.json"), f"{tmp_path / 'model.py'}:dies"
    assert main(["plan", reference, "-c", "cpu:2", "--fix", "tp=2", "-o", plan]) == 0

    assert main(["verify", plan, reference]) == INTERNAL_ERROR

    told = capsys.readouterr().err
    assert told.endswith("autopar: a rank ended without a result; what it said is above\n")


def test_findings_are_counted_and_told_to_machines():
    checks = [Check("loss", "ok", "fine"), Check("memory", "failed", "too much"), Check("numerics", "skipped", "why")]

    assert verification_text("p.json", "m", 2, checks).splitlines() == [
        "ok      loss      fine",
        "failed  memory    too much",
        "skipped numerics  why",
        "p.json of m on 2 ranks: 3 checks, 1 failed, 1 skipped",
    ]
    assert not json.loads(verification_json("p.json", "m", 2, checks))["passed"]


@pytest.mark.parametrize(
    ("factory", "text"),
    [("bare", "must return (model, example_inputs)"), ("empty", "layers.0.weight, layers.0.bias, layers.1.weight")],
)
def test_a_factory_without_values_is_refused(tmp_path: Path, factory: str, text: str):
    (tmp_path / "model.py").write_text(FACTORY)

    with pytest.raises(UsageError) as caught:
        resolve_with_values(f"{tmp_path / 'model.py'}:{factory}")

    assert text in str(caught.value)


@pytest.mark.parametrize("reference", ["zoo:llama-tiny", "zoo:resnet-tiny", "zoo:mlp"])
def test_equal_seeds_give_equal_models_and_batches(reference: str):
    small = {"hidden": "32"} if reference == "zoo:mlp" else {}
    model, batch = resolve_with_values(reference, batch=2, overrides=small, seed=3)
    again, other = resolve_with_values(reference, batch=2, overrides=small, seed=3)

    assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.isfinite(model(*batch))
