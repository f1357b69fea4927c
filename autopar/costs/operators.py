"""Seconds of one operator on local shapes, for all of its strategies at once.

Matrix products (with convolutions seen as such), attention kernels, recurrent
layers, scans, and everything else as traffic to memory. Views cost nothing and are
named; whatever is not named moves its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.costs.alignment import aligned_elements
from autopar.costs.core_work import evaluations
from autopar.costs.expanded import Shares
from autopar.costs.fusion import Fused, Inside
from autopar.costs.losses import NLL_FORWARD, loss_kernels
from autopar.costs.own_kernels import attention_factor, further_bytes, reordered_bytes
from autopar.costs.recurrent import is_recurrent, recurrent_flops, recurrent_seconds
from autopar.costs.scans import is_scan, scan_flops, scan_seconds
from autopar.costs.surroundings import ALONE, Surroundings
from autopar.ir.graph import BALANCED, Graph, Op
from autopar.ir.placement import Layout, local_shape
from autopar.ir.roles import is_attention, is_view
from autopar.ir.strategy import MeshStrategy
from autopar.ir.tensor import TensorMeta
from cost_models import compute
from cost_models.compute import ALIGNED_ELEMENTS
from cost_models.device import DeviceSpec, canonical_dtype, dtype_bytes
from cost_models.weakest import strongest_peaks

Seconds = NDArray[np.float64]
Shape = tuple[int, ...]
Shapes = Sequence[Sequence[Shape]]
"""Of each strategy, the local shapes of the tensors that an operator reads, or of those that it makes."""

Products = Sequence[Sequence[tuple[int, int, int, int]]]
"""Of each strategy, the matrix products (batch, m, n, k)."""

_READS_OUTPUT_ONLY = frozenset(
    {"aten.embedding.default", "aten.index.Tensor", "aten.gather.default", "aten.index_select.default"}
)
"""Lookups: what is read of the table is as much as what is written."""

_WRITES_WITHOUT_READING = (
    "aten.full",
    "aten.zeros",
    "aten.ones",
    "aten.empty",
    "aten.arange",
    "aten.new_",
    "aten.scalar",
)

_EXTRA_PASSES = {
    "aten.native_batch_norm.default": 1.0, "aten._native_batch_norm_legit_functional.default": 1.0,
    "aten._native_batch_norm_legit.no_stats": 1.0,
    "aten._softmax.default": 0.5, "aten._log_softmax.default": 0.5,
    "autopar_ops.cross_entropy_backward.default": 2.0,
}  # fmt: skip
"""Further times the largest input is read or written: statistics before the normalisation,
and the part of a gradient that cross entropy makes and reads again."""

_SPLIT_SOFTMAX: Mapping[str, tuple[float, float]] = {
    "aten._softmax.default": (7.5, 1.0),
    "aten._log_softmax.default": (5.5, 1.0),
    "aten._softmax_backward_data.default": (7.0, 1.0),
    "aten._log_softmax_backward_data.default": (5.0, 1.0),
}
"""Where classes are split over ranks, one kernel becomes several (`rewrite/lowerings/softmax.py`): further times that a
tensor of the scores' size is read or written, and further such tensors that are made. Counted there."""


