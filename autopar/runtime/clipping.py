"""Norms over the gradients of all pipeline stages, of which a rank holds its own stages' only.

Torch's `clip_grad_norm_` asks a function of its own for the norm of many tensors, and knows nothing of other ranks'
stages. `see_all_stages` puts `_of_all_stages` before that function, which passes on whatever is no gradient of a model
with stages: so the user's loop, and trainers that clip by themselves, clip by the norm of the whole model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from autopar._torch import local_of, storage_key
from autopar._torch_loops import clipping_call, norm_of_many, put_before_norm_of_many
from autopar.errors import UsageError
from autopar.runtime.errors import group_lost, same_places_of_stages
from autopar.runtime.module import runner_of
from autopar.runtime.whole import whole_here

_STAGED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Compiled models of which this rank holds only some stages, and their numbers, the same on all ranks."""

_NUMBERS = itertools.count()


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
    pipeline = None if runner is None else runner.pipeline
    counted = [each for name, each in grads.items() if runner is None or name not in runner.held_before]
    norm = _one_tensor(norm_of_many()(counted, norm_type, foreach=foreach))
    if pipeline is not None and pipeline.depth > 1:
        norm, _ = _joined([(norm, 1)] if grads else [], norm_type, pipeline.ranks.device, pipeline.line)
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
        _STAGED.setdefault(model, next(_NUMBERS))
    if staged or runner.groups.mesh.axes:
        put_before_norm_of_many(_of_all_stages)


