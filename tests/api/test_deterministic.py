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
import autopar.api
from autopar.api import planning
from autopar.capture import capture
from autopar.cli import main
from autopar.models import resolve
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import rewrite
from cost_models.cluster import ClusterSpec
from tests.api.test_known_plans import Mlp


def planned_and_rewritten(path: Path) -> str:
    """Write the plan that the command makes, and return the programs of a rank under one of two axes."""
    found = resolve("zoo:gpt-tiny", batch=8)
    captured = capture(found.model, found.example_inputs)
    options = PlanOptions.parse(fix={"tp": 2, "dp_shard": 2, "zero": 3})
    plan = autopar.api.plan_captured(captured, "gpt", ClusterSpec.parse("cpu:2x2"), options, Silent())
    programs = rewrite(captured.joint, captured.graph, plan.decisions, 0)

    with pytest.MonkeyPatch.context() as patched:
        # the same program: to capture it again takes as long as all this
        patched.setattr(autopar.api, "captured_for", lambda *_, **__: captured)
        assert main(["plan", "zoo:gpt-tiny", "-c", "cpu:2x2", "--batch", "8", "-o", str(path)]) == 0
    return f"{programs.forward.code} {programs.backward.code} {programs.emitted} {programs.saved}"


def test_plans_and_programs_do_not_depend_on_the_hash_seed(tmp_path: Path):
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    ask = f"import sys; from {__name__} import *; sys.stdout.write(planned_and_rewritten(Path(sys.argv[1])))"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    program = planned_and_rewritten(here)
    done = subprocess.run(
        [sys.executable, "-c", ask, str(there)],
        check=True, capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip

    assert here.read_text() == there.read_text()
    assert done.stdout.endswith(program)
    assert "all_gather" in program


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
