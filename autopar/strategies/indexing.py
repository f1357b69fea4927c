"""Sharding rules of operators that read or write at places told by index tensors.

Dimensions that are not indexed split freely, and so do the index tensors.
Splitting an indexed dimension needs the lowering `owner`: each rank serves the
places it holds. What it reads is zero elsewhere, so reads add up; what it
writes stays its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from autopar.ir.graph import Ref
from autopar.ir.placement import Partial, Shard
from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call, is_term_friendly
from autopar.strategies.matmul import aligned

ALONG_ONE = frozenset({"aten.index_select.default", "aten.index_add.default"})
"""Operators that index one dimension, which they name, by one tensor."""


def indexed(call: Call) -> tuple[int, ...]:
    """Return the dimensions of `self` that an index tensor is given for."""
    if call.op.target in ALONG_ONE:
        rank = len(call.metas[0].shape)
        return (call.dim("dim", rank),) if rank and len(call.metas[1].shape) == 1 else ()
    return tuple(d for d, each in enumerate(call.arg("indices")) if isinstance(each, Ref))


def _indexed(call: Call) -> tuple[tuple[int, ...], Dims, Dims, Dims]:
    """Return the indexed dimensions of `self`, and the dimensions of `self`, of the index and of what is read."""
    shape = call.metas[0].shape
    dims = indexed(call)
    shapes = [call.metas[i].shape for i in range(1, 1 + len(dims))]
    index = plain(letters(len(np.broadcast_shapes(*shapes)), len(shape)))
    names = letters(len(shape))
    kept = plain(None if d in dims else name for d, name in enumerate(names))
    rest: list[tuple[str, ...]] = [(name,) for d, name in enumerate(names) if d not in dims]
    # Neighbouring indices leave their result in place, others move it to the front.
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    return dims, kept, index, (*rest[:at], *index, *rest[at:])


def _index(call: Call) -> Iterator[Strategy]:
    dims, kept, index, read = _indexed(call)
    indices = tuple(aligned(meta.shape, index) for meta in call.metas[1:])
    yield from call.by(Rule(inputs=(kept, *indices), outputs=(read,), linear=(frozenset({0}),)))
    yield from _read_owned(call, 0, dims)


def _index_put(call: Call) -> Iterator[Strategy]:
    dims, kept, index, read = _indexed(call)
    count = len(dims)
    values = len(call.metas) - 1
    adds = bool(call.arg("accumulate"))
    inputs = (
        kept,
        *(aligned(meta.shape, index) for meta in call.metas[1 : 1 + count]),
        aligned(call.metas[values].shape, read),
    )
    yield from call.by(
        Rule(
            inputs=inputs,
            outputs=(kept,),
            reduce="sum" if adds else None,
            added=frozenset({0}),
            linear=(frozenset({0, values}),),
        )
    )
    yield from _written(call, dims)


def _read_owned(call: Call, table: int, dims: Sequence[int]) -> Iterator[Strategy]:
    if not is_term_friendly(call.op.outputs[0]):
        return
    for dim in dims:
        for outer in call.digits(table, dim):
            yield call.strategy({table: Shard(dim, outer)}, {0: Partial()}, "owner")


def _written(call: Call, dims: Iterable[int]) -> Iterator[Strategy]:
    for dim in dims:
        for outer in call.digits(0, dim):
            yield call.strategy({0: Shard(dim, outer)}, {0: Shard(dim, outer)}, "owner")


def _gather(call: Call) -> Iterator[Strategy]:
    """Yield those of reading along one dimension: the others go along where both tensors span them."""
    shape, index = call.shape("self"), call.shape("index")
    if not shape or not index:
        yield call.replicated()
        return
    dim = call.dim("dim", len(shape))
    names = letters(len(shape))
    same = [names[d] if shape[d] == index[d] and d != dim else None for d in range(len(shape))]
    places = [name if d != dim else "I" for d, name in enumerate(same)]
    yield from call.by(Rule(inputs=(plain(same), plain(places)), outputs=(plain(places),), linear=(frozenset({0}),)))
    yield from _read_owned(call, 0, [dim])


def _scatter(*, adds: bool, owned: bool = True) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of writing along one dimension; `adds` where equal places add up, so that parts do too."""

    def rule(call: Call) -> Iterator[Strategy]:
        shape, index = call.shape("self"), call.shape("index")
        source = call.index("src")
        if not shape or not index:
            yield call.replicated()
            return
        dim = call.dim("dim", len(shape))
        names = letters(len(shape))
        span = index if source is None else tuple(map(min, index, call.metas[source].shape))
        exact = source is None or call.metas[source].shape == index
        same = [names[d] if exact and shape[d] == span[d] and d != dim else None for d in range(len(shape))]
        places = plain(name if d != dim or not exact else "I" for d, name in enumerate(same))
        inputs = (plain(same), places) if source is None else (plain(same), places, places)
        linear = () if source is None or not owned else (frozenset({0, source}),)
        yield from call.by(
            Rule(
                inputs=inputs,
                outputs=(plain(same),),
                reduce="sum" if adds else None,
                added=frozenset({0}),
                linear=linear,
            )
        )
        if owned:
            yield from _written(call, [dim])

    return rule


