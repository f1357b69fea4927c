"""Every collective that the rewriter emits is one that the plan priced, and the other way round."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.api import plan_captured
from autopar.capture import capture
from autopar.capture.recompute import recomputed
from autopar.models.hf_tiny import BATCH, tiny
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import rewrite
from cost_models.cluster import ClusterSpec
from tests.support.remembering import remembered

PLANS = [
    ("llama", "cpu:4", {"tp": 2}),
    ("llama", "cpu:4", {"dp_shard": 4, "zero": 3, "recompute": "full"}),
    ("llama", "cpu:3", {"dp_shard": 3, "zero": 3}),
    ("bert", "cpu:6", {"dp_shard": 3, "tp": 2, "zero": 3}),
    ("gpt2", "cpu:4", {"tp": 4}),
    ("bert", "cpu:2x2", {"dp_shard": 2, "tp": 2, "pp": 1, "microbatch": 4}),
    pytest.param("t5", "cpu:2", {"tp": 2}, marks=pytest.mark.slow),
    ("vit", "cpu:4", {"dp_replicate": 2, "dp_shard": 2}),
    ("resnet", "cpu:2", {"dp_replicate": 2}),
    ("mixtral", "cpu:2", {"tp": 2}),
    ("mixtral", "cpu:2", {"ep": 2}),
    pytest.param("mamba", "cpu:2", {"tp": 2}, marks=pytest.mark.slow),
    pytest.param("whisper", "cpu:2", {"tp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "cluster", "fix"), PLANS)
def test_emitted_collectives_are_the_priced_ones(name: str, cluster: str, fix: dict[str, object]) -> None:
    spec = ClusterSpec.parse(cluster)
    model, batch = tiny(name, batch=12 if spec.device_count % 3 == 0 else BATCH)
    captured = remembered(model, batch)
    plan = plan_captured(captured, name, spec, PlanOptions.parse(fix=fix), Silent())
    if plan.decisions.recompute:
        captured = recomputed(capture(model, batch), {"*": "full"})  # which writes into what it is given

    programs = rewrite(captured.joint, captured.graph, plan.decisions, rank=0)

    priced: Counter[tuple[str, str, int, str]] = Counter()
    for each in plan.decisions.collectives:
        priced[each.op, each.axis, each.bytes, each.phase] += each.count
    emitted = Counter((each.op, each.axis, each.bytes, each.phase) for each in programs.emitted)
    assert emitted == priced
    assert emitted
