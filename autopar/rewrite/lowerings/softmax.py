"""Softmax over a split dimension: maxima and sums of the parts are joined, the values stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.rewrite.lowerings.places import aten
from autopar.rewrite.site import Site

TAG = "class"
_HALF = frozenset({"float16", "bfloat16"})


def widened_type(site: Site, value: fx.Node, dtype: str) -> fx.Node:
    """Return a value in the type its sums are made in: that of a half is float32."""
    return site.call(aten._to_copy.default, value, dtype=torch.float32) if dtype in _HALF else value


def narrowed(site: Site, value: fx.Node, made_in: str, wanted: str) -> fx.Node:
    """Return a value in the type wanted of it; `made_in` is that of what it was made from."""
    now = "float32" if made_in in _HALF else made_in
    return value if now == wanted else site.call(aten._to_copy.default, value, dtype=getattr(torch, wanted))


def _joined(site: Site, value: fx.Node, reduce: str) -> fx.Node:
    for axis in site.axes(TAG):
        value = site.all_reduce(value, axis, reduce)
    return value


def _shifted(site: Site) -> tuple[fx.Node, fx.Node, Any]:
    """Return the scores less their maximum, the sum of their exponentials, and the dimension."""
    scores, dim = site.args[0], site.args[1]
    scores = widened_type(site, scores, site.metas[0].dtype)
    most = _joined(site, site.call(aten.amax.default, scores, [dim], True), "max")
    shifted = site.call(aten.sub.Tensor, scores, most)
    total = site.call(aten.sum.dim_IntList, site.call(aten.exp.default, shifted), [dim], True)
    return shifted, _joined(site, total, "sum"), dim


def softmax(site: Site) -> fx.Node:
    """Emit softmax over a split dimension."""
    shifted, total, _ = _shifted(site)
    made = site.call(aten.div.Tensor, site.call(aten.exp.default, shifted), total)
    return narrowed(site, made, site.metas[0].dtype, _made(site))


def log_softmax(site: Site) -> fx.Node:
    """Emit the logarithm of softmax over a split dimension."""
    shifted, total, _ = _shifted(site)
    made = site.call(aten.sub.Tensor, shifted, site.call(aten.log.default, total))
    return narrowed(site, made, site.metas[0].dtype, _made(site))


def softmax_backward(site: Site) -> fx.Node:
    """Emit `out * (grad - sum(grad * out))`."""
    grad, out, dim = _backward_args(site)
    product = site.call(aten.mul.Tensor, grad, out)
    total = _joined(site, site.call(aten.sum.dim_IntList, product, [dim], True), "sum")
    made = site.call(aten.sub.Tensor, product, site.call(aten.mul.Tensor, out, total))
    return narrowed(site, made, site.metas[0].dtype, _made(site))


def log_softmax_backward(site: Site) -> fx.Node:
    """Emit `grad - exp(out) * sum(grad)`."""
    grad, out, dim = _backward_args(site)
    total = _joined(site, site.call(aten.sum.dim_IntList, grad, [dim], True), "sum")
    made = site.call(aten.sub.Tensor, grad, site.call(aten.mul.Tensor, site.call(aten.exp.default, out), total))
    return narrowed(site, made, site.metas[0].dtype, _made(site))


def _backward_args(site: Site) -> tuple[fx.Node, fx.Node, Any]:
    grad, out, dim = site.args[:3]
    return (
        widened_type(site, grad, site.metas[0].dtype),
        widened_type(site, out, site.metas[1].dtype),
        dim,
    )


def _made(site: Site) -> str:
    meta = site.op.outputs[0]
    if meta is None:
        raise ValueError(f"{site.op.name} makes no tensor")
    return meta.dtype
