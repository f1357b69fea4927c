"""Kernels of other devices: on local shapes they make local shapes of what they make on whole ones, on meta."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar.ir.placement import Replicate, Shard, local_shape
from autopar.ir.strategy import Strategy
from autopar.strategies import axis_strategies
from autopar.strategies.call import overload
from tests.strategies.make import c
from tests.strategies.one_op import Case

aten = torch.ops.aten


def m(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attention() -> Iterator[Case]:
    """Yield the attention kernels of GPUs, and their gradients."""
    q, state = m(4, 8, 32, 64), m(dtype=torch.int64)
    for causal in (False, True):
        yield c("_scaled_dot_product_flash_attention.default", q, q, q, 0.0, causal)
        out, sums, _, _, length, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)
        rest = (out, sums, state, state, length, length, 0.0, causal, seed, offset)
        yield c("_scaled_dot_product_flash_attention_backward.default", q, q, q, q, *rest)
        bias = m(4, 1, 32, 32)
        yield c("_scaled_dot_product_efficient_attention.default", q, q, q, bias, True, 0.0, causal)
        out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, bias, True, 0.0, causal)
        rest = (bias, out, sums, seed, offset, 0.0, [True, True, True, False], causal)
        yield c("_scaled_dot_product_efficient_attention_backward.default", q, q, q, q, *rest)
        yield c("_scaled_dot_product_cudnn_attention.default", q, q, q, None, True, 0.0, causal)


def norms() -> Iterator[Case]:
    """Yield the gradient of the fused RMS norm."""
    x, w = m(4, 8, 16), m(16)
    yield c("_fused_rms_norm_backward.default", x, x, [16], m(4, 8, 1, dtype=torch.float32), w, [True, True])


CASES = [*attention(), *norms()]


def locals_of(case: Case, strategy: Strategy, size: int) -> list[torch.Tensor]:
    """Return the local tensors that one rank reads."""
    return [
        torch.empty(local_shape(t.shape, (p,), (size,)), dtype=t.dtype, device="meta")
        for t, p in zip(case.tensors, strategy.inputs, strict=True)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.target}-{case.args[-1]}")
def test_local_kernel_makes_local_shapes(case: Case) -> None:
    found = axis_strategies(case.op, case.metas, 2, ())

    for strategy in found.strategies:
        local = iter(locals_of(case, strategy, 2))
        args = [next(local) if isinstance(each, torch.Tensor) else each for each in case.args]
        made = overload(case.target)(*args)
        for meta, placement, value in zip(case.op.outputs, strategy.outputs, made, strict=False):
            if meta is not None and placement is not None:
                assert tuple(value.shape) == local_shape(meta.shape, (placement,), (2,))


@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.target)
def test_attention_splits_batch_heads_and_queries_unless_causal(case: Case) -> None:
    found = axis_strategies(case.op, case.metas, 2, ()).strategies

    query = case.tensors.index(case.tensors[1 if "backward" in case.target else 0])
    assert {Shard(0), Shard(1)} <= {each.inputs[query] for each in found}


def test_queries_of_a_group_are_split_where_every_rank_has_all_keys() -> None:
    q, k = m(4, 32, 32, 64), m(4, 8, 32, 64)
    case = c("_scaled_dot_product_flash_attention.default", q, k, k, 0.0, True)

    found = axis_strategies(case.op, case.metas, 4, ()).strategies

    assert (Shard(1, outer=8), Replicate(), Replicate()) in {each.inputs for each in found}


@pytest.mark.parametrize(("causal", "splits"), [(False, True), (True, False)])
def test_query_positions_split_unless_the_mask_depends_on_them(causal: bool, splits: bool) -> None:
    q = m(4, 8, 32, 64)
    case = c("_scaled_dot_product_flash_attention.default", q, q, q, 0.0, causal)

    found = axis_strategies(case.op, case.metas, 2, ()).strategies

    assert any(each.inputs[0] == Shard(2) for each in found) == splits
