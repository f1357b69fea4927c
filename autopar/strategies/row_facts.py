"""What is known of values whose rows a micro-batch permuted, counted or pointed at by itself, and what becomes of it.

`Fact` is what must be known of a value to say that what reads it works row by row, in whatever order. The rules that
make such values are those of `own_rows`; every other operator either passes facts on, or mixes rows and is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Op, Ref
from autopar.ir.placement import Placement, Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call

ANY = "*"
"""Rows that are alike, or that stand for any rows they are laid beside."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that places point at: what sorted them (empty: they are in the batch's order), and how many there are."""

    order: str
    extent: int
    """Of one micro-batch."""

    each: bool = False
    """Whether each of them is pointed at once, as by what a sort returns."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a value beyond its placement."""

    order: str = ""
    """Name of the sort that put the rows of the split dimension in order, empty for the batch's order, or `ANY`."""

    places: Rows | None = None
    """The elements are places among these rows of the own micro-batch."""

    counted: bool = False
    """A whole range from 0: cut along its one dimension, it holds places among any rows."""

    tells: tuple[str, Ref] | None = None
    """`keys`: the elements are those of that value, in some order; `counts`, `ends`: of its values, from the least."""

    begins: int = 0
    """A whole range from 0 in steps of so many: where the rows of each sample begin among those of all samples."""

    below: int = 0
    """The elements are whole numbers from 0 to below this one; 0 where that is not known."""

    alike: bool = False
    """All elements are the same number, as in the gradient of a mean."""

    @property
    def is_own(self) -> bool:
        """Return whether the value is another than the whole batch's, cut."""
        return self.places is not None or self.order not in {"", ANY}


def named_in(fact: Fact) -> list[str]:
    """Return the operators of which a fact speaks."""
    orders = [fact.order] if fact.places is None else [fact.order, fact.places.order]
    found = [order for order in orders if order not in {"", ANY}]
    return found if fact.tells is None else [*found, fact.tells[1].op]


def renamed(fact: Fact, names: Mapping[str, str]) -> Fact:
    """Return a fact that says the same of operators of other names."""
    places, tells = fact.places, fact.tells
    return replace(
        fact,
        order=names.get(fact.order, fact.order),
        places=None if places is None else replace(places, order=names.get(places.order, places.order)),
        tells=None if tells is None else (tells[0], replace(tells[1], op=names.get(tells[1].op, tells[1].op))),
    )


class MixedRows(ValueError):  # noqa: N818  not an error of anyone: caught where the operator gets another strategy
    """Rows of different orders meet, or a place is read as a number."""


@dataclass(frozen=True)
class Seen:
    """One operator, and what is known of what it reads."""

    op: Op
    call: Call
    now: tuple[Placement | None, ...]
    """Where each tensor it reads lives; `None`: wherever it is wanted."""

    facts: tuple[Fact, ...]
    sorts: Mapping[str, Ref]
    """What each sort of the program so far sorted by."""

    @property
    def count(self) -> int:
        """Return the number of micro-batches."""
        return self.call.size

    def keys(self, slot: int) -> Ref:
        """Return the value whose elements an input holds, in its own order or another."""
        tells = self.facts[slot].tells
        return tells[1] if tells is not None and tells[0] == "keys" else self.op.refs[slot]

    def is_split(self, slot: int, dim: int) -> bool:
        """Return whether micro-batches have runs of dimension `dim` of an input."""
        return self.now[slot] == Shard(dim)


Found = tuple[Strategy, tuple[Fact, ...]]


def joint(orders: Iterable[str]) -> str:
    """Return the order of rows that lie beside each other.

    Raises:
        MixedRows: there is none.
    """
    found = {order for order in orders if order != ANY}
    if len(found) > 1:
        raise MixedRows
    return found.pop() if found else ANY


COPIES = frozenset(
    {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.clone.default",
     "aten.detach.default", "aten.alias.default", "aten._to_copy.default", "aten.unsqueeze.default",
     "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default", "prims.convert_element_type.default"}
)  # fmt: skip
"""Operators whose result has the elements of their input, each once and in the same order."""

_TAKEN = frozenset(
    {"aten.slice.Tensor", "aten.select.int", "aten.expand.default", "aten.permute.default", "aten.transpose.int",
     "aten.gather.default", "aten.index.Tensor", "aten.index_select.default", "aten.repeat.default"}
)  # fmt: skip
"""Operators whose result has only elements of their first input."""

SPREADING = frozenset({"aten.expand.default", "aten.repeat.default"})
"""Operators that give every sample what all share."""

_MULTIPLIED = frozenset({"aten.mul.Tensor", "aten.mul.Scalar"})
_ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in ("neg.default", "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "add.Tensor", "sub.Tensor")
)
_ARG_OF_ALL = frozenset({"aten.argmax.default", "aten.argmin.default"})
_PLACES_AT = {
    **{f"aten.{name}": 1 for name in ("topk.default", "sort.default", "sort.stable", "max.dim", "min.dim")},
    **dict.fromkeys((*_ARG_OF_ALL, "aten.argsort.default"), 0),
}
"""Which output of an operator holds places along the dimension that it works on."""

_FLOOR = {"aten.floor_divide.default": None, "aten.div.Tensor_mode": "floor", "aten.div.Scalar_mode": "floor"}
_REMAINDER = frozenset({"aten.remainder.Scalar", "aten.fmod.Scalar", "aten.remainder.Tensor", "aten.fmod.Tensor"})