def seconds(
    op: Op,
    metas: Sequence[TensorMeta],
    strategies: Sequence[MeshStrategy],
    sizes: tuple[int, ...],
    device: DeviceSpec,
    around: Surroundings = ALONE,
) -> Seconds:
    """Return the seconds of `op` on one device for each strategy; inner collectives are not included.

    Raises:
        CostModelError: the device has no compute rate for the operator's type.
    """
    if op.kind != "call" or is_view(op):
        return np.zeros(len(strategies))
    ins = [[local_shape(m.shape, s.inputs[i], sizes) for i, m in enumerate(metas)] for s in strategies]
    outs = [[_local(m, s.outputs[i], sizes) for i, m in enumerate(op.outputs)] for s in strategies]
    if (products := [_products(op, i, o) for i, o in zip(ins, outs, strict=True)]) and products[0]:
        return _multiplied(op, metas, ins, outs, products, device, around) + _fresh(op, outs, device)
    if is_recurrent(op):
        return recurrent_seconds(op, ins, _compute_dtype(op, metas), device) + _fresh(op, outs, device)
    if is_scan(op):
        return scan_seconds(op, ins, _compute_dtype(op, metas), device) + _fresh(op, outs, device)
    if is_attention(op):
        flops = np.array([_attention_flops(op, i, device) for i in ins], dtype=np.float64)
        keys = np.array([max(1, i[_keys_at(op)][-2]) for i in ins], dtype=np.float64)
        moved = _moved(op, metas, ins, outs, shares=around.shares)
        if trains_mask(op) and device.kind != "cpu":
            moved += 2.0 * np.array([score_bytes(op, metas, each) for each in ins], dtype=np.float64)
        attention = compute.attention_s(flops, moved, _compute_dtype(op, metas), device, keys)
        between = compute.memory_bound_s(np.zeros(len(ins)), device, _core_work(op, ins, outs, device))
        return np.asarray(attention + between, dtype=np.float64) + _fresh(op, outs, device)
    if theirs := loss_kernels(op, device.cross_entropy):
        item = metas[theirs.scores].item_bytes
        of_scores = np.array([math.prod(i[theirs.scores]) * item for i in ins], dtype=np.float64)
        return np.asarray(compute.memory_bound_s(theirs.passes * of_scores, device), dtype=np.float64)
    split = np.array([any(axis.lowering == "class" for axis in s.axes) for s in strategies], dtype=np.float64)
    return _memory_bound(op, metas, ins, outs, split, device, around.fused, around.shares)


def _multiplied(
    op: Op,
    metas: Sequence[TensorMeta],
    ins: Shapes,
    outs: Shapes,
    products: Products,
    device: DeviceSpec,
    around: Surroundings,
) -> Seconds:
    """Return the seconds of the matrix products of each strategy, casts to a narrow type included."""
    own = _compute_dtype(op, metas)
    if op.target.startswith("aten.convolution"):
        made = [[math.prod(s) * m.item_bytes for s, m in zip(o, op.outputs, strict=True) if m] for o in outs]
        moved = np.array([reordered_bytes(metas, i, o, device) for i, o in zip(ins, made, strict=True)])
        order_s = np.where(moved > 0, compute.memory_bound_s(moved, device), 0.0)
        of = _multiplied_in(op, own, device.peak_flops)
        return np.asarray(_product_seconds(products, of, device.for_convolutions()) + order_s, dtype=np.float64)
    if not device.narrow or around.narrowed is None:
        aligned = np.array([aligned_elements(op, each, around.across) for each in ins])
        return _product_seconds(products, own, device, aligned=aligned)
    cast = [sum(math.prod(shape) for shape, new in zip(each, around.narrowed, strict=True) if new) for each in ins]
    elements = np.array(cast, dtype=np.float64)
    casts = compute.narrowing_s(elements, dtype_bytes(own), device.narrow, device) * (elements > 0)
    return _product_seconds(products, device.narrow, device, dtype_bytes(own)) + casts


def _memory_bound(
    op: Op,
    metas: Sequence[TensorMeta],
    ins: Shapes,
    outs: Shapes,
    split: Seconds,
    device: DeviceSpec,
    fused: Fused | None,
    shares: Shares | None,
) -> Seconds:
    """Return the seconds of an operator that memory bounds, fused with its neighbours where the device's software does.

    `split` is 1 for strategies that split classes, and 0 for others.
    """
    passes, made = _SPLIT_SOFTMAX.get(op.target, (0.0, 0.0))
    scores = np.array([math.prod(i[0]) * metas[0].item_bytes if i else 0 for i in ins], dtype=np.float64)
    further = split * passes * scores
    further += np.array([further_bytes(op, metas, i, o, device) for i, o in zip(ins, outs, strict=True)])
    moved = _moved(op, metas, ins, outs, shares=shares) + further
    work = compute.memory_bound_s(moved, device, _core_work(op, ins, outs, device))
    if fused is not None and device.fusion:
        left = _moved(op, metas, ins, outs, fused.run, shares) + further
        if device.fuses_parts:
            moved = _moved(op, metas, ins, outs, fused.part, shares) + further
        work = compute.fused_s(moved, left, device)
    fresh = _fresh(op, outs, device) + split * made * compute.fresh_s(scores, device)
    return np.asarray(work, dtype=np.float64) + fresh


