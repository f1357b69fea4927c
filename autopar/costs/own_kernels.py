"""What PyTorch's own kernels on GPUs take beyond one pass over what they read and write.

Elementwise kernels on tensors of one shape and type run at the rate of a copy. Those that convert, broadcast or join
compute each element's place and load elements one by one; norms and softmax read rows again that no cache holds;
gradients of norms' weights and sums over rows go through memory in two steps. Figures are of an H200 (torch 2.11,
benchmarks/results/single_gpu.jsonl), as shares of a pass: what a kernel took less what its traffic takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.tensor import TensorMeta
from cost_models.device import DeviceSpec

Shape = tuple[int, ...]

_UNROLLED = frozenset(
    {
        "aten._to_copy.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor",
        "aten.where.self", "aten.masked_fill.Scalar", "aten.masked_fill.Tensor", "aten.cat.default",
        "aten.index_put.default", "aten.slice_backward.default", "aten.select_backward.default",
    }
)  # fmt: skip
"""Elementwise kernels that have a slower form for tensors that differ in shape or type."""

_SLOWER = 0.6
"""Further share of its traffic's time that the slower form takes: casts between 16 and 32 bits run at 2.6 to 2.8 TB/s,
products with broadcast rows at 2.5, copies at 4.35."""

_LARGEST_READ: Mapping[str, float] = {
    "aten.native_layer_norm.default": 1.6,
    "aten.native_layer_norm_backward.default": 5.5,
    "aten.native_group_norm.default": 1.6,
    "aten.native_group_norm_backward.default": 5.5,
    "autopar_ops.cross_entropy_backward.default": 3.0,
}
"""Further passes over the largest tensor that is read."""

_CHANNEL_BY_CHANNEL: Mapping[str, float] = {
    "aten._native_batch_norm_legit_functional.default": 15.0,
    "aten._native_batch_norm_legit.no_stats": 15.0,
    "aten.native_batch_norm.default": 15.0,
    "aten.native_batch_norm_backward.default": 24.0,
}
_OF_ONE_BYTES_PER_S = 4.8e12 / 132
"""The same of batch norm on an H200, and the memory's rate there for each multiprocessor. Batch norm gives each channel
to one block of threads, which reads as fast as one multiprocessor can: that memory is faster for each of them helps it
nothing, so on devices with less memory bandwidth for each these passes are fewer."""

_SOFTMAX = frozenset({"aten._softmax.default", "aten._log_softmax.default"})
_CACHED_ROW_BYTES = 190e3
"""Rows of which more than one for each multiprocessor are in the last cache of an A100, H100 or H200."""

_AGAIN_CACHED, _AGAIN = 0.8, 1.7
"""Further passes of softmax over rows that the last cache holds while they are worked on, and over longer ones."""

_SUMS = frozenset({"aten.sum.dim_IntList", "aten.mean.dim"})
_SUM_STARTS, _FEW = 5.0, 64
"""Further start-ups of a kernel that sums many rows to one, from so many values for each result on."""


_REORDERED = 2.0
"""Further passes over a convolution's images: cuDNN brings channels innermost, and back."""

_AT_BEST, _KEYS, _BLOCK, _WIDTH, _WIDE = 0.83, 100.0, 128.0, 180.0, 128.0
"""cuDNN's attention on an H200: its time over what `vendor_attention_efficiency` says, for many keys and heads of 128;
keys at half the best rate; keys that a causal kernel computes together; elements of heads at half the best rate. Both
phases of five shapes, 512 to 4096 keys, heads of 64 and 128: -10 to +11 %; 40 % too fast with 197 keys."""

_MASKED = 3.4
"""Times cuDNN's that the memory-efficient kernel takes there, which programs run where attention has a mask."""


def attention_factor(width: float, keys: float, *, causal: bool, masked: bool, device: DeviceSpec) -> float:
    """Return the time of our programs' attention over what the device's efficiency says; 1 where that was not measured.

    `width`: elements of a head; `keys`: that each query sees, without a causal mask.
    """
    if device.kind != "gpu" or not device.own_programs or not device.vendor_attention_efficiency:
        return 1.0
    shape = (1 + _KEYS / max(1.0, keys)) * (1 + _WIDTH / max(1.0, width)) / (1 + _WIDTH / _WIDE)
    blocks = 1 + _BLOCK / max(1.0, keys) if causal and device.attention_block <= 1 else 1.0
    return _AT_BEST * shape * blocks * (_MASKED if masked else 1.0)


def reordered_bytes(
    metas: Sequence[TensorMeta], ins: Sequence[Shape], made: Sequence[int], device: DeviceSpec
) -> float:
    """Return the bytes that a convolution moves to bring images into the order that its kernel multiplies in.

    `made`: the bytes of what it makes.
    """
    if device.kind != "gpu" or not device.own_programs:
        return 0.0
    read = [math.prod(shape) * meta.item_bytes for shape, meta in zip(ins, metas, strict=True)]
    return _REORDERED * (sum(read) + sum(made))


def further_bytes(
    op: Op, metas: Sequence[TensorMeta], ins: Sequence[Shape], outs: Sequence[Shape], device: DeviceSpec
) -> float:
    """Return what PyTorch's own kernel for an operator takes beyond its traffic, as bytes at the rate of memory.

    Of a strategy whose local shapes are given. Software with kernels of its own takes none of this.
    """
    if device.kind != "gpu" or not device.own_programs or not ins:
        return 0.0
    read = [math.prod(shape) * meta.item_bytes for shape, meta in zip(ins, metas, strict=True)]
    if op.target in _UNROLLED:
        alike = {(tuple(shape), meta.dtype) for shape, meta in zip(ins, metas, strict=True) if math.prod(shape) > 1}
        made = {(tuple(shape), meta.dtype) for shape, meta in zip(outs, op.outputs, strict=True) if meta}
        written = [math.prod(shape) * meta.item_bytes for shape, meta in zip(outs, op.outputs, strict=True) if meta]
        return 0.0 if len(alike | made) <= 1 else _SLOWER * (sum(read) + sum(written))
    if op.target in _SOFTMAX:
        row_bytes = ins[0][-1] * metas[0].item_bytes if ins[0] else 0
        return (_AGAIN if row_bytes > _CACHED_ROW_BYTES else _AGAIN_CACHED) * max(read)
    if op.target in _SUMS:
        results = math.prod(outs[0]) if outs else 1
        return _SUM_STARTS * device.memory_half_bytes if math.prod(ins[0]) >= _FEW * results else 0.0
    passes = _LARGEST_READ.get(op.target, 0.0)
    if op.target in _CHANNEL_BY_CHANNEL:
        shared = (
            device.memory_bytes_per_s / device.multiprocessors / _OF_ONE_BYTES_PER_S if device.multiprocessors else 1.0
        )
        passes = shared * _CHANNEL_BY_CHANNEL[op.target]
    return passes * max(read)
