"""Equal requests give equal bytes, in whatever order a process's sets are, on any machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autopar
from autopar.api import planning
from tests.api.test_known_plans import Mlp

PLAN_AND_REWRITE = """
import sys
import autopar.api
from autopar.capture import capture
from autopar.cli import main
from autopar.models import resolve
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import rewrite
from cost_models.cluster import ClusterSpec

found = resolve("zoo:gpt-tiny", batch=8)
captured = capture(found.model, found.example_inputs)
options = PlanOptions.parse(fix={"tp": 2, "dp_shard": 2, "zero": 3})
plan = autopar.api.plan_captured(captured, "gpt", ClusterSpec.parse("cpu:2x2"), options, Silent())
programs = rewrite(captured.joint, captured.graph, plan.decisions, 0)
print(programs.forward.code, programs.backward.code, programs.emitted, programs.saved)

autopar.api.captured_for = lambda *_, **__: captured  # the same program: to capture it again takes as long as all this
assert main(["plan", "zoo:gpt-tiny", "-c", "cpu:2x2", "--batch", "8", "-o", sys.argv[1]]) == 0
"""


def test_plans_and_programs_do_not_depend_on_the_hash_seed(tmp_path: Path):
    plans, programs = set(), set()
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-c", PLAN_AND_REWRITE, str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=300)
        plans.add(path.read_text())
        programs.add(done.stdout)

    assert len(plans) == 1
    assert len(programs) == 1
    assert "all_gather" in programs.pop()


def plan_at(monkeypatch: pytest.MonkeyPatch, pace_s: float) -> autopar.Plan:
    """Return the plan made on a clock that goes on by `pace_s` whenever it is read."""
    ticks = itertools.count()
    clock = SimpleNamespace(process_time=lambda: next(ticks) * pace_s)
    with torch.device("meta"):
        model, x = Mlp(512, 4), torch.empty(256, 512)
    with monkeypatch.context() as patched:
        patched.setattr(planning, "time", clock)
        return autopar.plan(model, "h100-sxm-80gb:4x2", example_inputs=(x, x))


def test_plans_do_not_depend_on_how_fast_the_machine_is(monkeypatch: pytest.MonkeyPatch):
    fast, slow = plan_at(monkeypatch, 1e-3), plan_at(monkeypatch, 0.5)

    assert fast == slow
    assert fast.solver.seconds == 60


def test_time_that_others_had_of_the_machine_is_not_the_searchs(monkeypatch: pytest.MonkeyPatch):
    with torch.device("meta"):
        model, x = Mlp(512, 4), torch.empty(256, 512)
    quiet = autopar.plan(model, "h100-sxm-80gb:4x1", example_inputs=(x, x))
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) * 1e3)

    busy = autopar.plan(model, "h100-sxm-80gb:4x1", example_inputs=(x, x))

    assert busy == quiet
    assert busy.solver.status != "time_limit"
