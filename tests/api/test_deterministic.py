"""Equal requests give equal bytes, in whatever order a process's sets are, on any machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autopar
from autopar.api import planning
from tests.api.test_known_plans import Mlp


def test_plans_do_not_depend_on_the_hash_seed(tmp_path: Path):
    texts = set()
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        wish = ["zoo:gpt-tiny", "-c", "cpu:2x2", "--batch", "8", "-o", str(path)]
        command = [sys.executable, "-m", "autopar", "plan", *wish]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)
        texts.add(path.read_text())

    assert len(texts) == 1


def plan_at(monkeypatch: pytest.MonkeyPatch, pace_s: float) -> autopar.Plan:
    """Return the plan made on a clock that goes on by `pace_s` whenever it is read."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * pace_s)
    with torch.device("meta"):
        model, x = Mlp(512, 4), torch.empty(256, 512)
    with monkeypatch.context() as patched:
        patched.setattr(planning, "time", clock)
        return autopar.plan(model, "h100-sxm-80gb:4x2", example_inputs=(x, x))


def test_plans_do_not_depend_on_how_fast_the_machine_is(monkeypatch: pytest.MonkeyPatch):
    fast, slow = plan_at(monkeypatch, 1e-3), plan_at(monkeypatch, 0.5)

    assert fast == slow
    assert fast.solver.seconds == 60
