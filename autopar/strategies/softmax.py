"""Sharding rules of softmax along a dimension, which splits too: the lowering `class` joins maxima and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.placement import Shard
from autopar.ir.rule import Rule, letters, plain
from autopar.ir.strategy import Inner, Strategy
from autopar.strategies.call import Call

_HALF = frozenset({"float16", "bfloat16"})


def sum_dtype(dtype: str) -> str:
    """Return the type in which a lowering adds up values of `dtype`."""
    return "float32" if dtype in _HALF else dtype


def _softmax(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    if not rank:
        yield call.replicated()
        return
    dim = call.dim("dim", rank)
    kept = plain(None if i == dim else name for i, name in enumerate(letters(rank)))
    yield from call.by(Rule(inputs=(kept,) * len(call.metas), outputs=(kept,)))
    yield from _classes(call, dim, ("max", "sum"))


def _softmax_backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    if not rank:
        yield call.replicated()
        return
    dim = call.dim("dim", rank)
    kept = plain(None if i == dim else name for i, name in enumerate(letters(rank)))
    yield from call.by(Rule(inputs=(kept,) * len(call.metas), outputs=(kept,)))
    yield from _classes(call, dim, ("sum",))


def _classes(call: Call, dim: int, reductions: tuple[str, ...]) -> Iterator[Strategy]:
    dtype = sum_dtype(call.metas[0].dtype)
    inner = tuple(Inner("all_reduce", dtype, reduce, without=(dim,)) for reduce in reductions)
    outers = dict.fromkeys(outer for i in range(len(call.metas)) for outer in call.digits(i, dim))
    for outer in outers:
        split = Shard(dim, outer)
        yield call.strategy(dict.fromkeys(range(len(call.metas)), split), {0: split}, "class", inner)


def _safe_softmax(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    dim = call.dim("dim", rank)
    kept = plain(None if i == dim else name for i, name in enumerate(letters(rank)))
    return call.by(Rule(inputs=(kept,), outputs=(kept,)))


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _softmax_backward,
    "aten._safe_softmax.default": _safe_softmax,
}
