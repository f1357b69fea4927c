"""Running maxima and minima over micro-batches: a value that all share, beside one of which each has its term."""

from __future__ import annotations

from autopar.ir.placement import Partial, Replicate
from autopar.strategies.row_facts import COPIES, Fact, Found, Seen

_OF = {"aten.maximum.default": "max", "aten.minimum.default": "min"}


def extreme(seen: Seen) -> Found | None:
    """Return what the larger of two values is, where one is the largest of all samples': again such, term by term.

    The other may be whole: the largest of `max(a, b1)` and `max(a, b2)` is `max(a, b1, b2)`. So is a copy or view of
    such a term. `None` for all other operators.
    """
    if _is_copy(seen) and seen.now in {(Partial("max"),), (Partial("min"),)}:
        return seen.call.strategy({0: seen.now[0]}, {0: seen.now[0]}), (Fact(),)
    reduce = _OF.get(seen.op.target)
    terms = [slot for slot, now in enumerate(seen.now) if reduce is not None and now == Partial(reduce)]
    if not terms or any(now not in {Partial(reduce or ""), Replicate()} for now in seen.now):
        return None
    made = Partial(reduce or "")
    return seen.call.strategy(dict.fromkeys(terms, made), {0: made}), (Fact(),)


def _is_copy(seen: Seen) -> bool:
    """Return whether an operator gives the elements of its input as they are, of the same type."""
    made = seen.op.outputs[0]
    return seen.op.target in COPIES and made is not None and made.dtype == seen.call.metas[0].dtype
