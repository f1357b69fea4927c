"""Norms over the gradients of all pipeline stages, of which a rank holds its own stages' only.

Torch's `clip_grad_norm_` asks a function of its own for the norm of many tensors, and knows nothing of other ranks'
stages. `see_all_stages` puts `_of_all_stages` before that function, which passes on whatever is no gradient of a model
with stages: so the user's loop, and trainers that clip by themselves, clip by the norm of the whole model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from autopar._torch import local_of, norm_of_many, put_before_norm_of_many, storage_key
from autopar.errors import UsageError
from autopar.runtime.errors import group_lost, some_gradients_of_stages
from autopar.runtime.module import Runner, runner_of
from autopar.runtime.whole import whole_here

_STAGED: WeakSet[nn.Module] = WeakSet()
"""Compiled models of which this rank holds only some stages."""


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parameters: Iterable[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scale the gradients of a compiled model so that their norm is at most `max_norm`; return the norm before.

    What `torch.nn.utils.clip_grad_norm_` does for `model.parameters()` on a single device, over the parameters of all
    pipeline stages and all parts of split ones; with `parameters`, over these only, of which a rank may have none. All
    ranks must call this. A model that is not compiled is clipped by itself.

    Raises:
        UsageError: `model` is no module.
        RuntimeError: with `error_if_nonfinite`, the norm is not finite.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"autopar.clip_grad_norm_ takes the compiled model itself, not its parameters ({type(model).__name__}): "
            "clip_grad_norm_(model, max_norm); torch's own, which takes parameters, sees all stages, too"
        )
    runner = runner_of(model)
    chosen = list(model.parameters() if parameters is None else parameters)
    wanted = {id(each) for each in chosen}
    grads = {name: p.grad for name, p in model.named_parameters() if id(p) in wanted and p.grad is not None}
    norm = _one_tensor(norm_of_many()(_counted(runner, grads), norm_type, foreach=foreach))
    pipeline = None if runner is None else runner.pipeline
    if pipeline is not None and pipeline.depth > 1:
        norm = _joined([(norm, 1)] if grads else [], norm_type, pipeline.ranks.device, pipeline.line)
    if error_if_nonfinite:
        _require_finite(norm, norm_type)
    torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, norm, foreach=foreach)
    return norm


def see_all_stages(model: nn.Module) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` and `get_total_norm` see all stages of a compiled model from now on.

    Of gradients that are DTensors on its mesh they then return the whole norm, a plain tensor as on one device.
    """
    runner = runner_of(model)
    if runner is None:
        return
    staged = runner.pipeline is not None and runner.pipeline.depth > 1
    if staged:
        _STAGED.add(model)
    if staged or runner.groups.mesh.axes:
        put_before_norm_of_many(_of_all_stages)


def _of_all_stages(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function with the norm over all stages for all that a rank has of a model with stages.

    Of one gradient alone the norm is its own, wherever it lives (clipping parameter by parameter). What else a part of
    a rank's gradients is a part of, the rank cannot know: ranks would wait for one another in vain.
    """

    @functools.wraps(own)
    @torch.no_grad()
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        found = _parts(given)
        if not found or (len(given) == 1 and not found[0].whole):
            return whole_here(own(given, norm_type, error_if_nonfinite, foreach))
        for part in found:
            if not part.whole:
                raise some_gradients_of_stages(len(part.places), part.held)
        places = {place for part in found for place in part.places}
        others = [each for place, each in enumerate(given) if place not in places]
        norms = [(part.tensors, part.width) for part in found if part.tensors]
        norms += [(others, dist.get_world_size())] if others else []
        terms = [(_one_tensor(own(each, norm_type, False, foreach)), copies) for each, copies in norms]
        norm = _joined(terms, float(norm_type), found[0].device, None)
        if error_if_nonfinite:
            _require_finite(norm, norm_type)
        return norm

    return total_norm


@dataclass(frozen=True)
class _Part:
    """What some tensors have of one model with stages."""

    places: tuple[int, ...]
    """Of the tensors."""

    held: int
    """How many such tensors of the model this rank has."""

    tensors: Sequence[torch.Tensor]
    """Those that this rank counts."""

    width: int
    """Ranks that share a stage, each of which knows the norm of the whole of its tensors."""

    device: torch.device

    @property
    def whole(self) -> bool:
        return len(self.places) == self.held


def _parts(given: Sequence[torch.Tensor]) -> list[_Part]:
    """Return what some tensors have of each model with stages, be it gradients or parameters.

    Nothing at all is everything that a rank has of a model none of whose parameters on this rank has a gradient.
    """
    keys = {_key(each): place for place, each in enumerate(given)}
    found = []
    for model in list(_STAGED):
        runner = runner_of(model)
        if runner is None or runner.pipeline is None or not dist.is_initialized():
            continue
        named = dict(model.named_parameters())
        graded = {name: p.grad for name, p in named.items() if p.grad is not None}
        trained: dict[str, torch.Tensor] = {name: p for name, p in named.items() if p.requires_grad}
        for held in (graded, trained):
            of = {name: keys.get(_key(each)) for name, each in held.items()}
            places = tuple(place for place in of.values() if place is not None)
            if places or (held is graded and not graded and not given):
                counted = _counted(runner, {name: given[place] for name, place in of.items() if place is not None})
                found.append(_Part(places, len(held), counted, runner.pipeline.width, runner.ranks.device))
    return found


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's elements lie: it may be another object for the same ones."""
    local = local_of(tensor)
    return storage_key(local), int(local.storage_offset())


def _counted(runner: Runner | None, named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that this pipeline rank counts: of a tied parameter, the first of those that hold it does."""
    return [each for name, each in named.items() if runner is None or name not in runner.held_before]


def _joined(
    terms: Sequence[tuple[torch.Tensor, int]], norm_type: float, device: torch.device, group: Any
) -> torch.Tensor:
    """Return the norm of norms that ranks of a group have, each of them in so many copies on as many ranks."""
    dtype = terms[0][0].dtype if terms else torch.float32
    norms = [(norm.to(device, torch.float64), copies) for norm, copies in terms]
    if math.isinf(norm_type):
        largest = norm_type > 0
        empty = torch.full((), 0.0 if largest else torch.inf, dtype=torch.float64, device=device)
        total = functools.reduce(torch.maximum if largest else torch.minimum, (norm for norm, _ in norms), empty)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    else:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for norm, copies in norms:
            total = total + norm.pow(norm_type) / copies
        operation = dist.ReduceOp.SUM
    try:
        dist.all_reduce(total, operation, group=group)
    except RuntimeError as error:
        others = [each for each in dist.get_process_group_ranks(group) if each != dist.get_rank()]
        raise group_lost("norm of the gradients of all stages", others, str(error)) from error
    return (total if math.isinf(norm_type) else total.pow(1 / norm_type)).to(dtype)


def _one_tensor(norm: Any) -> torch.Tensor:
    """Return a norm that may be a DTensor as a plain tensor."""
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _require_finite(norm: torch.Tensor, norm_type: float) -> None:
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped; with "
            "error_if_nonfinite=False they are scaled by it anyway"
        )
