"""Batch norm over split samples: statistics of all of them, by sums over ranks."""

from __future__ import annotations

from torch import fx

from autopar.rewrite.lowerings.places import aten
from autopar.rewrite.lowerings.softmax import narrowed, widened_type
from autopar.rewrite.site import Site

TAG = "sync"


def _joined(site: Site, value: fx.Node) -> fx.Node:
    for axis in site.axes(TAG):
        value = site.all_reduce(value, axis)
    return value


def _spread(site: Site, value: fx.Node, rank: int) -> fx.Node:
    """Return numbers a channel in the shape that broadcasts to the data."""
    return site.call(aten.reshape.default, value, [1, -1, *[1] * (rank - 2)])


def batch_norm(site: Site) -> tuple[fx.Node, ...]:
    """Emit batch norm in training; return output, mean, inverse deviation and any running statistics."""
    data, weight, bias, *rest = site.args
    running = rest[:2] if len(site.op.outputs) == 5 else []
    momentum, eps = rest[-2:]
    meta = site.metas[0]
    rank, channels = len(meta.shape), meta.shape[1]
    count = meta.numel // channels
    dims = [d for d in range(rank) if d != 1]
    wide = widened_type(site, data, meta.dtype)
    mean = site.call(aten.div.Tensor, _joined(site, site.call(aten.sum.dim_IntList, wide, dims)), count)
    centred = site.call(aten.sub.Tensor, wide, _spread(site, mean, rank))
    squares = site.call(aten.sum.dim_IntList, site.call(aten.mul.Tensor, centred, centred), dims)
    variance = site.call(aten.div.Tensor, _joined(site, squares), count)
    inverse = site.call(aten.rsqrt.default, site.call(aten.add.Tensor, variance, eps))
    out = site.call(aten.mul.Tensor, centred, _spread(site, inverse, rank))
    if weight is not None:
        out = site.call(aten.mul.Tensor, out, _spread(site, weight, rank))
    if bias is not None:
        out = site.call(aten.add.Tensor, out, _spread(site, bias, rank))
    out = narrowed_to(site, out, 0)
    unbiased = site.call(aten.mul.Tensor, variance, count / max(count - 1, 1))
    kept = [
        site.call(aten.lerp.Scalar, old, _as_of(site, new, 3 + i), momentum)
        for i, (old, new) in enumerate(zip(running, (mean, unbiased), strict=False))
    ]
    return (out, mean, inverse, *kept)


def narrowed_to(site: Site, value: fx.Node, index: int) -> fx.Node:
    """Return a value, made in the wide type of the data, in the type of an output."""
    meta = site.op.outputs[index]
    return value if meta is None else narrowed(site, value, site.metas[0].dtype, meta.dtype)


def _as_of(site: Site, value: fx.Node, index: int) -> fx.Node:
    return narrowed_to(site, value, index)


def batch_norm_backward(site: Site) -> tuple[fx.Node | None, ...]:
    """Emit its gradient: the two sums over all samples are joined, and are the gradients of weight and bias."""
    grad, data, weight, _, _, mean, inverse, _, _, wanted = site.args
    meta = site.metas[1]
    rank = len(meta.shape)
    count = meta.numel // meta.shape[1]
    dims = [d for d in range(rank) if d != 1]
    grad = widened_type(site, grad, site.metas[0].dtype)
    scaled = site.call(
        aten.mul.Tensor,
        site.call(aten.sub.Tensor, widened_type(site, data, meta.dtype), _spread(site, mean, rank)),
        _spread(site, inverse, rank),
    )
    sums = site.call(
        aten.cat.default,
        [
            site.call(aten.sum.dim_IntList, site.call(aten.mul.Tensor, grad, scaled), dims),
            site.call(aten.sum.dim_IntList, grad, dims),
        ],
    )
    sums = _joined(site, sums)
    local = site.local_input(1)[1]
    of_weight = site.call(aten.slice.Tensor, sums, 0, 0, local)
    of_bias = site.call(aten.slice.Tensor, sums, 0, local, 2 * local)
    made = site.call(
        aten.add.Tensor,
        site.call(aten.mul.Tensor, scaled, _spread(site, of_weight, rank)),
        _spread(site, of_bias, rank),
    )
    made = site.call(aten.sub.Tensor, grad, site.call(aten.div.Tensor, made, count))
    factor = inverse if weight is None else site.call(aten.mul.Tensor, inverse, weight)
    made = site.call(aten.mul.Tensor, made, _spread(site, factor, rank))
    results = (made, of_weight, of_bias)
    return tuple(narrowed_to(site, each, i) if wanted[i] else None for i, each in enumerate(results))
