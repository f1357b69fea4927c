"""The matrix of `benchmarks.equivalence`: sharded programs compute what the single-device program does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.equivalence import MESHES, MODELS, PLANS

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"mlp"}
TIMEOUT_S = 1800


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
def test_every_mesh_and_plan_gives_the_numbers_of_one_device(model: str, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.equivalence", "--models", model, "--output", str(rows)],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert rows.exists(), done.stderr[-4000:]
    cases = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [case for case in cases if not case["ok"]] == []
    assert len(cases) == len(MESHES) * len(PLANS)
    assert done.returncode == 0
