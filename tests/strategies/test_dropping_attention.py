"""Attention that drops scores: split by samples and heads, backward as forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.costs.operators import flops
from autopar.costs.workspaces import workspace_bytes
from autopar.ir.placement import Replicate, Shard
from autopar.ir.reshard import is_reachable
from autopar.ir.strategy import MeshStrategy
from autopar.own_attention import BLOCK_ATTENTION, BLOCK_ATTENTION_BACKWARD
from autopar.strategies import axis_strategies
from autopar.strategies.random import LOWERING
from cost_models.device import catalogued_device
from tests.strategies.make import f
from tests.strategies.one_op import Case
from tests.support.remembering import remembered

HEADS, SHARED = 8, 2


def cases() -> tuple[Case, Case]:
    """Return a call of the kernel and of its gradient: queries share keys, under a mask of every head."""
    query, key, mask = f(4, HEADS, 6, 8), f(4, SHARED, 6, 8), f(HEADS, 6, 6)
    made = BLOCK_ATTENTION(query, key, key, 0.5, False, mask)
    forward = Case(str(BLOCK_ATTENTION), (query, key, key, 0.5, False, mask), {})
    rest = (query, key, key, *made, 0.5, False, mask)
    return forward, Case(str(BLOCK_ATTENTION_BACKWARD), (query, *rest), {})


def test_forward_is_split_by_samples_and_heads_and_draws() -> None:
    forward, _ = cases()
    found = axis_strategies(forward.op, forward.metas, 2, ()).strategies

    assert {each.lowering for each in found} == {LOWERING}
    assert [each.outputs for each in found] == [
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Shard(0), Shard(0, rows="own")),
        (Shard(1), Shard(1), Shard(1, rows="own")),
        (Shard(1, 2), Shard(1, 2), Shard(1, 2, rows="own")),
    ]
    assert [each.inputs[3] for each in found] == [Replicate(), Replicate(), Shard(0), Shard(0, 2)]


def test_backward_can_be_split_only_as_its_forward_was() -> None:
    forward, backward = cases()
    states = [each.outputs[2] for each in axis_strategies(forward.op, forward.metas, 2, ()).strategies]
    read = [each.inputs[6] for each in axis_strategies(backward.op, backward.metas, 2, ()).strategies]

    assert read == states
    for made in states:
        assert made is not None
        assert [want for want in read if is_reachable((made,), (want,))] == [made]


class Attends(nn.Module):
    """Attention that drops scores, causal, or trains its mask."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64, 64)) if trained else None
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x).view(4, 64, 4, 16).transpose(1, 2)
        dropped, causal = (0.0, False) if self.bias is not None else (0.1, True)
        return functional.scaled_dot_product_attention(q, q, q, self.bias, dropped, causal).square().mean()


@pytest.mark.parametrize("trained", [False, True])
def test_only_a_mask_s_gradient_is_made_of_all_scores_on_gpus(trained: bool) -> None:
    graph = remembered(Attends(trained), (torch.randn(4, 64, 64),)).graph
    (backward,) = (op for op in graph.ops if op.target == str(BLOCK_ATTENTION_BACKWARD))
    metas = [graph.meta(ref) for ref in backward.refs]
    alone = MeshStrategy((), ((),) * len(metas), ((),) * len(backward.outputs))
    on_gpu, on_cpu = (
        workspace_bytes(backward, metas, [alone], (), catalogued_device(name)) for name in ("h100-sxm-80gb", "cpu")
    )

    assert on_cpu is None
    assert flops(backward, metas) == (1.0 if trained else 0.5) * 5 * 2 * 4 * 4 * 64 * 64 * 16
    assert (None if on_gpu is None else on_gpu.tolist()) == ([4 * 4 * 64 * 64 * 4] if trained else None)


def test_ranks_of_other_heads_draw_other_scores() -> None:
    torch.manual_seed(0)
    first, second = (BLOCK_ATTENTION(*(f(1, 2, 8, 8) for _ in range(3)), 0.5, False)[2] for _ in range(2))

    assert not torch.equal(first, second)
