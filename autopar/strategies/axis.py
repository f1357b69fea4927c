"""Every strategy of an operator along one mesh axis: from the first source that knows the operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autopar.ir.graph import Op
from autopar.ir.placement import Partial, Placement, Shard, is_valid
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta
from autopar.strategies import dtensor
from autopar.strategies.call import Call
from autopar.strategies.table import rule_of

Hints = tuple[frozenset[Shard], ...]


class AxisStrategies(NamedTuple):
    """What an operator may do along one mesh axis."""

    strategies: tuple[Strategy, ...]
    """Replicated first."""

    known: bool
    """False where no rule covers the operator, so that it is replicated for want of knowledge."""


def axis_strategies(
    op: Op, metas: tuple[TensorMeta, ...], size: int, hints: Hints = (), wanted: Hints = ()
) -> AxisStrategies:
    """Return all strategies of `op` on one mesh axis of `size` ranks, the replicated one first.

    `metas` are the global metas of the tensors it reads (`Op.refs` order). Only even splits are given.
    `hints[i]` are the shards in which input `i` can be had, `wanted[i]` those in which output `i` would be welcome
    (both matter for strided ones: every operator offers the contiguous splits by itself). The result depends on the
    call's signature alone, so callers may cache it.

    The first source that knows the operator is asked: rules registered by the user (`register_sharding`), this
    package's table, DTensor's registry.
    """
    call = Call(op, metas, size, hints, wanted)
    replicated = call.replicated()
    found: Iterable[Strategy] | None = dtensor.user_rule(call)
    if found is None:
        rule = rule_of(op.target)
        found = rule(call) if rule is not None else dtensor.registry_rule(call)
    if found is None:
        return AxisStrategies((replicated,), known=False)
    kept = dict.fromkeys(each for each in found if fits(each, metas, op.outputs, size))
    replicated = next((each for each in kept if _is_replicated(each)), replicated)
    return AxisStrategies(tuple(dict.fromkeys((replicated, *kept))), known=True)


def fits(strategy: Strategy, metas: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...], size: int) -> bool:
    """Return whether every shard is even, and every term is of a type whose sum means something."""
    inputs = tuple(zip(metas, strategy.inputs, strict=True))
    made = tuple(zip(outputs, strategy.outputs, strict=True))
    if any(isinstance(placement, Partial) for _, placement in inputs):
        # Terms of terms: whole numbers made from parts are rounded apart; what is made of them (shares of hits) adds.
        terms = [meta for meta, placement in made if isinstance(placement, Partial)]
        if not all(meta is not None and meta.is_continuous for meta in terms):
            return False
        if not terms and not all(meta.is_continuous for meta, placement in inputs if isinstance(placement, Partial)):
            return False
    return all(_fits(meta, placement, size) for meta, placement in (*inputs, *made))


def _fits(meta: TensorMeta | None, placement: Placement | None, size: int) -> bool:
    if meta is None or placement is None:
        return meta is None and placement is None
    if isinstance(placement, Partial):
        return meta.dtype != "bool"
    return is_valid(meta.shape, (placement,), (size,))


def _is_replicated(strategy: Strategy) -> bool:
    return not any(isinstance(p, Shard | Partial) for p in (*strategy.inputs, *strategy.outputs))
