"""Sharding rules of operators that take tensors apart along a dimension, or put them together.

Let `p` divide where each piece starts and ends. Then every piece is a number of
whole runs of `p` elements, and splitting each run (`outer = size / p`) splits
every piece in the same way: that is how a fused query-key-value projection is
split by heads. The contiguous split is the case of a piece that is the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autopar.ir.placement import Placement, Shard
from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call

_TO_THE_END = (1 << 63) - 1


def _without(names: Sequence[str], dim: int) -> Dims:
    return plain(None if i == dim else name for i, name in enumerate(names))


def _dropped(names: Sequence[str], dim: int) -> Dims:
    return plain(name for i, name in enumerate(names) if i != dim)


def _runs(
    call: Call, dim: int, sizes: Mapping[int, int], results: Mapping[int, int], common: int
) -> Iterator[Strategy]:
    """Yield the strategies that split equal runs of `p` elements along `dim` of every tensor.

    `sizes` and `results` are the extents of inputs and outputs (by index) that consist of whole runs; `common` is what
    every possible `p` divides.
    """
    periods: dict[int, None] = {common: None} if common > 1 else {}
    tensors = (*((call.hints, i, n) for i, n in sizes.items()), *((call.wanted, i, n) for i, n in results.items()))
    for shards, index, extent in tensors:
        if index < len(shards):
            for shard in sorted(shards[index], key=lambda s: s.outer):
                period = extent // shard.outer
                if shard.dim == dim and extent % shard.outer == 0 and period and common % period == 0:
                    periods[period] = None
    for period in periods:
        if period % call.size == 0:
            ins: dict[int | None, Placement] = {i: Shard(dim, extent // period) for i, extent in sizes.items()}
            yield call.strategy(ins, {i: Shard(dim, extent // period) for i, extent in results.items()})


def _bounds(call: Call, extent: int) -> tuple[int, int]:
    """Return where a slice starts and ends, counted from the front and cut to the extent."""

    def at(value: int | None, default: int) -> int:
        place = default if value is None else int(value)
        return min(max(place + extent if place < 0 else place, 0), extent)

    start = at(call.arg("start"), 0)
    return start, max(at(call.arg("end"), _TO_THE_END), start)


def _every(call: Call, dim: int, extent: int, count: int) -> Iterator[Strategy]:
    """Yield those of one element of each `step` along `dim`, where no part cuts such a run (`pairs[0::2]`).

    `count` is how many are taken of the `extent` elements.
    """
    start, step = call.arg("start") or 0, int(call.arg("step") or 1)
    if step == 1 or not 0 <= start < step or count * step != extent:
        return
    hinted = (shard for shards in (*call.hints[:1], *call.wanted[:1]) for shard in shards if shard.dim == dim)
    for outer in dict.fromkeys((1, *sorted(shard.outer for shard in hinted))):
        if extent % (outer * step * call.size) == 0:
            yield call.strategy({0: Shard(dim, outer)}, {0: Shard(dim, outer)})


def _slice(call: Call) -> Iterator[Strategy]:
    shape = call.metas[0].shape
    dim = call.dim("dim", len(shape))
    start, end = _bounds(call, shape[dim])
    step = int(call.arg("step") or 1)
    names = letters(len(shape))
    whole = (start, end, step) == (0, shape[dim], 1)
    kept = plain(names) if whole else _without(names, dim)
    yield from call.by(Rule(inputs=(kept,), outputs=(kept,), linear=(frozenset({0}),)))
    if not whole and step == 1 and end > start:
        common = math.gcd(start, end, shape[dim])
        yield from _runs(call, dim, {0: shape[dim]}, {0: end - start}, common)
    yield from _every(call, dim, shape[dim], call.result()[dim])


def _slice_backward(call: Call) -> Iterator[Strategy]:
    shape = call.result()
    dim = call.dim("dim", len(shape))
    start, end = _bounds(call, shape[dim])
    step = int(call.arg("step") or 1)
    names = letters(len(shape))
    whole = (start, end, step) == (0, shape[dim], 1)
    kept = plain(names) if whole else _without(names, dim)
    yield from call.by(Rule(inputs=(kept,), outputs=(kept,), linear=(frozenset({0}),)))
    if not whole and step == 1 and end > start:
        common = math.gcd(start, end, shape[dim])
        yield from _runs(call, dim, {0: end - start}, {0: shape[dim]}, common)
    yield from _every(call, dim, shape[dim], call.metas[0].shape[dim])


def _slice_scatter(call: Call) -> Iterator[Strategy]:
    shape = call.result()
    dim = call.dim("dim", len(shape))
    start, end = _bounds(call, shape[dim])
    step = int(call.arg("step") or 1)
    names = letters(len(shape))
    whole = (start, end, step) == (0, shape[dim], 1)
    kept = plain(names) if whole else _without(names, dim)
    yield from call.by(Rule(inputs=(kept, kept), outputs=(kept,), linear=(frozenset({0, 1}),)))
    if not whole and step == 1 and end > start:
        common = math.gcd(start, end, shape[dim])
        yield from _runs(call, dim, {0: shape[dim], 1: end - start}, {0: shape[dim]}, common)


def _select(call: Call) -> Iterator[Strategy]:
    rank = len(call.metas[0].shape)
    names, dim = letters(rank), call.dim("dim", rank)
    return call.by(Rule(inputs=(_without(names, dim),), outputs=(_dropped(names, dim),), linear=(frozenset({0}),)))


def _select_backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    names, dim = letters(rank), call.dim("dim", rank)
    return call.by(Rule(inputs=(_dropped(names, dim),), outputs=(_without(names, dim),), linear=(frozenset({0}),)))


def _select_scatter(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    names, dim = letters(rank), call.dim("dim", rank)
    kept = _without(names, dim)
    return call.by(Rule(inputs=(kept, _dropped(names, dim)), outputs=(kept,), linear=(frozenset({0, 1}),)))


def _split(call: Call) -> Iterator[Strategy]:
    """Yield those of a split into several: along other dimensions, or along equal runs of this one."""
    shape = call.metas[0].shape
    dim = call.dim("dim", len(shape))
    kept = _without(letters(len(shape)), dim)
    count = len(call.op.outputs)
    yield from call.by(Rule(inputs=(kept,), outputs=(kept,) * count, linear=(frozenset({0}),)))
    pieces = {i: call.result(i)[dim] for i in range(count)}
    yield from _runs(call, dim, {0: shape[dim]}, pieces, math.gcd(*pieces.values()))


def _unbind(call: Call) -> Iterator[Strategy]:
    rank = len(call.metas[0].shape)
    names, dim = letters(rank), call.dim("dim", rank)
    outs = (_dropped(names, dim),) * len(call.op.outputs)
    return call.by(Rule(inputs=(_without(names, dim),), outputs=outs, linear=(frozenset({0}),)))


def _cat(call: Call) -> Iterator[Strategy]:
    """Yield those of a concatenation: along other dimensions, or along equal runs of this one."""
    shape = call.result()
    dim = call.dim("dim", len(shape))
    kept = _without(letters(len(shape)), dim)
    # `cat` takes empty tensors of one dimension beside others; they have no dimension to split.
    inputs = tuple(kept if len(meta.shape) == len(shape) else ((),) for meta in call.metas)
    every = frozenset(range(len(inputs)))
    yield from call.by(Rule(inputs=inputs, outputs=(kept,), linear=(every,)))
    if all(len(meta.shape) == len(shape) for meta in call.metas):
        pieces = {i: meta.shape[dim] for i, meta in enumerate(call.metas)}
        yield from _runs(call, dim, pieces, {0: shape[dim]}, math.gcd(*pieces.values()))


def _stack(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    names, dim = letters(rank), call.dim("dim", rank)
    inputs = (_dropped(names, dim),) * len(call.metas)
    every = frozenset(range(len(inputs)))
    return call.by(Rule(inputs=inputs, outputs=(_without(names, dim),), linear=(every,)))


def _pad(call: Call) -> Iterator[Strategy]:
    """Yield those of padding: along dimensions that are not padded, unless a constant fills them."""
    rank = len(call.result())
    pad = [int(each) for each in call.arg("pad" if call.arg("pad") is not None else "padding")]
    padded = {rank - 1 - i // 2 for i, each in enumerate(pad) if each}
    kept = plain(None if i in padded else name for i, name in enumerate(letters(rank)))
    linear = (frozenset({0}),) if not call.arg("value") else ()
    return call.by(Rule(inputs=(kept,), outputs=(kept,), linear=linear))


def _pad_backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    padded = {rank - 1 - i // 2 for i, each in enumerate(call.arg("padding")) if each}
    kept = plain(None if i in padded else name for i, name in enumerate(letters(rank)))
    return call.by(Rule(inputs=(kept, kept), outputs=(kept,), linear=(frozenset({0}),)))


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.slice.Tensor": _slice,
    "aten.slice_copy.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select.int": _select,
    "aten.select_copy.int": _select,
    "aten.select_backward.default": _select_backward,
    "aten.select_scatter.default": _select_scatter,
    "aten.split.Tensor": _split,
    "aten.split_copy.Tensor": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split,
    "aten.split_with_sizes.default": _split,
    "aten.split_with_sizes_copy.default": _split,
    "aten.unbind.int": _unbind,
    "aten.unbind_copy.int": _unbind,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.reflection_pad1d.default": _pad,
    "aten.reflection_pad2d.default": _pad,
    "aten.reflection_pad3d.default": _pad,
    "aten.replication_pad1d.default": _pad,
    "aten.replication_pad2d.default": _pad,
    "aten.replication_pad3d.default": _pad,
    "aten.reflection_pad1d_backward.default": _pad_backward,
    "aten.reflection_pad2d_backward.default": _pad_backward,
    "aten.reflection_pad3d_backward.default": _pad_backward,
    "aten.replication_pad1d_backward.default": _pad_backward,
    "aten.replication_pad2d_backward.default": _pad_backward,
    "aten.replication_pad3d_backward.default": _pad_backward,
}
