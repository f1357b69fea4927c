"""Sharding rules of operators that only rearrange elements.

A reshape keeps every element at its place in the flattened tensor. A shard
splits one digit of that place: `Shard(d, outer)` of a tensor of shape `s` splits
the digit that starts after `prod(s[:d]) * outer` runs. The same digit of the
other shape is the shard to make, whatever was merged or split between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autopar.ir.placement import Partial, Shard
from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def position_of(shape: Sequence[int], shard: Shard) -> int:
    """Return after how many runs of the flattened tensor the shard's digit starts."""
    return math.prod(shape[: shard.dim]) * shard.outer


def shard_at(shape: Sequence[int], position: int, size: int) -> Shard | None:
    """Return the shard that splits the digit at `position` over `size` ranks; `None` where no dimension holds it."""
    before = 1
    for dim, extent in enumerate(shape):
        if before and position % before == 0 and (before * extent) % (position * size) == 0:
            return Shard(dim, position // before)
        before *= extent
    return None


def _reshape(call: Call, lowering: str = "") -> Iterator[Strategy]:
    before, after = call.metas[0].shape, call.result()
    yield call.replicated()
    if 0 in before:
        return
    starts = [Shard(dim) for dim in range(len(before))]
    ends = [Shard(dim) for dim in range(len(after))]
    hinted = sorted(call.hints[0], key=_order) if call.hints else []
    wanted = sorted(call.wanted[0], key=_order) if call.wanted else []
    positions = [position_of(before, each) for each in (*starts, *hinted)]
    positions += [position_of(after, each) for each in (*ends, *wanted) if each.dim < len(after)]
    for position in dict.fromkeys(positions):
        source, target = (shard_at(shape, position, call.size) for shape in (before, after))
        if source is not None and target is not None:
            yield call.strategy({0: source}, {0: target}, lowering)
    yield call.strategy({0: Partial()}, {0: Partial()})


def _squeeze(call: Call) -> Iterator[Strategy]:
    """Yield those of a squeeze: as a view, for it must not drop a dimension that only its split made 1."""
    return _reshape(call, "view")


def _order(shard: Shard) -> tuple[int, int]:
    return (shard.dim, shard.outer)


def _moved(call: Call, order: Sequence[int]) -> Iterator[Strategy]:
    """Yield the strategies of a permutation: output dimension `i` is input dimension `order[i]`."""
    names = letters(len(order))
    return call.by(
        Rule(
            inputs=(plain(names),),
            outputs=(plain(names[i] for i in order),),
            linear=(frozenset({0}),),
        )
    )


def _permute(call: Call) -> Iterator[Strategy]:
    rank = len(call.metas[0].shape)
    return _moved(call, [int(d) % rank for d in call.arg("dims")])


def _transpose(call: Call) -> Iterator[Strategy]:
    rank = len(call.metas[0].shape)
    order = list(range(rank))
    if rank:
        a, b = call.dim("dim0", rank), call.dim("dim1", rank)
        order[a], order[b] = order[b], order[a]
    return _moved(call, order)


def _t(call: Call) -> Iterator[Strategy]:
    return _moved(call, list(reversed(range(len(call.metas[0].shape)))))


def _expand(call: Call) -> Iterator[Strategy]:
    """Yield those of a broadcast: a dimension made by it may be split too, each rank making its part."""
    before, after = call.metas[0].shape, call.result()
    names = letters(len(after))
    tail = zip(before, after[len(after) - len(before) :], names[len(after) - len(before) :], strict=True)
    kept = plain(name if old == new else None for old, new, name in tail)
    return call.by(Rule(inputs=(kept,), outputs=(plain(names),), linear=(frozenset({0}),)))


def _repeat(call: Call) -> Iterator[Strategy]:
    """Yield those of a tiling: output dimension = (repetition, element)."""
    before = call.metas[0].shape
    repeats = [int(r) for r in call.arg("repeats")]
    new = len(repeats) - len(before)
    elements = letters(len(before))
    copies = letters(len(repeats), len(before))
    out: Dims = tuple(
        (copies[i],) if i < new else ((copies[i], elements[i - new]) if repeats[i] > 1 else (elements[i - new],))
        for i in range(len(repeats))
    )
    return call.by(Rule(inputs=(plain(elements),), outputs=(out,), linear=(frozenset({0}),)))


def _complex_view(call: Call) -> Iterator[Strategy]:
    """Yield those of real <-> complex: the pair is the last dimension of the real side."""
    rank = min(len(call.metas[0].shape), len(call.result()))
    names = plain(letters(rank))
    ins = (*names, ()) if len(call.metas[0].shape) > rank else names
    outs = (*names, ()) if len(call.result()) > rank else names
    return call.by(Rule(inputs=(ins,), outputs=(outs,), linear=(frozenset({0}),)))


def _diagonal(call: Call) -> Iterator[Strategy]:
    rank = len(call.metas[0].shape)
    a, b = call.dim("dim1", rank), call.dim("dim2", rank)
    names = letters(rank)
    ins = plain(None if i in {a, b} else names[i] for i in range(rank))
    outs = plain((*(names[i] for i in range(rank) if i not in {a, b}), None))
    return call.by(Rule(inputs=(ins,), outputs=(outs,), linear=(frozenset({0}),)))


def _unfold(call: Call) -> Iterator[Strategy]:
    rank = len(call.metas[0].shape)
    dim = call.dim("dimension", rank)
    kept = [None if i == dim else name for i, name in enumerate(letters(rank))]
    return call.by(Rule(inputs=(plain(kept),), outputs=(plain((*kept, None)),), linear=(frozenset({0}),)))


def _unfold_backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    dim = call.dim("dim", rank)
    kept = [None if i == dim else name for i, name in enumerate(letters(rank))]
    return call.by(Rule(inputs=(plain((*kept, None)),), outputs=(plain(kept),), linear=(frozenset({0}),)))


def _diagonal_backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    a, b = call.dim("dim1", rank), call.dim("dim2", rank)
    names = letters(rank)
    outs = plain(None if i in {a, b} else names[i] for i in range(rank))
    ins = plain((*(names[i] for i in range(rank) if i not in {a, b}), None))
    return call.by(Rule(inputs=(ins,), outputs=(outs,), linear=(frozenset({0}),)))


def _shuffle(grow: bool) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of pixel_shuffle (`grow`) or pixel_unshuffle: channels = (c, r, r)."""

    def rule(call: Call) -> Iterator[Strategy]:
        large = call.result() if grow else call.metas[0].shape
        lead = letters(len(large) - 3, 3)
        fine: Dims = (*plain(lead), ("a",), (), ())
        coarse: Dims = (*plain(lead), ("a", "r"), (), ())
        ins, outs = (coarse, fine) if grow else (fine, coarse)
        return call.by(Rule(inputs=(ins,), outputs=(outs,), whole=frozenset("r"), linear=(frozenset({0}),)))

    return rule


def _channel_shuffle(call: Call) -> Iterator[Strategy]:
    names = letters(len(call.result()))
    dims = plain(None if i == 1 else name for i, name in enumerate(names))
    return call.by(Rule(inputs=(dims,), outputs=(dims,), linear=(frozenset({0}),)))


def replicate_only(call: Call) -> Iterable[Strategy]:
    """Return the replicated strategy alone: the operator is known, and has no parts."""
    return (call.replicated(),)


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten._reshape_copy.default": _reshape,
    "aten.view_copy.default": _reshape,
    "aten._reshape_alias.default": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.squeeze_copy.dim": _squeeze,
    "aten.unsqueeze_copy.default": _reshape,
    "aten.permute.default": _permute,
    "aten.permute_copy.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.transpose_copy.int": _transpose,
    "aten.t.default": _t,
    "aten.t_copy.default": _t,
    "aten.expand.default": _expand,
    "aten.expand_copy.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.view_as_complex.default": _complex_view,
    "aten.view_as_real.default": _complex_view,
    "aten.view_as_complex_copy.default": _complex_view,
    "aten.view_as_real_copy.default": _complex_view,
    "aten.diagonal.default": _diagonal,
    "aten.diagonal_copy.default": _diagonal,
    "aten.diagonal_backward.default": _diagonal_backward,
    "aten.diag_embed.default": _diagonal_backward,
    "aten.unfold.default": _unfold,
    "aten.unfold_copy.default": _unfold,
    "aten.unfold_backward.default": _unfold_backward,
    "aten.pixel_shuffle.default": _shuffle(grow=True),
    "aten.pixel_unshuffle.default": _shuffle(grow=False),
    "aten.channel_shuffle.default": _channel_shuffle,
    "aten.as_strided.default": replicate_only,
    "aten.as_strided_copy.default": replicate_only,
    "aten.as_strided_scatter.default": replicate_only,
}