def _of_all_stages(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function with the norm over all stages for what ranks have of a model with stages.

    Of one tensor given by itself the norm is its own, wherever it lives (clipping parameter by parameter). All ranks
    join in every other norm of such a model's tensors: of all that each has in one collective, which also tells
    whether a rank was given some of its own only (a submodule's); these are then named to one another.
    """

    @functools.wraps(own)
    @torch.no_grad()
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        alone = isinstance(tensors, torch.Tensor)
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        clipped = _Clipped.now()
        found = [] if alone or (clipped and clipped.alone) else _parts(given)
        if not found and (given or alone or not _may_be_of_stages(clipped)):
            return whole_here(own(given, norm_type, error_if_nonfinite, foreach))
        first = found[0] if found else _Part.none()
        places = {place for part in found for place in part.places.values()}
        others = [each for place, each in enumerate(given) if place not in places]
        rest = [(others, dist.get_world_size())] if others else []

        def joined(parts: Iterable[tuple[list[torch.Tensor], int]], *, partly: bool) -> tuple[torch.Tensor, bool]:
            norms = [(_one_tensor(own(some, norm_type, False, foreach)), n) for some, n in (*parts, *rest) if some]
            return _joined(norms, float(norm_type), first.device, None, partly=partly)

        whole = bool(found) and all(part.whole for part in found)
        norm, partly = joined([(part.counted(given), part.width) for part in found], partly=not whole)
        if partly:
            told = _told(found, listed=not (clipped and clipped.generated))
            norm, _ = joined([(part.counted(given, told), part.width) for part in found], partly=False)
        if error_if_nonfinite:
            _require_finite(norm, norm_type)
        return norm

    return total_norm


@dataclass(frozen=True)
class _Clipped:
    """What torch's `clip_grad_norm_` was called with: it hands on gradients alone."""

    parameters: Sequence[torch.Tensor]

    alone: bool
    """Given as one tensor, not as several of which there is one."""

    generated: bool
    """Given as a generator, as `module.parameters()` is."""

    @classmethod
    def now(cls) -> _Clipped | None:
        """Return that of the call that asks for a norm; `None` where another does."""
        known = clipping_call()
        if known is None:
            return None
        generated = known.get("is_generator")  # a variable for iterables only
        return cls(tuple(known["parameters"]), generated is None, bool(generated))


@dataclass(frozen=True)
class _Part:
    """What some tensors have of one model with stages."""

    number: int
    """Of the model, the same on all ranks."""

    places: Mapping[str, int]
    """Names of those parameters, and the tensors' places among the given ones."""

    held: Sequence[str]
    """Names of all such tensors of the model that this rank has."""

    earlier: frozenset[str]
    """Those that an earlier pipeline rank holds too."""

    before: Sequence[int]
    """The ranks of earlier pipeline ranks."""

    width: int
    """Ranks that share a stage, each of which knows the norm of the whole of its tensors."""

    device: torch.device

    @classmethod
    def none(cls) -> _Part:
        """Return what a rank has that was given nothing of any model."""
        model = next(iter(_STAGED))
        runner = runner_of(model)
        device = torch.device("cpu") if runner is None else runner.ranks.device
        return cls(_STAGED[model], {}, (), frozenset(), (), 1, device)

    @property
    def whole(self) -> bool:
        return len(self.places) == len(self.held)

    def counted(
        self, given: Sequence[torch.Tensor], told: Sequence[Mapping[int, Collection[str]]] | None = None
    ) -> list[torch.Tensor]:
        """Return the tensors that this rank counts: of a tied one, the first rank that holds it does.

        Of what each rank was given, if that is told, the first that was given it does.
        """
        earlier = self.earlier
        if told is not None:
            earlier = frozenset(name for rank in self.before for name in told[rank].get(self.number, ()))
        return [given[place] for name, place in self.places.items() if name not in earlier]


def _parts(given: Sequence[torch.Tensor]) -> list[_Part]:
    """Return what some tensors have of each model with stages, be it gradients or parameters.

    Nothing at all is everything that a rank has of a model none of whose parameters on this rank has a gradient.
    """
    keys = {_key(each): place for place, each in enumerate(given)}
    found = []
    for model, number in sorted(_STAGED.items(), key=lambda each: each[1]):
        runner = runner_of(model)
        if runner is None or runner.pipeline is None or not dist.is_initialized():
            continue
        pipeline = runner.pipeline
        before = [rank for block in pipeline.blocks[: pipeline.index] for rank in block]
        named = dict(model.named_parameters())
        graded = {name: p.grad for name, p in named.items() if p.grad is not None}
        trained: dict[str, torch.Tensor] = {name: p for name, p in named.items() if p.requires_grad}
        for held in (graded, trained):
            of = {name: keys.get(_key(each)) for name, each in held.items()}
            places = {name: place for name, place in of.items() if place is not None}
            if places or (held is graded and not graded and not given):
                device = runner.ranks.device
                found.append(_Part(number, places, list(held), runner.held_before, before, pipeline.width, device))
    return found


def _may_be_of_stages(clipped: _Clipped | None) -> bool:
    """Return whether a rank that was given no gradient may have been asked for those of other ranks' stages.

    Not where parameters were given, and none is of a model with stages.
    """
    if not _STAGED or not dist.is_initialized():
        return False
    if clipped is None or not clipped.parameters:
        return True
    own = {_key(each) for model in list(_STAGED) for each in model.parameters()}
    return any(_key(each) in own for each in clipped.parameters)


def _told(found: Sequence[_Part], *, listed: bool) -> list[dict[int, list[str]]]:
    """Return the names of what each rank was given of each model, all of which the norm is of.

    Raises:
        UsageError: on all ranks, these look like places in lists that are others on each rank.
    """
    mine = {part.number: list(part.places) for part in found if part.places}
    ends = [part for part in found if part.places and not part.whole] if listed else []
    shapes = [(len(part.places), *_ends(part)) for part in ends]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (mine, shapes))
    shapes_of_all = [shapes for _, shapes in gathered]
    if all(len(each) == 1 for each in shapes_of_all):
        counts, first, last = zip(*(each[0] for each in shapes_of_all), strict=True)
        if len(set(counts)) == 1 and (counts[0] == 1 or all(first) or all(last)):
            raise same_places_of_stages(counts[0], [sorted(each) for names, _ in gathered for each in names.values()])
    return [names for names, _ in gathered]


def _ends(part: _Part) -> tuple[bool, bool]:
    """Return whether a part is the first, and whether it is the last, of what its rank has."""
    count, given = len(part.places), set(part.places)
    return set(part.held[:count]) == given, set(part.held[-count:]) == given


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's elements lie: it may be another object for the same ones."""
    local = local_of(tensor)
    return storage_key(local), int(local.storage_offset())


def _joined(
    terms: Sequence[tuple[torch.Tensor, int]],
    norm_type: float,
    device: torch.device,
    group: Any,
    *,
    partly: bool = False,
) -> tuple[torch.Tensor, bool]:
    """Return the norm of norms that ranks of a group have, each of them in so many copies on as many ranks.

    And whether any of these ranks has it `partly`.
    """
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
    mark = -1.0 if operation == dist.ReduceOp.MIN else 1.0
    both = torch.stack([total, torch.full_like(total, mark * partly)])
    try:
        dist.all_reduce(both, operation, group=group)
    except RuntimeError as error:
        others = [each for each in dist.get_process_group_ranks(group) if each != dist.get_rank()]
        raise group_lost("norm of the gradients of all stages", others, str(error)) from error
    total = both[0] if math.isinf(norm_type) else both[0].pow(1 / norm_type)
    return total.to(dtype), bool(both[1])


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
