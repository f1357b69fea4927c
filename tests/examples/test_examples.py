"""Every example runs as its docstring says, and trains as the same script does without autopar."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.ir.plan import Plan
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RANKS = 4
"""What the examples say that they run on."""

FEW_AND_ALL = [2, pytest.param(RANKS, marks=pytest.mark.slow)]
"""Ranks take turns on a machine of few cores, and each has the whole program to capture: with two of them a script does
all that it does with four, but for what the plan splits over meshes of two axes, which `test_the_mlp...` has here,
`test_equivalence.py` and `tests/runtime/test_four_ranks.py` on all that users do."""

TIMEOUT_S = 300


def without_autopar() -> None:
    """Let `compile` give the model back."""
    autopar.compile = lambda model, *_, **__: model


def run(*command: str) -> str:
    """Return what a command prints; it must succeed in time."""
    clean = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "AUTOPAR_PLAN"}}
    environment = {**clean, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss +([0-9.]+)", text)]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_starts_with_what_it_shows_and_its_command(name: str):
    told = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))

    assert told is not None
    assert f"examples/{name}.py" in told


def test_the_mlp_has_the_losses_of_one_device():
    rows = [line.split() for line in run_script(EXAMPLES / "mlp.py", RANKS).splitlines()]
    rows = [row for row in rows if row and row[0].isdigit()]

    assert len(rows) == 5
    assert [float(row[1]) for row in rows] == pytest.approx([float(row[2]) for row in rows], rel=1e-5)


@pytest.mark.parametrize("ranks", FEW_AND_ALL)
@pytest.mark.parametrize(("name", "tolerance"), [("hf_llama", 1e-4), ("moe", 1e-4), ("vision", 1e-2)])
def test_an_example_trains_as_without_autopar(name: str, tolerance: float, ranks: int):
    # Rounding grows over many steps of momentum and batch statistics, so vision gets more room.
    sharded = run_script(EXAMPLES / f"{name}.py", ranks)

    alone = run_script(EXAMPLES / f"{name}.py", 0, before=without_autopar)
    assert len(losses(sharded)) >= 10
    assert losses(sharded) == pytest.approx(losses(alone), rel=tolerance)
    assert losses(sharded)[-1] < losses(sharded)[0]


@pytest.mark.parametrize("ranks", FEW_AND_ALL)
def test_the_demo_plans_trains_and_compares(tmp_path: Path, ranks: int):
    plan = str(tmp_path / "demo.json")

    cluster, calibration = str(tmp_path / "cluster.yaml"), "calibration.json"
    detected = ("--cpu-ranks", str(ranks), "--calibration", calibration)
    run("-m", "autopar", "cluster", "detect", *detected, "-o", cluster)
    run("-m", "autopar", "calibrate", "--quick", "-c", cluster, "-o", str(tmp_path / calibration))
    run("-m", "autopar", "plan", "examples/gpt.py:build", "-c", cluster, "--batch", "16", "-o", plan)
    said = run("-m", "autopar", "run", plan, "--", "examples/gpt.py", "--steps", "8")

    assert losses(said)[-1] < losses(said)[0]
    predicted = Plan.load(plan).estimates.step_time_s
    assert str(Plan.load(plan).cluster["calibrated"]).startswith(f"{calibration}: autopar calibrate")
    assert re.search(rf"predicted {predicted * 1e3:.1f} ms a step, measured [0-9.]+ ms", said)


def test_llama_is_planned_for_64_gpus_without_any(tmp_path: Path):
    plan = tmp_path / "llama.json"

    said = run_script(EXAMPLES / "plan_llama3_8b.py", 0, "--layers", "2", "-o", str(plan))

    loaded = Plan.load(plan)
    assert loaded.decisions.mesh.world_size == 64
    assert said.splitlines()[-1].startswith("plan: ")
    assert 0 < loaded.estimates.peak_memory_bytes <= loaded.estimates.memory_budget_bytes
