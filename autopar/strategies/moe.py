"""Sharding rules of products of tokens with the weights of their experts.

    x [t, k], sorted by expert; w [e, k, n]; offs [e]: where each expert's tokens end   ->   [t, n]

`k` and `n` split as in any matrix product. Splitting tokens needs the lowering
`rows` (each rank has some experts' tokens), splitting experts the lowering
`experts` (each rank does its experts' tokens, others are zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.placement import Partial, Placement, Shard
from autopar.ir.rule import Rule
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def _forward(call: Call) -> Iterator[Strategy]:
    """Yield those of tokens by experts."""
    yield from call.by(Rule.parse("tk ekn e -> tn", whole="e", lowering={"t": "rows"}))
    for outer in call.digits(1, 0)[:1]:
        yield call.strategy({1: Shard(0, outer)}, {0: Partial()}, "experts")


def _backward(call: Call) -> Iterator[Strategy]:
    """Yield those of `(x, w, offs, grad) -> (grad of x, grad of w)`."""
    yield call.replicated()
    x, w, grad = 0, 1, 3
    for outer in call.digits(x, 0)[:1]:
        ins: dict[int | None, Placement] = {x: Shard(0, outer), grad: Shard(0, outer)}
        yield call.strategy(ins, {0: Shard(0, outer), 1: Partial()}, "rows")
    yield call.strategy({w: Shard(0)}, {0: Partial(), 1: Shard(0)}, "experts")
    for outer in dict.fromkeys((*call.digits(x, 1), *call.digits(w, 1))):
        ins = {x: Shard(1, outer), w: Shard(1, outer)}
        yield call.strategy(ins, {0: Shard(1, outer), 1: Shard(1, outer)})
    for outer in dict.fromkeys((*call.digits(grad, 1), *call.digits(w, 2))):
        ins = {w: Shard(2, outer), grad: Shard(1, outer)}
        yield call.strategy(ins, {0: Partial(), 1: Shard(2, outer)})


def _native(call: Call) -> Iterable[Strategy]:
    """Yield those of torch's grouped product: tokens by experts, or tokens by tokens (the gradient of the experts)."""
    ranks = tuple(len(meta.shape) for meta in call.metas)
    if ranks == (2, 3, 1):
        return _forward(call)
    if ranks == (2, 2, 1):
        found = call.by(Rule.parse("kt tn e -> ekn", whole="e", lowering={"t": "rows"}))
        return (*found, call.strategy({}, {0: Shard(0)}, "experts"))
    if ranks == (3, 3):
        return call.by(Rule.parse("bmk bkn -> bmn"))
    return iter((call.replicated(),))


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten._grouped_mm.default": _native,
    "transformers.grouped_mm_fallback.default": _forward,
    "transformers.grouped_mm_fallback_backward.default": _backward,
}
