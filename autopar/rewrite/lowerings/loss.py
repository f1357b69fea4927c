"""Losses over split classes or tokens."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from autopar.rewrite.lowerings.places import aten, digits, either, locate
from autopar.rewrite.lowerings.softmax import narrowed, widened_type
from autopar.rewrite.site import Site

_NONE, _MEAN = 0, 1
_NO_CLASS = -100


def scaled(site: Site) -> fx.Node | tuple[fx.Node, ...]:
    """Emit the operator on this rank's part, divided by the number of parts: the mean is that of the parts' means.

    Of several outputs the first is the mean; the others belong to the elements.
    A gradient is linear in the one it is given: a single number where its own result is as large as the scores.
    """
    space, packet, overload = site.op.target.split(".")
    target = getattr(getattr(getattr(torch.ops, space), packet), overload)
    parts = math.prod(site.mesh.sizes[axis] for axis in site.axes("scale"))
    if packet.endswith("_backward"):
        given, *rest = site.args
        return site.call(target, site.call(aten.mul.Tensor, given, 1.0 / parts), *rest, **site.kwargs)
    made = site.call(target, *site.args, **site.kwargs)
    outputs = len(site.op.outputs)
    first, *others = [made] if outputs == 1 else [site.call(operator.getitem, made, i) for i in range(outputs)]
    mean = site.call(aten.mul.Tensor, first, 1.0 / parts)
    return (mean, *others) if others else mean


def shared(site: Site) -> fx.Node:
    """Emit a sum of this rank's term of a value and its share of a plain number."""
    space, packet, overload = site.op.target.split(".")
    target = getattr(getattr(getattr(torch.ops, space), packet), overload)
    parts = math.prod(site.mesh.sizes[axis] for axis in site.axes("share"))
    value, number, *rest = site.args
    return site.call(target, value, number / parts, *rest, **site.kwargs)


def nll_loss(site: Site) -> tuple[fx.Node, fx.Node]:
    """Emit the loss of this rank's tokens and classes as a term of the whole, and the whole weight of all tokens."""
    scores, target, weight, reduction, ignored = _arguments(site)
    dtype = site.metas[0].dtype
    skipped = site.call(aten.eq.Scalar, target, ignored)
    counts = _weights(site, target, skipped, weight, dtype)
    missing, local = locate(site, target, digits(site, site.strategy.inputs[0], 1, site.metas[0].shape[1]))
    unread = either(site, missing, skipped)
    local = site.call(aten.masked_fill.Scalar, local, unread, 0)
    picked = site.call(aten.gather.default, scores, 1, site.call(aten.unsqueeze.default, local, 1))
    picked = widened_type(site, site.call(aten.squeeze.dim, picked, 1), dtype)
    losses = site.call(aten.neg.default, site.call(aten.mul.Tensor, picked, counts))
    losses = site.call(aten.masked_fill.Scalar, losses, unread, 0)
    total = site.call(aten.sum.default, counts)
    if reduction == _NONE:
        return narrowed(site, losses, dtype, dtype), narrowed(site, site.call(aten.mul.Tensor, total, 0), dtype, dtype)
    for axis in site.axes("tokens"):
        total = site.all_reduce(total, axis)
    loss = site.call(aten.sum.default, losses)
    if reduction == _MEAN:
        loss = site.call(aten.div.Tensor, loss, total)
    return narrowed(site, loss, dtype, dtype), narrowed(site, total, dtype, dtype)


def _weights(site: Site, target: fx.Node, skipped: fx.Node, weight: fx.Node | None, dtype: str) -> fx.Node:
    """Return how much each token counts, in the type that a sum of `dtype` is made in."""
    kept = site.call(aten.bitwise_not.default, skipped)
    if weight is None:
        wide = "float32" if dtype in {"float16", "bfloat16"} else dtype
        return site.call(aten._to_copy.default, kept, dtype=getattr(torch, wide))
    at = site.call(aten.masked_fill.Scalar, target, skipped, 0)
    found = widened_type(site, site.call(aten.index.Tensor, weight, [at]), dtype)
    return site.call(aten.masked_fill.Scalar, found, skipped, 0)


def _arguments(site: Site) -> tuple[fx.Node, fx.Node, fx.Node | None, int, int]:
    scores, target, weight, reduction, ignored = site.args
    return scores, target, weight, reduction, ignored


def nll_loss_backward(site: Site) -> fx.Node:
    """Emit the gradient of this rank's classes: a target elsewhere is one to ignore."""
    grad, scores, target, weight, reduction, ignored, total = site.args
    held = digits(site, site.strategy.inputs[1], 1, site.metas[1].shape[1])
    missing, local = locate(site, target, held)
    unread = either(site, missing, site.call(aten.eq.Scalar, target, ignored))
    local = site.call(aten.masked_fill.Scalar, local, unread, _NO_CLASS)
    kernel: Any = aten.nll_loss2d_backward if "2d" in site.op.target else aten.nll_loss_backward
    return site.call(kernel.default, grad, scores, local, weight, reduction, _NO_CLASS, total)


def cross_entropy_backward(site: Site) -> fx.Node:
    """Emit the gradient of this rank's classes: every target counts in its row, and is taken off where it lies."""
    grad, scores, target, weight, reduction, ignored, total = site.args
    dtype = site.metas[1].dtype
    skipped = site.call(aten.eq.Scalar, target, ignored)
    if reduction == _MEAN:
        grad = site.call(aten.div.Tensor, grad, total)
    counts = site.call(aten.mul.Tensor, _weights(site, target, skipped, weight, dtype), grad)
    missing, local = locate(site, target, digits(site, site.strategy.inputs[1], 1, site.metas[1].shape[1]))
    unread = either(site, missing, skipped)
    local = site.call(aten.masked_fill.Scalar, local, unread, 0)
    taken = site.call(aten.masked_fill.Scalar, site.call(aten.neg.default, counts), unread, 0)
    counts, local, taken = (site.call(aten.unsqueeze.default, each, 1) for each in (counts, local, taken))
    shares = site.call(aten.mul.Tensor, site.call(aten.exp.default, widened_type(site, scores, dtype)), counts)
    return narrowed(site, site.call(aten.scatter_add.default, shares, 1, local, taken), dtype, dtype)
