"""Gradients that travel together arrive as they do alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.ir.plan import Ahead, Bucket, Decisions
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import RewriteError, rewrite
from autopar.rewrite.marks import mark, role
from cost_models.cluster import ClusterSpec
from tests.support.models import cases
from tests.support.whole import Whole, run_ranks


def planned(whole: Whole, cluster: str = "cpu:2", **fix: int) -> Decisions:
    options = PlanOptions.parse(fix=fix)
    return plan_captured(whole.captured, "model", ClusterSpec.parse(cluster), options, Silent()).decisions


FIXED = [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 2}]


@pytest.mark.parametrize("fix", FIXED, ids=str)
@pytest.mark.parametrize("name", ["mlp", "vision", "tied"])
def test_values_are_bitwise_those_of_collectives_alone(name: str, fix: dict[str, int]):
    whole = Whole.of(*cases()[name])
    decisions = planned(whole, **fix)

    merged = run_ranks(whole, decisions)
    alone = run_ranks(whole, replace(decisions, buckets=(), ahead=(), deferred={}, streams={}))

    assert sum(len(each.tensors) for each in decisions.buckets) > 1
    for mine, its in zip(merged.results, alone.results, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert torch.equal(a, b)
    calls = [len(ranked.issued[0]) for ranked in (merged, alone)]
    assert calls[0] == calls[1] - sum(len(each.tensors) - 1 for each in decisions.buckets)
    assert sum(each.bytes for each in merged.issued[0]) == sum(each.bytes for each in alone.issued[0])


def test_sharded_parameters_are_gathered_and_their_gradients_scattered_together():
    decisions = planned(Whole.of(*cases()["mlp"]), dp_shard=2, zero=3)

    assert {(each.op, each.phase) for each in decisions.buckets} == {
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
    }


OVERLAPPED = [
    ("mlp", "cpu:1x2", {"dp_shard": 2, "zero": 3}),
    ("vision", "cpu:1x2", {"dp_shard": 2, "zero": 3}),
    ("tied", "cpu:1x4", {"dp_shard": 2, "tp": 2}),
    ("mlp", "cpu:1x4", {"dp_replicate": 4}),
]


@pytest.mark.parametrize(("name", "cluster", "fix"), OVERLAPPED)
def test_values_are_bitwise_the_same_with_and_without_overlap(name: str, cluster: str, fix: dict[str, int]):
    whole = Whole.of(*cases()[name])
    options = PlanOptions.parse(fix=fix, overlap=False)
    plain = plan_captured(whole.captured, "model", ClusterSpec.parse(cluster), options, Silent()).decisions

    overlapped = planned(whole, cluster, **fix)

    assert (plain.buckets, plain.ahead, dict(plain.deferred), dict(plain.streams)) == ((), (), {}, {})
    assert overlapped.buckets
    for mine, its in zip(run_ranks(whole, overlapped).results, run_ranks(whole, plain).results, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_every_way_to_overlap_at_once_changes_no_value():
    whole = Whole.of(*cases()["mlp"])
    decisions = replace(planned(whole, "cpu:1x2", dp_shard=2, zero=3), buckets=(), deferred={})
    alone = replace(decisions, ahead=())
    streams = {"dp_shard": ("parameters", "gradients")}
    gathers = rewrite(whole.captured.joint, whole.captured.graph, alone, 0).emitted
    first = next(op.name for op in whole.captured.graph.ops if op.kind == "call" and "mm" in op.target)
    ahead = tuple(
        Ahead(axis=each.axis, phase="forward", tensor=each.tensor, before=first)
        for each in gathers
        if (each.op, each.phase) == ("all_gather", "forward")
    )

    moved = run_ranks(whole, replace(alone, ahead=ahead, streams=streams))

    ops = [each.op for each in moved.issued[0]]
    assert ops[: len(ahead)] == ["all_gather"] * len(ahead)
    for mine, its in zip(moved.results, run_ranks(whole, alone).results, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert a is b is None or torch.equal(a, b)


class Normed(nn.Module):
    """A convolution, whose backward gives three gradients at once, and a layer norm, whose backward does, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.head(self.norm(torch.relu(self.conv(x)))).square().mean()


def test_gradients_made_beside_others_travel_together_and_computed_last_are_the_same():
    whole = Whole.of(Normed(), (torch.randn(4, 3, 8, 8),))
    decisions = planned(whole, "cpu:1x2", dp_replicate=2)

    together = {name for bucket in decisions.buckets for name in bucket.tensors}
    assert together == {f"{module}.{name}" for module in ("conv", "norm", "head") for name in ("weight", "bias")}
    products = [op.name for op in whole.captured.graph.ops if op.phase == "backward" and "mm" in op.target]
    late = replace(decisions, buckets=(), deferred={products[-1]: ""})
    backward = rewrite(whole.captured.joint, whole.captured.graph, late, 0).backward
    assert backward is not None
    order = [node for node in backward.graph.nodes if node.op == "call_function"]
    at = next(place for place, node in enumerate(order) if mark(node).origin == products[-1])
    assert sum(role(node) == "start" for node in order[at:]) == 1
    for mine, its in zip(run_ranks(whole, decisions).results, run_ranks(whole, late).results, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_a_bucket_is_reduced_in_place_once_its_last_gradient_is_there():
    whole = Whole.of(*cases()["mlp"])
    decisions = planned(whole, dp_replicate=2)

    backward = rewrite(whole.captured.joint, whole.captured.graph, decisions, 0).backward

    (merged,) = backward.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_reduce_coalesced_.default
    )
    nodes = list(backward.graph.nodes)
    after = [node for node in nodes[nodes.index(merged) :] if "mm" in str(node.target)]
    assert not after
    assert decisions.buckets == (Bucket(axis="dp_replicate", tensors=tuple(decisions.buckets[0].tensors)),)
    assert set(decisions.buckets[0].tensors) <= set(dict(cases()["mlp"][0].named_parameters()))


def test_buckets_lie_along_one_axis_of_several():
    whole = Whole.of(*cases()["mlp"])
    decisions = planned(whole, "cpu:4", dp_replicate=2, tp=2)

    ranked = run_ranks(whole, decisions)
    alone = run_ranks(whole, replace(decisions, buckets=()))

    assert {each.axis for each in decisions.buckets} <= {"dp_replicate", "tp"}
    for mine, its in zip(ranked.results, alone.results, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_a_bucket_of_what_is_not_reduced_is_a_fault():
    whole = Whole.of(*cases()["mlp"])
    decisions = replace(planned(whole, tp=2), buckets=(Bucket(axis="tp", tensors=("up.weight", "down.weight")),))

    with pytest.raises(RewriteError, match=r"reduces no gradient of up.weight, down.weight, and a bucket names it"):
        rewrite(whole.captured.joint, whole.captured.graph, decisions, 0)
