"""Gradients that travel together arrive as they do alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.api import plan_captured
from autopar.ir.plan import Bucket, Decisions
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import RewriteError, rewrite
from cost_models.cluster import ClusterSpec
from tests.support.models import cases
from tests.support.whole import Whole, run_ranks


def planned(whole: Whole, cluster: str = "cpu:2", **fix: int) -> Decisions:
    options = PlanOptions.parse(fix=fix)
    return plan_captured(whole.captured, "model", ClusterSpec.parse(cluster), options, Silent()).decisions


@pytest.mark.parametrize("name", ["mlp", "vision", "tied"])
def test_values_are_bitwise_those_of_reductions_alone(name: str):
    whole = Whole.of(*cases()[name])
    decisions = planned(whole, dp_replicate=2)

    merged = run_ranks(whole, decisions)
    alone = run_ranks(whole, replace(decisions, buckets=()))

    assert sum(len(each.gradients) for each in decisions.buckets) > 1
    for mine, its in zip(merged.results, alone.results, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert torch.equal(a, b)
    calls = [len([each for each in ranked.issued[0] if each.op == "all_reduce"]) for ranked in (merged, alone)]
    assert calls[0] == calls[1] - sum(len(each.gradients) - 1 for each in decisions.buckets)
    assert sum(each.bytes for each in merged.issued[0]) == sum(each.bytes for each in alone.issued[0])


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
    assert decisions.buckets == (Bucket(axis="dp_replicate", gradients=tuple(decisions.buckets[0].gradients)),)
    assert set(decisions.buckets[0].gradients) <= set(dict(cases()["mlp"][0].named_parameters()))


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
    decisions = replace(planned(whole, tp=2), buckets=(Bucket(axis="tp", gradients=("up.weight", "down.weight")),))

    with pytest.raises(RewriteError, match=r"reduces no gradient of up.weight, down.weight, and a bucket names it"):
        rewrite(whole.captured.joint, whole.captured.graph, decisions, 0)