def facts_of(seen: Seen, strategy: Strategy) -> tuple[Fact, ...]:
    """Return what is known of what an operator makes by one of its other strategies.

    Raises:
        MixedRows: it reads a place as a number, rows of different orders, or rows of a sort otherwise than one by one.
    """
    op, call = seen.op, seen.call
    split = [i for i, each in enumerate(strategy.inputs) if isinstance(each, Shard)]
    order = joint(seen.facts[i].order for i in split if seen.now[i] is not None)
    if order not in {"", ANY}:
        _require_rows(call, strategy)
    made = tuple(Fact(order if isinstance(each, Shard) else "") for each in strategy.outputs)
    pointing = [i for i in split if seen.facts[i].places is not None]
    if pointing:
        made = (replace(made[0], places=_places(seen, pointing)), *made[1:])
    first = seen.facts[0] if seen.facts else Fact()
    if op.target in COPIES and len(seen.facts) == 1:
        integral = call.metas[0].dtype.startswith(("int", "uint"))
        tells = ("keys", seen.keys(0)) if integral or first.tells else None
        row = call.metas[0].numel == max(call.result(), default=1)
        begins = first.begins if row else 0
        made = (replace(made[0], counted=first.counted and row, begins=begins, tells=tells),)
    if op.target in SPREADING and first.counted and not split:
        longest = sorted(call.result())[-2:]  # no other dimension may pass for the range's own
        made = (Fact(counted=longest[-1] == call.metas[0].numel != longest[0]),)
    if op.target == "aten.histc.default" and call.arg("min") < call.arg("max"):
        made = (Fact(tells=("counts", seen.keys(0))),)
    if op.target in _RANGES:
        made = (Fact(counted=_counts_from_0(call)),)
    if strategy.outputs[:1] == (Replicate(),) and _are_alike(seen):
        made = (replace(made[0], alike=True), *made[1:])
    by = op.args[1] if len(op.args) == 2 else None
    if op.target in _MULTIPLIED and isinstance(by, int) and by > 0 and not split and (first.counted or first.begins):
        made = (Fact(begins=by * (first.begins or 1)),)
    bounds = [_below(seen, i) if isinstance(p, Shard | Replicate) else 0 for i, p in enumerate(strategy.outputs)]
    return tuple(replace(each, below=below) for each, below in zip(made, bounds, strict=True))


def _are_alike(seen: Seen) -> bool:
    """Return whether what an operator makes is one number with a point, repeated."""
    op, made = seen.op, seen.op.outputs[0]
    if made is None or not made.is_floating or op.target not in SPREADING | COPIES | _ELEMENTWISE or not seen.facts:
        return False
    pairs = zip(seen.facts, seen.call.metas, strict=True)
    return all(fact.alike or meta.numel == 1 for fact, meta in pairs)


def _below(seen: Seen, index: int) -> int:
    """Return below which number the elements of an output are, all from 0 on; 0 where that is not known."""
    op, call = seen.op, seen.call
    made = op.outputs[index]
    if made is None or not made.dtype.startswith(("int", "uint")):
        return 0
    if op.target in _RANGES:
        return made.numel if _counts_from_0(call) else 0
    if _PLACES_AT.get(op.target) == index:
        shape = call.metas[0].shape
        whole = call.arg("dim") is None and op.target in _ARG_OF_ALL
        return call.metas[0].numel if whole else shape[call.dim("dim", len(shape))]
    if op.target == "aten.remainder.Scalar":
        by = call.arg("other")
        return by if isinstance(by, int) and by > 0 else 0
    if op.target in COPIES or op.target in _TAKEN:
        return seen.facts[0].below
    return 0


def _places(seen: Seen, pointing: Sequence[int]) -> Rows | None:
    """Return the rows that a result points at, made of places by an operator that knows nothing of them."""
    op, rows = seen.op, seen.facts[pointing[0]].places
    if len(seen.facts) != 1 or rows is None:
        raise MixedRows
    if op.target in COPIES:
        return rows
    by = op.args[1] if len(op.args) > 1 else None
    if not isinstance(by, int) or by <= 0 or rows.extent % by:
        raise MixedRows
    if op.target in _REMAINDER:
        return None  # micro-batches begin at multiples of it: what is left is the whole batch's
    if rows.order or op.target not in _FLOOR or seen.call.arg("rounding_mode") != _FLOOR[op.target]:
        raise MixedRows
    return Rows("", rows.extent // by)


def _require_rows(call: Call, strategy: Strategy) -> None:
    """Check that an operator treats each row of the split dimensions by itself: they all are the same rows."""
    shapes = [*zip(strategy.inputs, call.metas, strict=True), *zip(strategy.outputs, call.op.outputs, strict=True)]
    extents = {meta.shape[p.dim] for p, meta in shapes if isinstance(p, Shard) and meta is not None}
    runs = any(isinstance(p, Shard) and p.outer > 1 for p, _ in shapes)
    if len(extents) > 1 or runs or strategy.lowering not in _LOCAL or strategy.inner:
        raise MixedRows


_LOCAL = frozenset({"", "view", "scale"})
"""Lowerings that ask nothing of where a rank's rows lie in the whole."""

_RANGES = frozenset({"aten.arange.default", "aten.arange.start", "aten.arange.start_step", "prims.iota.default"})


def _counts_from_0(call: Call) -> bool:
    return not call.arg("start") and call.arg("step") in {None, 1}
