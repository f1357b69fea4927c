"""The matrix of `benchmarks.equivalence`: sharded programs compute what the single-device program does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import MESHES, MODELS, PLANS, cases

ROOT = Path(__file__).resolve().parents[2]
SPMD = ("free", "tp", "dp", "sharding")
IN_TIME = tuple(plan for plan in PLANS if plan not in SPMD)
QUICK = {("mlp", SPMD)}
TIMEOUT_S = 1800
RUNS = [(name, plans) for name in MODELS for plans in (SPMD, IN_TIME) if cases([name], [*MESHES], [*plans])]


@pytest.mark.parametrize(
    ("model", "plans"), [pytest.param(*run, marks=[] if run in QUICK else [pytest.mark.slow]) for run in RUNS]
)
def test_every_mesh_and_plan_gives_the_numbers_of_one_device(model: str, plans: tuple[str, ...], tmp_path: Path):
    rows = tmp_path / "rows.jsonl"

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.equivalence", "--models", model, "--plans", *plans, "--output", str(rows)],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert rows.exists(), done.stderr[-4000:]
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [case for case in made if not case["ok"]] == []
    assert len(made) == len(cases([model], [*MESHES], [*plans]))
    assert done.returncode == 0
