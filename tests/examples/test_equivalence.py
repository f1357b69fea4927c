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
QUICK = ("mlp", ("sharding",), ("2x2",))
"""A plan on the mesh of two levels that has all that data parallelism has; others are in
`tests/runtime/test_four_ranks.py` and `test_two_level.py`, and the rest belongs to the full matrix."""
TIMEOUT_S = 1800
RUNS = [
    QUICK,
    *(
        pytest.param(name, plans, tuple(MESHES), marks=pytest.mark.slow)
        for name in MODELS
        for plans in (SPMD, IN_TIME)
        if cases([name], [*MESHES], [*plans])
    ),
]


@pytest.mark.parametrize(("model", "plans", "meshes"), RUNS)
def test_every_mesh_and_plan_gives_the_numbers_of_one_device(
    model: str, plans: tuple[str, ...], meshes: tuple[str, ...], tmp_path: Path
):
    rows = tmp_path / "rows.jsonl"
    wanted = ["--models", model, "--meshes", *meshes, "--plans", *plans, "--output", str(rows)]

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.equivalence", *wanted],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert rows.exists(), done.stderr[-4000:]
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [case for case in made if not case["ok"]] == []
    assert len(made) == len(cases([model], [*meshes], [*plans]))
    assert done.returncode == 0
