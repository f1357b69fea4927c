"""Operators on rows that a micro-batch can permute, count and point at by itself, as if its rows were all there are.

A mixture of experts sorts its tokens by expert, multiplies each run of them by its expert's weights and puts them
back; a classifier reads `logits[arange(batch), last]`. Sorted, or counted from 0, within a micro-batch, the values in
between are others than the whole batch's. What is made of them is the same if whatever reads them works row by row,
in whatever order, and takes places as places among the same rows. `row_facts.Fact` is what must be known of a value to
say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Op
from autopar.ir.microbatches import OWN
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.tensor import TensorMeta
from autopar.strategies.call import Call
from autopar.strategies.indexing import indexed
from autopar.strategies.row_facts import ANY, Fact, Found, MixedRows, Rows, Seen, joint


def _sort(seen: Seen) -> Found | None:
    if len(seen.call.metas[0].shape) != 1 or not seen.is_split(0, 0):
        return None
    made = seen.call.strategy({0: Shard(0)}, {0: Shard(0), 1: Shard(0)}, OWN)
    order, read = seen.op.name, seen.facts[0]
    extent = seen.call.metas[0].shape[0] // seen.count
    rows = read.places
    if rows is not None and rows.each and rows.extent == extent and is_ascending(seen.op):
        # Places of all rows, sorted, are these rows in their order again, and where each of them was: the way back.
        return made, (Fact(rows.order, rows), Fact(rows.order, Rows(read.order, extent, each=True)))
    values = Fact(order, tells=("keys", seen.keys(0)))
    return made, (values, Fact(order, Rows(read.order, extent, each=True)))


def is_ascending(op: Op) -> bool:
    """Return whether a sort puts the least first."""
    return not Call(op, (), 1, ()).arg("descending")


def _cumulated(seen: Seen) -> Found | None:
    """Ends of each key's rows, from how many there are: parts of both add up, of whole numbers too."""
    tells = seen.facts[0].tells
    if tells is None or tells[0] != "counts" or len(seen.call.metas[0].shape) != 1 or seen.now[0] != Partial():
        return None
    return seen.call.strategy({0: Partial()}, {0: Partial()}, OWN), (Fact(tells=("ends", tells[1])),)


_ADDS_UP = ("int", "float32", "float64")
"""Types in which sums of parts of whole numbers are those of all."""


def _copied_counts(seen: Seen) -> Found | None:
    """Counts stay whole numbers, and so add up, in whatever type."""
    tells, dtype = seen.facts[0].tells, seen.call.metas[0].dtype
    if seen.now[0] != Partial():
        return None
    if tells is None or tells[0] == "keys":
        made = seen.op.outputs[0]
        if not dtype.startswith(("int", "uint")) or made is None or not made.dtype.startswith(_ADDS_UP):
            return None
        tells = None
    return seen.call.strategy({0: Partial()}, {0: Partial()}, OWN), (Fact(tells=tells),)


def _grouped(tokens: Mapping[int, int], ends: int, made: Mapping[int, Placement]) -> Callable[[Seen], Found | None]:
    """Return the rule of a product of sorted tokens with their experts' weights.

    `tokens` are the dimension of each input that is tokens, `made` the placement of each output.
    """

    def rule(seen: Seen) -> Found | None:
        if not all(seen.is_split(slot, dim) for slot, dim in tokens.items()) or seen.now[ends] != Partial():
            return None
        order = joint(seen.facts[slot].order for slot in tokens)
        if seen.facts[ends].tells != ("ends", seen.sorts.get(order)):
            raise MixedRows
        ins: dict[int | None, Placement] = {slot: Shard(dim) for slot, dim in tokens.items()}
        strategy = seen.call.strategy({**ins, ends: Partial()}, dict(made), OWN)
        return strategy, tuple(Fact(order) if isinstance(p, Shard) else Fact() for p in strategy.outputs)

    return rule


def linear(seen: Seen) -> Found | None:
    """Return what an operator makes of a gradient of which each micro-batch has a term, and of values equal in all.

    That is the gradient of a table that all samples share, on its way through what was done to the table.
    """
    terms = [slot for slot, now in enumerate(seen.now) if now == Partial()]
    if not terms or any(now not in {Partial(), Replicate()} for now in seen.now):
        return None
    if seen.op.target not in _PRODUCTS and terms != seen.call.gradients:
        return None
    if seen.op.target in _PRODUCTS and len(terms) != 1:
        return None
    made = {i: Partial() for i, meta in enumerate(seen.op.outputs) if meta is not None}
    return seen.call.strategy(dict.fromkeys(terms, Partial()), {**made}), (Fact(),) * len(seen.op.outputs)


_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})