def _moved(
    op: Op,
    metas: Sequence[TensorMeta],
    ins: Shapes,
    outs: Shapes,
    inside: Inside | None = None,
    shares: Shares | None = None,
) -> Seconds:
    """Return the bytes that each strategy moves, less those that stay inside of a kernel with its neighbours."""
    traffic = [_traffic(op, metas, i, o, inside, shares) for i, o in zip(ins, outs, strict=True)]
    return np.array(traffic, dtype=np.float64)


def accumulation_seconds(
    op: Op, indices: Sequence[int], strategies: Sequence[MeshStrategy], sizes: tuple[int, ...], device: DeviceSpec
) -> Seconds:
    """Return the seconds of adding values that `op` makes to their sums over earlier micro-batches, a sum each."""
    total = np.zeros(len(strategies))
    for index in indices:
        meta = op.outputs[index]
        if meta is not None:
            held = [math.prod(_local(meta, s.outputs[index], sizes)) * meta.item_bytes for s in strategies]
            total += compute.accumulate_s(np.array(held, dtype=np.float64), device)
    return total


def _core_work(op: Op, ins: Shapes, outs: Shapes, device: DeviceSpec) -> Seconds:
    """Return the evaluations of exp of each strategy, where the device is one that they bound."""
    if not device.transcendentals_per_s:
        return np.zeros(len(ins))
    return np.array([evaluations(op, i, o) for i, o in zip(ins, outs, strict=True)], dtype=np.float64)


def _fresh(op: Op, outs: Shapes, device: DeviceSpec) -> Seconds:
    """Return the seconds of getting new memory for outputs that are too large to be kept by the allocator."""
    if not device.fresh_bytes:
        return np.zeros(len(outs))
    items = [meta.item_bytes if meta else 0 for meta in op.outputs]
    sizes = np.array([[math.prod(s) * b for s, b in zip(each, items, strict=True)] for each in outs], dtype=np.float64)
    total: Seconds = compute.fresh_s(sizes, device).sum(axis=1)
    return total


def flops(op: Op, metas: Sequence[TensorMeta]) -> float:
    """Return the floating-point operations of matrix products and attention in `op` on global shapes, 0 for others."""
    if op.kind != "call":
        return 0.0
    ins = [meta.shape for meta in metas]
    if is_recurrent(op):
        return recurrent_flops(op, ins)
    if is_scan(op):
        return scan_flops(op, ins)
    if is_attention(op):
        return _attention_flops(op, ins)
    outs = [meta.shape if meta else () for meta in op.outputs]
    return float(sum(2 * math.prod(product) for product in _products(op, ins, outs)))


def model_flops(graph: Graph) -> float:
    """Return the floating-point operations of all matrix products and attention of a program, on all its devices.

    Of the program as it was captured these are the model's; with layers recomputed they are the hardware's.
    """
    return sum(flops(op, [graph.meta(ref) for ref in op.refs]) for op in graph.ops)


def least_seconds(graph: Graph, devices: Sequence[DeviceSpec]) -> float:
    """Return what the products of a program take at least on all devices together: nothing computes above its peak.

    The longer of two bounds where devices differ: all products at the fastest device's peak on every one, and those of
    one data type at the peaks of all.
    """
    needed: dict[str, float] = {}
    peaks = strongest_peaks(devices)
    for op in graph.ops:
        metas = [graph.meta(ref) for ref in op.refs]
        if spent := flops(op, metas):
            dtype = _multiplied_in(op, canonical_dtype(_compute_dtype(op, metas)), peaks)
            needed[dtype] = needed.get(dtype, 0.0) + spent
    known = {dtype: spent for dtype, spent in needed.items() if dtype in peaks}
    alike_s = sum(spent / peaks[dtype] for dtype, spent in known.items()) / len(devices)
    together = (spent / sum(each.peak_flops.get(dtype, 0.0) for each in devices) for dtype, spent in known.items())
    return max(alike_s, *together, 0.0)