def _index_select(call: Call) -> Iterator[Strategy]:
    rank = len(call.shape("self"))
    if not rank or len(call.shape("index")) != 1:
        yield call.replicated()
        return
    dim = call.dim("dim", rank)
    names = letters(rank)
    kept = plain(None if d == dim else name for d, name in enumerate(names))
    read = plain("I" if d == dim else name for d, name in enumerate(names))
    yield from call.by(Rule(inputs=(kept, (("I",),)), outputs=(read,), linear=(frozenset({0}),)))
    yield from _read_owned(call, 0, [dim])


def _index_add(call: Call) -> Iterator[Strategy]:
    rank = len(call.shape("self"))
    if not rank or len(call.shape("index")) != 1:
        yield call.replicated()
        return
    dim = call.dim("dim", rank)
    names = letters(rank)
    kept = plain(None if d == dim else name for d, name in enumerate(names))
    read = plain("I" if d == dim else name for d, name in enumerate(names))
    yield from call.by(
        Rule(
            inputs=(kept, (("I",),), read), outputs=(kept,), added=frozenset({0}), linear=(frozenset({0, 2}),)
        )
    )  # fmt: skip
    yield from _written(call, [dim])


def _masked_scatter(call: Call) -> Iterable[Strategy]:
    """Return the replicated strategy alone: what a place gets depends on all places before it."""
    return (call.replicated(),)


def _index_copy(call: Call) -> Iterator[Strategy]:
    rank = len(call.shape("self"))
    dim = call.dim("dim", rank)
    kept = plain(None if d == dim else name for d, name in enumerate(letters(rank)))
    return call.by(Rule(inputs=(kept, ((),) * len(call.metas[1].shape), kept), outputs=(kept,)))


def _take(call: Call) -> Iterator[Strategy]:
    """Yield those of reading by places in the flattened tensor, which stays whole."""
    table, index = call.metas
    read = plain(letters(len(index.shape)))
    return call.by(Rule(inputs=(((),) * len(table.shape), read), outputs=(read,), linear=(frozenset({0}),)))


def _put(call: Call) -> Iterator[Strategy]:
    """Yield those of writing to places in the flattened tensor; what is added there may be added by several ranks."""
    adds = bool(call.arg("accumulate"))
    whole = ((),) * len(call.metas[0].shape)
    written = plain(letters(len(call.metas[1].shape)))
    return call.by(
        Rule(
            inputs=(whole, written, written),
            outputs=(whole,),
            reduce="sum" if adds else None,
            added=frozenset({0}),
            linear=(frozenset({0, 2}),),
        )
    )


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter(adds=False),
    "aten.scatter.value": _scatter(adds=False),
    "aten.scatter_add.default": _scatter(adds=True),
    "aten.scatter_reduce.two": _scatter(adds=False, owned=False),
    "aten.index_select.default": _index_select,
    "aten.index_add.default": _index_add,
    "aten.index_copy.default": _index_copy,
    "aten.masked_scatter.default": _masked_scatter,
    "aten.take.default": _take,
    "aten.put.default": _put,
}
