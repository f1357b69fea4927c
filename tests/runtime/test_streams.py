"""Collectives on process groups of their own, and merged ones, on two real gloo ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.capture import Captured
from autopar.ir.plan import Bucket, Decisions
from autopar.rewrite import rewrite
from tests.support.compiling import compile_with
from tests.support.decide import decide, mesh_of
from tests.support.models import cases
from tests.support.ranks import RankPool

PAIR = mesh_of(dp_shard=2)


def sharded(captured: Captured) -> Decisions:
    return decide(captured.graph, PAIR, zero=True, gather="per_phase")


def apart(captured: Captured) -> Decisions:
    return replace(sharded(captured), streams={"dp_shard": ("parameters", "gradients")})


def merged(captured: Captured) -> Decisions:
    decisions = apart(captured)
    emitted = rewrite(captured.joint, captured.graph, decisions, 0).emitted
    gathers = [each.tensor for each in emitted if (each.op, each.phase) == ("all_gather", "forward")]
    return replace(
        decisions, buckets=(Bucket(op="all_gather", axis="dp_shard", phase="forward", tensors=tuple(gathers)),)
    )


def gradients(rank: int, how: int) -> list[torch.Tensor]:
    model, example = cases()["mlp"]
    mine = compile_with(model, example, PAIR, decide_by=(sharded, apart, merged)[how])
    for _ in range(3):
        mine.zero_grad()
        mine(*example)[1].backward()
    return [parameter.grad.to_local().clone() for parameter in mine.parameters()]


@pytest.mark.parametrize("how", [1, 2], ids=["own groups", "own groups, gathered together"])
def test_gradients_are_bitwise_those_of_one_group_and_collectives_alone(pool: RankPool, how: int):
    for alone, other in zip(pool.values(gradients, 0), pool.values(gradients, how), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
