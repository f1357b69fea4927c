"""Sharding rules of fused attention: batch, heads, and query positions where no mask depends on them.

    q [b, h, l, e]   k [b, h, s, e]   v [b, h, s, f]   ->   out [b, h, l, f], logsumexp [b, h, l]

With fewer key than query heads (grouped queries) the query heads are `(h g)`: split by `g`, every rank has some queries
of each group and the keys of all. Splitting that or the positions `l` makes the gradients of keys and values terms.

A kernel that drops scores draws for the heads that it has: backward must have the same. So its state is split as the
heads are, in an order of each rank's own, which nothing leads to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import autopar.own_attention  # noqa: F401  rules ask for the signatures of its operators
from autopar.ir.graph import BALANCED
from autopar.ir.placement import Placement, Shard
from autopar.ir.rule import Dims
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call
from autopar.strategies.random import LOWERING


def _heads(call: Call) -> tuple[Dims, Dims, Dims]:
    """Return the dimensions of query, key and value; heads that do not group evenly are never split."""
    queries, keys = call.shape("query")[1], call.shape("key")[1]
    if queries == keys:
        head: tuple[str, ...] = ("h",)
        shared: tuple[str, ...] = ("h",)
    elif queries % keys == 0:
        head, shared = ("h", "g"), ("h",)
    else:
        head, shared = (), ()
    return (("b",), head, ("l",), ()), (("b",), shared, ("s",), ()), (("b",), shared, ("s",), ())


def _mask(call: Call, name: str) -> Dims:
    """Return the dimensions of a mask that broadcasts to [b, h, l, s]."""
    shape = call.shape(name)
    q, _, _ = _heads(call)
    full: Dims = (q[0], q[1], q[2], ("s",))
    return tuple(() if size == 1 else dim for size, dim in zip(shape, full[len(full) - len(shape) :], strict=True))


def _whole(call: Call, *, exact: bool) -> frozenset[str]:
    """Return the factors not to split: query positions only of a kernel whose logsumexp has exactly one each.

    A causal kernel counts query positions from 0, so their split would need the rank's offset; where a rank has
    positions of both ends (`BALANCED`), its kernel is told which.
    """
    return frozenset("s") if exact and call.arg("is_causal") in {False, None, BALANCED} else frozenset("sl")


def _sums(shape: tuple[int, ...], call: Call) -> tuple[Dims, bool]:
    """Return the dimensions of the logsumexp, and whether its positions are those of the queries.

    Kernels pad the positions, add a dimension, or give an empty tensor when it is not asked for.
    """
    query = call.shape("query")
    dims, _, _ = _heads(call)
    if shape[:2] != query[:2]:
        return _blank(shape), False
    exact = shape == query[:3] and not any(f"_{name}_" in call.op.target for name in _PADS)
    return (*dims[:2], *(dims[2:3] if exact else _blank(shape[2:]))), exact


def _draws(call: Call) -> bool:
    """Return whether the kernel drops scores by a state of its own, which no rank could share or divide."""
    return bool(call.arg("dropout_p"))


_PADS = frozenset({"efficient", "cudnn"})
"""Kernels whose logsumexp has its query positions padded to a block, or a form of its own."""


def _forward(mask: str) -> Callable[[Call], Iterable[Strategy]]:
    """Return the rule of a forward kernel; `mask` names its mask argument."""

    def rule(call: Call) -> Iterable[Strategy]:
        if _draws(call) or len(call.shape("query")) != 4:
            return (call.replicated(),)
        q, k, v = _heads(call)
        inputs: dict[str, Dims] = {"query": q, "key": k, "value": v}
        if call.index(mask) is not None:
            inputs[mask] = _mask(call, mask)
        second = call.op.outputs[1]
        sums, exact = _sums(second.shape if second else (), call)
        rest: list[Dims | None] = [_blank(meta.shape) if meta else None for meta in call.op.outputs[2:]]
        return _split_all(call, inputs, [q, sums if second else None, *rest], exact=exact)

    return rule


def _blank(shape: tuple[int, ...]) -> Dims:
    return ((),) * len(shape)


def _split_all(call: Call, inputs: dict[str, Dims], outputs: list[Dims | None], *, exact: bool) -> Iterator[Strategy]:
    """Yield the strategies; outputs without meaning (philox state, empty placeholders) stay whole."""
    apart: frozenset[tuple[int, str]] = frozenset()
    for index, dims in enumerate(outputs):
        if dims is not None and all(not dim for dim in dims):
            apart |= {(index, factor) for factor in "bhgls"}
    return call.named(inputs, outputs, whole=_whole(call, exact=exact), apart=apart)


def _backward(mask: str, gradient: str, sums: str) -> Callable[[Call], Iterable[Strategy]]:
    """Return the rule of a backward kernel, given its names of mask, output gradient and logsumexp."""

    def rule(call: Call) -> Iterable[Strategy]:
        if _draws(call) or len(call.shape("query")) != 4:
            return (call.replicated(),)
        q, k, v = _heads(call)
        inputs: dict[str, Dims] = {"query": q, "key": k, "value": v, gradient: q, "out": q}
        inputs[sums], exact = _sums(call.shape(sums), call)
        if call.index(mask) is not None:
            inputs[mask] = _mask(call, mask)
        outputs: list[Dims | None] = [q, k, v]
        if len(call.op.outputs) > 3:
            outputs.append(inputs.get(mask, ()))
        return _split_all(call, inputs, outputs, exact=exact)

    return rule


def _in_blocks(call: Call) -> Iterator[Strategy]:
    """Yield the strategies of the kernel that works in blocks: samples and heads, and queries if nothing is dropped."""
    q, k, v = _heads(call)
    inputs: dict[str, Dims] = {"query": q, "key": k, "value": v, **_given_mask(call)}
    for each in call.named(inputs, [q, q[:3], q[:2]], whole=_not_in_blocks(call), apart=frozenset({(2, "l")})):
        if not _draws(call):
            yield each
            continue
        out, sums, state = each.outputs
        yield replace(each, outputs=(out, sums, _own(state)), lowering=LOWERING)


def _in_blocks_backward(call: Call) -> Iterator[Strategy]:
    """Yield those of its gradient, which draws the same again."""
    q, k, v = _heads(call)
    inputs: dict[str, Dims] = {"grad_out": q, "query": q, "key": k, "value": v, "out": q}
    inputs |= {"logsumexp": q[:3], "state": q[:2], **_given_mask(call)}
    state, trains = call.index("state"), bool(call.arg("trains_mask"))
    mask = _mask(call, "attn_mask") if trains else ((),)
    apart = frozenset((3, factor) for factor in "bhgl") if not trains else frozenset[tuple[int, str]]()
    for each in call.named(inputs, [q, k, v, mask], whole=_not_in_blocks(call), apart=apart):
        if not _draws(call):
            yield each
            continue
        placed = (_own(at) if index == state else at for index, at in enumerate(each.inputs))
        yield replace(each, inputs=tuple(at for at in placed if at is not None))


def _not_in_blocks(call: Call) -> frozenset[str]:
    """Return the factors not to split: a causal mask, and what is drawn, are of positions from 0 on."""
    return frozenset("sl") if call.arg("is_causal") or _draws(call) else frozenset("s")


def _given_mask(call: Call) -> dict[str, Dims]:
    return {} if call.index("attn_mask") is None else {"attn_mask": _mask(call, "attn_mask")}


def _own(state: Placement | None) -> Placement | None:
    return replace(state, rows="own") if isinstance(state, Shard) else state


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _forward("attn_mask"),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _backward(
        "attn_mask", "grad_out", "logsumexp"
    ),
    "aten._scaled_dot_product_flash_attention.default": _forward("attn_mask"),
    "aten._scaled_dot_product_flash_attention_backward.default": _backward("attn_bias", "grad_out", "logsumexp"),
    "aten._scaled_dot_product_efficient_attention.default": _forward("attn_bias"),
    "aten._scaled_dot_product_efficient_attention_backward.default": _backward("attn_bias", "grad_out_", "logsumexp"),
    "aten._scaled_dot_product_cudnn_attention.default": _forward("attn_bias"),
    "aten._scaled_dot_product_cudnn_attention_backward.default": _backward("attn_bias", "grad_out", "logsumexp"),
    "aten._scaled_dot_product_attention_math.default": _forward("attn_mask"),
    "autopar_ops._scaled_dot_product_block_attention.default": _in_blocks,
    "autopar_ops._scaled_dot_product_block_attention_backward.default": _in_blocks_backward,
    "aten._scaled_dot_product_attention_math_for_mps.default": _forward("attn_mask"),
}
