"""Optimizers, tried on small stand-ins before their first step: whether they do on ranks what they do on one device.

Two things can be in the way, and torch tells of neither in words that a user can follow. An update may be made of
several parameters at once (L-BFGS: inner products over all of them), of which a rank of a pipeline has its stages'
only. And it may need an operator that DTensor lacks, or look at only the part of a matrix that a rank holds.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar._torch import is_dtensor
from autopar.ir.placement import Layout, Shard
from autopar.runtime.module import Runner, runner_of
from autopar.runtime.optimizer_errors import (
    optimizer_differs,
    optimizer_fails,
    optimizer_joins_parameters,
    optimizer_made_before,
)
from autopar.runtime.optimizer_states import spread_state
from autopar.runtime.own_states import OwnState
from autopar.runtime.parameters import distributed_from, replaced_name
from autopar.runtime.placing import own_part

_STEPS = 2
_ROUNDING = 1e-6
"""Relative difference of two updates that may be rounding; stand-ins are of 64 bits."""

_ROUNDING_OF_PRODUCTS = 0.1
"""The same where products are summed in another order, in bfloat16 at that (Muon)."""

_STEEPEST = 1e3
"""Largest curvature of what stand-ins minimise, the least being 1: no method is done with it in a few steps."""

_MODELS: WeakSet[nn.Module] = WeakSet()
_TRIED: WeakSet[Optimizer] = WeakSet()

Tensors = Sequence[torch.Tensor]


def try_optimizers(model: nn.Module) -> None:
    """Let each torch optimizer be tried before its first step on parameters of this compiled model, from now on.

    Of a model that waits for its first call, that may be within the step: the optimizer's closure calls it. All ranks
    that share a mesh must step their optimizers in the same order, as their training loop does.
    """
    _MODELS.add(model)
    _install()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Try the optimizer, once; where its closure may first plan the model, then.

    Raises:
        UsageError: it would do something else than on one device, or fails.
    """
    if optimizer in _TRIED:
        return None
    stepped = [each for group in optimizer.param_groups for each in group["params"]]
    old = [name for name in map(replaced_name, stepped) if name is not None]
    if old:
        raise optimizer_made_before(type(optimizer).__name__, old[0], len(old), len(stepped))
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    if _try_on_all(optimizer, closure=given is not None) or given is None:
        return None

    def closure() -> Any:
        loss = given()
        if optimizer not in _TRIED:
            _try_on_all(optimizer, closure=True)
        return loss

    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def _try_on_all(optimizer: Optimizer, *, closure: bool) -> bool:
    """Try the optimizer for each compiled model whose parameters it has; return whether there is one."""
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for model in list(_MODELS):
        runner = runner_of(model)
        named = {name: each for name, each in model.named_parameters() if id(each) in stepped}
        if runner is None or runner.ranks.world_size == 1 or not named:
            continue
        staged = runner.pipeline is not None and runner.pipeline.depth > 1
        if staged or any(map(is_dtensor, named.values())):
            optimizer.register_state_dict_post_hook(_tells_when_pickled)
        remake, kind = _remake(optimizer, closure=closure), type(optimizer).__name__
        stand_ins = _stand_ins(runner, named)
        _TRIED.add(optimizer)
        distributed: frozenset[str] = frozenset()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            if runner.pipeline is not None and runner.pipeline.depth > 1:
                _try_apart(remake, stand_ins, kind)
            if runner.groups.mesh.axes:
                distributed = _try_distributed(remake, stand_ins, runner, kind)
        spread = functools.partial(spread_state, named=named, runner=runner, distributed=distributed)
        spread(optimizer)
        optimizer.register_load_state_dict_post_hook(spread)
    return optimizer in _TRIED


