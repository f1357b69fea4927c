"""Sharding rules of operators that make tensors out of nothing: each rank can make its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.rule import Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call
from autopar.strategies.views import replicate_only


def _outputs(call: Call) -> Iterator[Placement]:
    """Yield the placements of a tensor whose elements do not depend on their place."""
    yield Replicate()
    rank = len(call.result())
    for dim in range(rank):
        yield Shard(dim)
    if call.wanted:
        yield from sorted((s for s in call.wanted[0] if s.dim < rank), key=lambda s: (s.dim, s.outer))


def _constant(call: Call) -> Iterator[Strategy]:
    for placement in _outputs(call):
        yield call.strategy({}, {0: placement})


def _like(call: Call) -> Iterator[Strategy]:
    """Yield those of a constant shaped like a tensor that is not read: its split decides the result's."""
    names = plain(letters(len(call.result())))
    yield from call.by(Rule(inputs=(names,), outputs=(names,)))
    yield call.strategy({0: Partial()}, {0: Replicate()})


def _new(call: Call) -> Iterator[Strategy]:
    """Yield those of a constant that takes its type alone from a tensor, however that is placed."""
    if call.metas[0].shape == call.result():
        yield from _like(call)
    rank = len(call.metas[0].shape)
    hinted = sorted(call.hints[0], key=lambda s: (s.dim, s.outer)) if call.hints else []
    sources: list[Placement] = [Replicate(), *map(Shard, range(rank)), *hinted]
    for source in dict.fromkeys([*sources, Partial()]):
        for placement in _outputs(call):
            yield call.strategy({0: source}, {0: placement})


def _arange(call: Call) -> Iterator[Strategy]:
    """Yield those of a range: the whole, or with a lowering each rank's part of it."""
    yield call.replicated()
    for placement in _outputs(call):
        if isinstance(placement, Shard):
            yield call.strategy({}, {0: placement}, "offset")


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.full.default": _constant,
    "aten.zeros.default": _constant,
    "aten.ones.default": _constant,
    "aten.empty.memory_format": _constant,
    "aten.empty_strided.default": _constant,
    "aten.scalar_tensor.default": _constant,
    "aten.full_like.default": _like,
    "aten.zeros_like.default": _like,
    "aten.zero.default": _like,
    "aten.ones_like.default": _like,
    "aten.empty_like.default": _like,
    "aten.new_zeros.default": _new,
    "aten.new_ones.default": _new,
    "aten.new_full.default": _new,
    "aten.new_empty.default": _new,
    "aten.new_empty_strided.default": _new,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "prims.iota.default": _arange,
    "aten.eye.default": replicate_only,
    "aten.eye.m": replicate_only,
    "aten.linspace.default": replicate_only,
    "aten.tril_indices.default": replicate_only,
    "aten.triu_indices.default": replicate_only,
    **{
        f"aten.{kind}_window.{overload}": replicate_only
        for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser")
        for overload in ("default", "periodic")
    },
}