def issued_operators(graph: Graph, without: Collection[str] = ()) -> int:
    """Return how many operators a host issues, some left out: views are counted in what the others take."""
    return sum(op.kind == "call" and not is_view(op) and op.name not in without for op in graph.ops)


def _local(meta: TensorMeta | None, layout: Layout | None, sizes: tuple[int, ...]) -> Shape:
    return local_shape(meta.shape, layout, sizes) if meta is not None and layout is not None else ()


def _compute_dtype(op: Op, metas: Sequence[TensorMeta]) -> str:
    floating = [meta.dtype for meta in metas if meta.is_floating]
    return floating[0] if floating else "float32"


def _products(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> list[tuple[int, int, int, int]]:
    """Return the matrix products (batch, m, n, k) that the operator consists of; empty if it is none."""
    match op.target:
        case "aten.mm.default":
            (m, k), (_, n) = ins[0], ins[1]
            return [(1, m, n, k)]
        case "aten.addmm.default":
            (m, k), (_, n) = ins[1], ins[2]
            return [(1, m, n, k)]
        case "aten.bmm.default":
            (b, m, k), (_, _, n) = ins[0], ins[1]
            return [(b, m, n, k)]
        case "aten.baddbmm.default":
            (b, m, k), (_, _, n) = ins[1], ins[2]
            return [(b, m, n, k)]
        case "aten.addbmm.default":
            (b, m, k), (_, _, n) = ins[1], ins[2]
            return [(1, m, n, b * k)]
        case "aten.linear.default":
            return [(1, math.prod(ins[0][:-1]), ins[1][0], ins[0][-1])]
        case "aten._grouped_mm.default" | "transformers.grouped_mm_fallback.default":
            return [_grouped(ins[0], ins[1], outs[0], ins[2] if len(ins) > 2 else ())]
        case "transformers.grouped_mm_fallback_backward.default":
            rows, weights, ends, grad = ins[:4]
            return [
                _grouped(grad, (weights[0], weights[2], weights[1]), rows, ends),
                _grouped((rows[1], rows[0]), grad, weights, ends),
            ]
        case "aten.convolution.default":
            return [compute.convolution_product(_pixels(ins[0], outs[0], transposed=op.args[-3]), ins[1], "result")]
        case "aten.convolution_backward.default":
            return _convolution_backward(op, ins)
    return []


def _grouped(left: Shape, right: Shape, made: Shape, ends: Shape) -> tuple[int, int, int, int]:
    """Return the products of a grouped matmul; rows are taken as evenly spread over the groups, whose `ends` are given.

    Rows are those of `left` [t, k] @ [e, k, n], or what is summed over: [k, t] @ [t, n] of each group. Where groups
    are split, `right` or what is `made` has those of a rank, and the rank multiplies the rows of these alone.
    """
    groups = max(1, math.prod(ends))
    if len(left) == 2 and len(right) == 3:
        return (right[0], max(1, left[0] // groups), right[2], left[1])
    if len(left) == 2 and len(right) == 2:
        return (made[0], left[0], right[1], max(1, left[1] // groups))
    return (left[0], left[1], right[-1], left[2])


def _pixels(image: Shape, out: Shape, *, transposed: Any) -> int:
    """Return how often a convolution's window is multiplied, over all samples: once for each pixel of the smaller."""
    of = image if transposed is True else out
    return of[0] * math.prod(of[2:])


def _convolution_backward(op: Op, ins: Sequence[Shape]) -> list[tuple[int, int, int, int]]:
    grad, image, weight = ins[0], ins[1], ins[2]
    pixels = _pixels(image, grad, transposed=op.args[-4])
    mask = op.args[-1] if isinstance(op.args[-1], tuple) else (True, True, True)
    wanted = [of for of, asked in zip(("input", "weight"), mask, strict=False) if asked]
    return [compute.convolution_product(pixels, weight, of) for of in wanted] or [(1, 1, 1, 1)]


def _multiplied_in(op: Op, dtype: str, peaks: Mapping[str, float]) -> str:
    """Return the type that an operator's products are computed in: cuDNN rounds float32's operands to TF32.

    So torch asks for convolutions (`torch.backends.cudnn.allow_tf32`), and for matrix products only where users do.
    """
    rounds = dtype == "float32" and "tf32" in peaks and op.target.startswith("aten.convolution")
    return "tf32" if rounds else dtype


def _product_seconds(
    products: Products, dtype: str, device: DeviceSpec, result_bytes: int = 0, aligned: compute.Size = ALIGNED_ELEMENTS
) -> Seconds:
    total = np.zeros(len(products))
    for part in zip(*products, strict=True):
        batch, m, n, k = (np.array(column, dtype=np.float64) for column in zip(*part, strict=True))
        total += compute.matmul_s(batch, m, n, k, dtype, device, result_bytes, aligned)
    return total


def _attention_flops(op: Op, ins: Sequence[Shape], device: DeviceSpec | None = None) -> float:
    """Return the FLOPs of an attention kernel: two products forward, five backward, half of them if causal.

    On a device, those that it computes: heads padded to the sizes that its kernels are built for, and of a causal mask
    all keys of a block of which a query sees one.
    """
    at = _keys_at(op)
    query, key, value = ins[at - 1], ins[at], ins[at + 1]
    products = 5.0 if "backward" in op.target else 2.0
    widths = [float(each[-1]) if device is None else device.padded_head(each[-1]) for each in (query, value)]
    width = sum(widths) / 2
    causal, factor = 1.0, 1.0
    if _is_causal(op):
        causal = 0.5 if device is None else compute.causal_share(key[-2], device.attention_block)
    if device is not None:
        masked = len(ins) > at + (4 if "backward" in op.target else 2) + ("block_attention_backward" in op.target)
        factor = attention_factor(width, key[-2], causal=causal < 1.0, masked=masked, device=device)
    return products * 2.0 * math.prod(query[:-1]) * key[-2] * width * causal * factor


_TRAINS_AT = 10
"""The place of `trains_mask` among what that backward is given; left out where it is 0."""


def trains_mask(op: Op) -> bool:
    """Return whether a kernel of attention makes the gradient of its mask."""
    return op.target.endswith("block_attention_backward.default") and op.args[_TRAINS_AT : _TRAINS_AT + 1] == (1,)


def score_bytes(op: Op, metas: Sequence[TensorMeta], ins: Sequence[Shape]) -> float:
    """Return the bytes of all scores of an attention kernel: of its mask's gradient, on GPUs, before that is summed."""
    at = _keys_at(op)
    return float(math.prod(ins[at - 1][:-1]) * ins[at][-2] * metas[at].item_bytes)


def _keys_at(op: Op) -> int:
    """Return which tensor that an attention kernel reads is the keys; queries come before and values behind them."""
    return 2 if "backward" in op.target else 1


def _is_causal(op: Op) -> bool:
    return any(arg is True or arg == BALANCED for arg in (*op.args, dict(op.kwargs).get("is_causal")))


def _traffic(
    op: Op,
    metas: Sequence[TensorMeta],
    ins: Sequence[Shape],
    outs: Sequence[Shape],
    fused: Inside | None = None,
    shares: Shares | None = None,
) -> float:
    """Return the bytes that the operator reads and writes on local shapes, without what is fused away."""
    inside = fused.writes if fused is not None else (False,) * len(outs)
    written = sum(
        math.prod(shape) * meta.item_bytes
        for shape, meta, stays in zip(outs, op.outputs, inside, strict=True)
        if meta and not stays
    )
    if op.target in _READS_OUTPUT_ONLY:
        return 2.0 * written
    if op.target.startswith(_WRITES_WITHOUT_READING):
        return float(written)
    held = shares or (1.0,) * len(ins)
    read = [math.prod(shape) * meta.item_bytes * part for shape, meta, part in zip(ins, metas, held, strict=True)]
    if op.target in NLL_FORWARD:
        read[0] = math.prod(ins[1]) * metas[0].item_bytes
    if fused is not None:
        return float(written + sum(moved for moved, at_hand in zip(read, fused.reads, strict=True) if not at_hand))
    extra = _EXTRA_PASSES.get(op.target, 0.0) * max(read, default=0.0)
    return float(sum(read) + written + extra)
