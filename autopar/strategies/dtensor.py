"""Rules that come from elsewhere: torch's `register_sharding` (users') and DTensor's own registry.

Both are asked on a mesh without process groups, so that neither a process group
of the user nor the lack of one matters. DTensor's registry has several kinds of
rule; one private entry point answers for all of them. It is asked with every
combination of placements of the inputs, and what it takes without
redistribution is a strategy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from autopar.ir.graph import Arg, Const, Ref
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta
from autopar.strategies.call import Call, overload

MOST_COMBINATIONS = 1024
"""How many placements of inputs the registry is asked about at most; beyond that the operator is left alone."""


def user_rule(call: Call) -> list[Strategy] | None:
    """Return the strategies of a rule that the user registered for the operator; `None` where there is none.

    Raises:
        ValueError: the rule's placements do not fit the operator's tensors.
    """
    op = overload(call.op.target)
    registered = None if op is None else _registered(op)
    if registered is None:
        return None
    args, kwargs = _specs(call, [Replicate()] * len(call.metas))
    found = []
    for outputs, inputs in registered(*args, **kwargs):
        ins = [each for each in map(_placement, inputs) if each is not None]
        outs = [None if m is None else _placement(p) for p, m in zip(outputs, call.op.outputs, strict=False)]
        if len(ins) != len(call.metas) or len(outs) != len(call.op.outputs):
            raise ValueError(
                f"the rule registered for {call.op.target} places {len(ins)} inputs and {len(outs)} outputs; "
                f"this call has {len(call.metas)} and {len(call.op.outputs)}. Give one placement for each tensor."
            )
        found.append(Strategy(tuple(ins), tuple(outs)))
    return found


def registry_rule(call: Call) -> list[Strategy] | None:
    """Return what DTensor's registry admits for the operator; `None` where it has no rule or cannot be asked."""
    op = overload(call.op.target)
    if op is None or not _is_listed(op) or None in call.op.outputs:
        return None
    options = [_options(meta, call.size) for meta in call.metas]
    if math.prod(map(len, options)) > MOST_COMBINATIONS:
        return None
    found = [each for placed in itertools.product(*options) if (each := _ask(call, op, placed)) is not None]
    return found or None


def _options(meta: TensorMeta, size: int) -> list[Placement]:
    even = [Shard(d) for d, extent in enumerate(meta.shape) if extent and extent % size == 0]
    return [Replicate(), *even, *([Partial()] if meta.is_continuous else [])]


def _ask(call: Call, op: Any, placed: Sequence[Placement]) -> Strategy | None:
    """Return the strategy with these inputs, if the registry takes them as they are."""
    from torch.distributed.tensor._op_schema import OpSchema

    args, kwargs = _specs(call, placed)
    schema = OpSchema(op, args, kwargs)
    try:
        found = _propagator().propagate_op_sharding_non_cached(schema)
    except (RuntimeError, AssertionError, LookupError, ValueError, TypeError):
        # Asked for placements it does not expect, a rule of the registry fails in any of these ways: not offered.
        return None
    suggested = found.redistribute_schema
    # A suggestion that changes a plain argument (a local size) is one that this operator cannot be run with as it is.
    if suggested is not None and repr((suggested.args_schema, suggested.kwargs_schema)) != repr((args, kwargs)):
        return None
    specs = found.output_spec if isinstance(found.output_spec, list | tuple) else [found.output_spec]
    outs = [None if spec is None else _placement(spec.placements[0]) for spec in specs]
    if None in outs or len(outs) != len(call.op.outputs):
        return None
    return Strategy(tuple(placed), tuple(outs))


def _placement(found: Any) -> Placement | None:
    """Return DTensor's placement as ours; `None` where there is none or it has no counterpart."""
    from torch.distributed.tensor import placement_types as theirs

    if type(found) is theirs.Shard:
        return Shard(found.dim)
    if type(found) is theirs.Replicate:
        return Replicate()
    if type(found) is theirs.Partial:
        return Partial(found.reduce_op) if found.reduce_op in {"sum", "max", "min"} else None
    return None


def _theirs(placement: Placement) -> Any:
    from torch.distributed.tensor import placement_types as theirs

    match placement:
        case Shard(dim):
            return theirs.Shard(dim)
        case Partial(reduce):
            return theirs.Partial(reduce)
    return theirs.Replicate()


def _specs(call: Call, placed: Sequence[Placement]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a DTensor spec for each tensor."""
    mesh = _mesh(call.size)
    tensors = iter(zip(call.metas, placed, strict=True))

    def value(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            meta, placement = next(tensors)
            return _spec(mesh, meta, placement)
        if isinstance(arg, tuple):
            return [value(each) for each in arg]
        return _literal(arg) if isinstance(arg, Const) else arg

    args = tuple(value(arg) for arg in call.op.args)
    return args, {name: value(arg) for name, arg in call.op.kwargs}


def _spec(mesh: Any, meta: TensorMeta, placement: Placement) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TheirMeta

    stride, step = [], 1
    for extent in reversed(meta.shape):
        stride.append(step)
        step *= max(extent, 1)
    shape = torch.Size(meta.shape)
    return DTensorSpec(
        mesh, (_theirs(placement),), TheirMeta(shape, tuple(reversed(stride)), getattr(torch, meta.dtype))
    )


def _literal(const: Const) -> Any:
    if const.kind == "device":
        return torch.device(const.value)
    return getattr(torch, const.value, const.value)


def _registered(op: Any) -> Any:
    """Return the function that a user gave to `register_sharding` for the operator, if any."""
    rule = _propagator().op_strategy_funcs.get(op)
    if isinstance(rule, partial) and "register_sharding" in getattr(rule.func, "__qualname__", ""):
        return rule.args[0]
    return None


def _is_listed(op: Any) -> bool:
    propagator = _propagator()
    tables = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    return any(op in getattr(propagator, table, {}) for table in tables)


def _propagator() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


@lru_cache(maxsize=64)
def _mesh(size: int) -> Any:
    """Return a mesh of one axis that belongs to no process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("axis",), _init_backend=False, _rank=0)