def _native_grouped(seen: Seen) -> Found | None:
    ranks = tuple(len(meta.shape) for meta in seen.call.metas)
    if ranks == (2, 3, 1):
        return _grouped({0: 0}, 2, {0: Shard(0)})(seen)
    return _grouped({0: 1, 1: 0}, 2, {0: Partial()})(seen) if ranks == (2, 2, 1) else None


@dataclass(frozen=True)
class _Pointed:
    """Index tensors, one of which points at rows of the own micro-batch."""

    slot: int
    """The one that does."""

    dim: int
    """The dimension that it indexes."""

    rows: Rows
    at: int
    """Which dimension of all index tensors, broadcast, is split."""

    inputs: dict[int | None, Placement]
    """Where each index tensor must live."""

    order: str
    """Of the places themselves."""


def _pointed(seen: Seen, dims: Sequence[int], order: str | None, runs: int) -> _Pointed | None:
    """Return which index tensor points at own rows; `order`: that of the split dimension, `None` where it is open.

    Of several runs of the split dimension (two batches, one behind the other), a micro-batch's rows are its parts of
    all, one behind the other. Only a range points at these: each row at itself.
    """
    rank = max(len(seen.call.metas[1 + i].shape) for i in range(len(dims)))
    for slot, dim in enumerate(dims, 1):
        extent = seen.call.metas[0].shape[dim]
        found = _points(seen, slot, Rows(ANY if order is None else order, extent // seen.count))
        if found is None or extent % seen.count:
            continue
        own_dim, rows = found
        if runs > 1 and not seen.facts[slot].counted:
            raise MixedRows
        at = own_dim + rank - len(seen.call.metas[slot].shape)
        inputs: dict[int | None, Placement] = {}
        orders = []
        for each in range(1, 1 + len(dims)):
            inputs[each] = _beside(seen, each, at - rank, runs)
            if isinstance(inputs[each], Shard):
                orders.append(ANY if seen.facts[each].counted else seen.facts[each].order)
            fact = seen.facts[each]
            if each != slot and (fact.places is not None or (fact.counted and inputs[each] != Replicate())):
                raise MixedRows  # places among rows of the micro-batch would be taken for others
        return _Pointed(slot, dim, rows, at, inputs, joint(orders))
    return None


def _points(seen: Seen, slot: int, rows: Rows) -> tuple[int, Rows] | None:
    """Return along which dimension an index tensor is split and at which rows it points, if at such."""
    fact, now, shape = seen.facts[slot], seen.now[slot], seen.call.metas[slot].shape
    if fact.counted and rows.extent * seen.count in shape and now == Replicate():
        return shape.index(rows.extent * seen.count), rows
    if fact.places is None or not isinstance(now, Shard) or now.outer != 1 or fact.places.extent != rows.extent:
        return None
    return now.dim, Rows(joint((fact.places.order, rows.order)), rows.extent)


def _beside(seen: Seen, slot: int, from_end: int, runs: int) -> Placement:
    """Return where a tensor must live whose dimension `from_end`, counted from the end, is split if it has it.

    A range is one run whatever it lies beside: cut, it counts a micro-batch's own rows, of however many runs.
    """
    shape, now = seen.call.metas[slot].shape, seen.now[slot]
    has = len(shape) >= -from_end and shape[from_end] > 1
    runs = 1 if seen.facts[slot].counted else runs
    wanted: Placement = Shard(len(shape) + from_end, runs) if has else Replicate()
    if isinstance(now, Partial) or (isinstance(now, Shard) and now != wanted):
        raise MixedRows
    if has and now == Replicate() and not seen.facts[slot].counted and not seen.facts[slot].alike:
        raise MixedRows  # a table with a row for each: micro-batches would all take the first one's
    return wanted


def _or_whole(rule: Callable[[Seen], Found | None]) -> Callable[[Seen], Found | None]:
    """Return a rule of places that leaves ranges alone where they do not lie beside split rows: they are read whole."""

    def tried(seen: Seen) -> Found | None:
        try:
            return rule(seen)
        except MixedRows:
            if any(seen.facts[slot].places is not None for slot in range(1, 1 + len(indexed(seen.call)))):
                raise
            return None

    return tried


def _read(seen: Seen) -> Found | None:
    dims = indexed(seen.call)
    now = seen.now[0]
    if not isinstance(now, Shard) or now.dim not in dims:
        return None
    found = _pointed(seen, dims, seen.facts[0].order, now.outer)
    if found is None or found.dim != now.dim:
        return None
    out = _front(dims) + found.at
    strategy = seen.call.strategy({0: now, **found.inputs}, {0: Shard(out, now.outer)}, OWN)
    # A range stands for the rows that it points at.
    order = found.rows.order if found.order == ANY else found.order
    return strategy, (Fact(order, seen.facts[0].places),)


def _write(seen: Seen) -> Found | None:
    dims, values = indexed(seen.call), len(seen.call.metas) - 1
    now = seen.now[0]
    if not dims or (now is not None and not isinstance(now, Shard)):
        return None
    given = seen.now[values] if now is None else now
    runs = given.outer if isinstance(given, Shard) else 1
    found = _pointed(seen, dims, None if now is None else seen.facts[0].order, runs)
    cut = any(isinstance(each, Shard) for each in seen.now)
    if found is None or not cut or (now is not None and now != Shard(found.dim, runs)):
        return None
    rank = len(seen.call.metas[0].shape) - len(dims) + max(len(seen.call.metas[1 + i].shape) for i in range(len(dims)))
    beside = _beside(seen, values, _front(dims) + found.at - rank, runs)
    fact = seen.facts[values]
    order = joint((found.order, *([fact.order] if isinstance(beside, Shard) and not _is_any(fact) else ())))
    places = fact.places
    if fact.counted:
        alike = seen.call.metas[values].shape == seen.call.metas[found.slot].shape
        if not alike or not isinstance(beside, Shard) or runs > 1:
            raise MixedRows
        places = Rows(order, seen.call.metas[values].shape[beside.dim] // seen.count)
    strategy = seen.call.strategy(
        {0: Shard(found.dim, runs), **found.inputs, values: beside}, {0: Shard(found.dim, runs)}, OWN
    )  # fmt: skip
    to = found.rows.order if found.rows.order != ANY else order if seen.facts[found.slot].counted else ""
    return strategy, (Fact(to, places),)


def _is_any(fact: Fact) -> bool:
    """Return whether a whole value can lie beside rows of any order."""
    return fact.counted or fact.alike


def _front(dims: Sequence[int]) -> int:
    """Return how many dimensions come before those of the index tensors in what is read."""
    return dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0


def _row_after_row(seen: Seen) -> Found | None:
    """Places among the rows of all samples: where those of a sample begin, plus a place among them."""
    if len(seen.facts) != 2 or seen.call.arg("alpha") not in {None, 1}:
        return linear(seen)
    for start, place in ((0, 1), (1, 0)):
        each, now = seen.facts[start].begins, seen.now[place]
        shape, places = seen.call.metas[start].shape, seen.call.metas[place].shape
        if not 0 < seen.facts[place].below <= each or not isinstance(now, Shard) or now.outer != 1:
            continue
        at = now.dim - len(places)
        if seen.facts[place].order not in {"", ANY} or len(shape) < -at or not shape[at] == places[at] == max(shape):
            continue
        ins: dict[int | None, Placement] = {start: Shard(len(shape) + at), place: now}
        made = seen.call.strategy(ins, {0: Shard(len(seen.call.result()) + at)}, OWN)
        return made, (Fact(places=Rows("", each * (places[at] // seen.count))),)
    return linear(seen)


def runs_kept(op: Op, metas: tuple[TensorMeta, ...], hints: Sequence[Collection[Shard]]) -> frozenset[Shard]:
    """Return in which runs of its rows an operator may give what is read or written row by row, one for each place.

    `hints` are the shards in which its inputs can be had.
    """
    reads, writes = op.target in _READS, op.target in _WRITES
    call = Call(op, metas, 1, ())
    dims = indexed(call) if reads or writes else ()
    if not dims or any(len(metas[1 + i].shape) != 1 for i in range(len(dims))):
        return frozenset()
    if reads:
        return frozenset(Shard(_front(dims), each.outer) for each in hints[0] if each.dim in dims and each.outer > 1)
    given = [each.outer for each in hints[-1] if each.dim == _front(dims) and each.outer > 1]
    return frozenset(Shard(dim, outer) for dim in dims for outer in given)


_READS = frozenset({"aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_select.default"})
_WRITES = frozenset({"aten.index_put.default", "aten._unsafe_index_put.default", "aten.index_add.default"})

RULES: Mapping[str, Callable[[Seen], Found | None]] = {
    "aten.add.Tensor": _row_after_row,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.cumsum.default": _cumulated,
    "aten._to_copy.default": _copied_counts,
    "prims.convert_element_type.default": _copied_counts,
    **dict.fromkeys(sorted(_READS), _or_whole(_read)),
    **dict.fromkeys(sorted(_WRITES), _or_whole(_write)),
    "aten._grouped_mm.default": _native_grouped,
    "transformers.grouped_mm_fallback.default": _grouped({0: 0}, 2, {0: Shard(0)}),
    "transformers.grouped_mm_fallback_backward.default": _grouped({0: 0, 3: 0}, 2, {0: Shard(0), 1: Partial()}),
}
"""Each returns what an operator does on a micro-batch's own rows, or `None` where its other strategies are right."""