def _tells_when_pickled(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return OwnState.called(f"state_dict() of this {type(optimizer).__name__}", state)


@dataclass(frozen=True)
class _StandIn:
    """A small tensor in place of a parameter of that layout."""

    name: str
    layout: Layout
    value: torch.Tensor
    target: torch.Tensor
    curvature: torch.Tensor
    """What is minimised is half of this times the squared distance to the target, summed."""


def _stand_ins(runner: Runner, named: Mapping[str, torch.Tensor]) -> list[_StandIn]:
    """Return stand-ins for each kind of parameter that the optimizer updates, two of each: equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    known: dict[tuple[Layout, int, torch.dtype], str] = {}
    for name, each in named.items():
        layout = runner.decisions.parameters[name].placements
        dtype = torch.complex128 if each.is_complex() else torch.float64
        known.setdefault((layout, each.dim(), dtype), name)
    found = []
    for (layout, dims, dtype), name in known.items():
        sizes = [4 + 8 * (dim % 2) for dim in range(dims)]
        for placement, axis in zip(layout, runner.groups.mesh.axes, strict=True):
            if isinstance(placement, Shard):
                sizes[placement.dim] *= axis.size
        for _ in range(2):
            value, target = (torch.randn(sizes, generator=generator, dtype=dtype) for _ in range(2))
            curvature = _STEEPEST ** torch.rand(sizes, generator=generator, dtype=torch.float64)
            found.append(_StandIn(name, layout, *(each.to(named[name].device) for each in (value, target, curvature))))
    return found


Remake = Callable[[Tensors, Tensors, Tensors], frozenset[str]]
"""Steps a new optimizer of the same settings over parameters with these targets and curvatures; returns what of its
state it holds as DTensors."""


def _remake(optimizer: Optimizer, *, closure: bool) -> Remake:
    """Return what makes and steps optimizers of the same class and defaults."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    settings = {name: value for name, value in optimizer.defaults.items() if takes_all or name in known}

    def step(parameters: Tensors, targets: Tensors, curvatures: Tensors) -> frozenset[str]:
        made = kind(list(parameters), **settings)

        def distance() -> torch.Tensor:
            total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
            for each, target, curvature in zip(parameters, targets, curvatures, strict=True):
                away = each.detach() - target
                each.grad = curvature * away
                total = total + _whole((curvature * away.abs().square()).sum()) / 2
            return total

        for _ in range(_STEPS):
            if closure:
                made.step(distance)
            else:
                distance()
                made.step()
        held = [each for state in made.state.values() for each in state.items()]
        return frozenset(key for key, value in held if isinstance(value, torch.Tensor) and is_dtensor(value))

    return step


def _updated(remake: Remake, stand_ins: Sequence[_StandIn]) -> list[torch.Tensor] | None:
    """Return what the stand-ins become where each is whole, all of them in one optimizer; `None` if that fails.

    What fails on one device, too, is not ours to explain; and some classes are not made of their defaults.
    """
    parameters = [nn.Parameter(each.value.clone()) for each in stand_ins]
    try:
        remake(parameters, [each.target for each in stand_ins], [each.curvature for each in stand_ins])
    except Exception:  # noqa: BLE001 - a class of the user's, anything
        return None
    return [each.detach() for each in parameters]


def _whole(value: Any) -> torch.Tensor:
    """Return a tensor that may be a DTensor as a plain one."""
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def _differs(got: Tensors, want: Tensors, stand_ins: Sequence[_StandIn], tolerance: float = _ROUNDING) -> bool:
    for one, other, stand_in in zip(got, want, stand_ins, strict=True):
        moved = (other - stand_in.value).norm().item()
        off = (one - other).norm().item()
        if not math.isfinite(off) or off > tolerance * moved:
            return True
    return False


def _try_apart(remake: Remake, stand_ins: Sequence[_StandIn], kind: str) -> None:
    """Raise where an update of one parameter depends on others.

    Raises:
        UsageError: it does.
    """
    together, again = _updated(remake, stand_ins), _updated(remake, stand_ins)
    apart = [_updated(remake, [each]) for each in stand_ins]
    if together is None or again is None or _differs(again, together, stand_ins):
        return  # it draws random numbers: nothing can be told
    alone = [each[0] for each in apart if each is not None]
    if len(alone) == len(together) and _differs(alone, together, stand_ins):
        raise optimizer_joins_parameters(kind)


def _try_distributed(remake: Remake, stand_ins: Sequence[_StandIn], runner: Runner, kind: str) -> frozenset[str]:
    """Return what of its state the optimizer holds as DTensors where parameters are; nothing if it cannot be tried.

    Raises:
        UsageError: parameters in parts are updated otherwise than whole ones, or the optimizer fails on them.
    """
    want, again = _updated(remake, stand_ins), _updated(remake, stand_ins)
    if want is None or again is None or _differs(again, want, stand_ins):
        return frozenset()

    groups = runner.groups

    def parts(values: Tensors) -> list[Any]:
        found = []
        for each, value in zip(stand_ins, values, strict=True):
            local = own_part(value, each.layout, groups.mesh, groups.rank).clone()
            found.append(distributed_from(local, value, each.name, each.layout, groups))
        return found

    parameters = [nn.Parameter(each) for each in parts([each.value for each in stand_ins])]
    try:
        targets, curvatures = ([getattr(each, of) for each in stand_ins] for of in ("target", "curvature"))
        distributed = remake(parameters, parts(targets), parts(curvatures))
        got = [_whole(each.detach()) for each in parameters]
    except Exception as error:
        raise optimizer_fails(kind, error) from error
    for each, one, other in zip(stand_ins, got, want, strict=True):
        if _differs([one], [other], [each], _ROUNDING_OF_PRODUCTS):
            raise optimizer_differs(kind, each.name, ", ".join(map(str, each.layout)))
    return distributed
