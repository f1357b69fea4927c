"""Parameters and buffers on their ranks: values, and where each lives at rest."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.ir.placement import Layout, Replicate, local_shape
from autopar.ir.plan import Decisions
from autopar.runtime.errors import parameters_differ, uninitialised
from autopar.runtime.placing import dense_copy, dtensor_placements, own_part
from autopar.runtime.ranks import Groups, Ranks

InitFn = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Slot:
    """A place in the module tree that holds a parameter or buffer."""

    name: str
    module: nn.Module
    key: str
    table: dict[str, Any]
    """The module's `_parameters` or `_buffers`."""

    @property
    def value(self) -> torch.Tensor:
        """Return the tensor in it."""
        found: torch.Tensor = self.table[self.key]
        return found


_REPLACED: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
"""Names of the tensors that models had before `place` put others in their places, while somebody has these still."""


def replaced_name(tensor: torch.Tensor) -> str | None:
    """Return the name of a tensor that was a model's, and is no longer since it was compiled; `None` of all others."""
    return _REPLACED.get(tensor)


def slots(model: nn.Module) -> Iterator[Slot]:
    """Yield every place that holds a parameter, then every place that holds a buffer, under every name."""
    for attribute in ("_parameters", "_buffers"):
        for path, module in model.named_modules(remove_duplicate=False):
            table = getattr(module, attribute)
            for key, value in table.items():
                if value is not None:
                    yield Slot(f"{path}.{key}" if path else key, module, key, table)


def check(model: nn.Module, decisions: Decisions, init_fn: InitFn | None) -> None:
    """Raise what is wrong with the model's parameters, before anything is changed or sent.

    Raises:
        StalePlanError: the plan does not know a parameter.
        UsageError: a parameter or buffer is on meta, and nothing says how to initialise it; a layout DTensor lacks.
    """
    unknown = [s.name for s in slots(model) if isinstance(s.value, nn.Parameter) and s.name not in decisions.parameters]
    if unknown:
        raise parameters_differ(unknown)
    empty = [slot.name for slot in slots(model) if slot.value.is_meta]
    if empty and init_fn is None:
        raise uninitialised(empty)
    for name, decision in decisions.parameters.items():
        dtensor_placements(name, decision.placements, decisions.mesh)


def place(
    model: nn.Module,
    decisions: Decisions,
    groups: Groups,
    ranks: Ranks,
    init_fn: InitFn | None,
    names: Collection[str] | None = None,
) -> frozenset[str]:
    """Put every parameter of `model` where the plan holds it at rest, with rank 0's values; buffers become whole.

    Parameters become `DTensor` parameters in their old places (plain ones if the mesh has no axis),
    tied ones stay tied. Tensors on meta are allocated and given to `init_fn` module by module, all
    ranks drawing the same random numbers, and each keeps its own part at once.

    With `names`, this rank holds only these, and tensors tied to them; the places of all others are `None`, as
    `register_parameter` says that there is nothing. Returns the names of those.
    """
    placer = _Placer(decisions, groups, ranks, done={}, by_id={}, names=names)
    every = list(slots(model))
    for slot in every:
        placer.by_id.setdefault(id(slot.value), []).append(slot)
    if init_fn is not None and any(slot.value.is_meta for slot in every):
        _materialise(model, every, placer, init_fn)
    rest = [slot for slot in slots(model) if id(slot.value) not in placer.finished]
    unique = list({id(slot.value): slot for slot in rest}.values())
    _equalise([slot.value for slot in unique], ranks)
    for slot in unique:
        placer.put(slot)
    return frozenset(placer.dropped)


@dataclass
class _Placer:
    decisions: Decisions
    groups: Groups
    ranks: Ranks
    done: dict[int, torch.Tensor]
    by_id: dict[int, list[Slot]]
    names: Collection[str] | None

    def __post_init__(self) -> None:
        self.finished: set[int] = set()
        self.dropped: set[str] = set()

    def put(self, slot: Slot) -> None:
        """Replace the tensor of a slot in all places that hold it, or remove it from them."""
        old = slot.value
        if self.names is not None and not any(each.name in self.names for each in self.by_id[id(old)]):
            for each in self.by_id.pop(id(old)):
                each.table[each.key] = None
                self.dropped.add(each.name)
            return
        layout = self._layout(slot, old)
        device = self.ranks.device
        trained = isinstance(old, nn.Parameter)
        if all(isinstance(each, Replicate) for each in layout) and (not trained or not self.groups.mesh.axes):
            new = old if old.device == device else self._moved(old, device)
        elif trained:
            new = self._distributed(slot.name, old, layout)
        else:
            raise TypeError(f"buffer {slot.name} is to be split, and only parameters can")
        for each in self.by_id.pop(id(old)):
            each.table[each.key] = new
        if new is not old:
            _REPLACED.setdefault(old, slot.name)
        self.done[id(new)] = new  # kept alive, so that its id stays its own
        self.finished.add(id(new))

    def _layout(self, slot: Slot, value: torch.Tensor) -> Layout:
        if isinstance(value, nn.Parameter):
            return self.decisions.parameters[slot.name].placements
        return (Replicate(),) * len(self.groups.mesh.axes)

    def _moved(self, old: torch.Tensor, device: torch.device) -> torch.Tensor:
        new = old.detach().to(device)
        return parameter_like(old, new) if isinstance(old, nn.Parameter) else new

    def _distributed(self, name: str, old: torch.Tensor, layout: Layout) -> torch.Tensor:
        part = own_part(old.detach(), layout, self.groups.mesh, self.groups.rank)
        room = local_shape(old.shape, layout, self.groups.mesh.sizes)
        local = dense_copy(part.to(self.ranks.device), old, room)
        return parameter_like(old, distributed_from(local, old, name, layout, self.groups))


def distributed_from(
    local: torch.Tensor, whole: torch.Tensor, name: str, layout: Layout, groups: Groups
) -> torch.Tensor:
    """Return the DTensor of which this rank holds `local`, of the shape and strides of `whole`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        groups.device_mesh,
        dtensor_placements(name, layout, groups.mesh),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


_OF_DTENSORS = frozenset({"_local_tensor", "_spec"})
"""Attributes in which a DTensor is what it is: a copy has its own, or none."""


def parameter_like(old: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """Return a parameter with the attributes and hooks that the user put on the old one.

    The tables of hooks are shared, so that the handles which the user has still remove them.
    """
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__dict__.update(attributes_of(old))
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, table)
        if hooks:
            setattr(made, table, hooks)
    return made


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user put on a tensor."""
    return {name: each for name, each in tensor.__dict__.items() if name not in _OF_DTENSORS}


def _materialise(model: nn.Module, every: list[Slot], placer: _Placer, init_fn: InitFn) -> None:
    """Allocate and initialise modules that hold meta tensors, one by one; a tied tensor stays whole until its last."""
    ranks = placer.ranks
    same_random_numbers(ranks)
    pending = {key: len({id(slot.module) for slot in found}) for key, found in placer.by_id.items()}
    owned: dict[int, list[Slot]] = {}
    for slot in every:
        owned.setdefault(id(slot.module), []).append(slot)
    fresh: dict[int, torch.Tensor] = {}
    for module in dict.fromkeys(model.modules()):
        mine = list({slot.key: slot for slot in owned.get(id(module), [])}.values())
        if not any(slot.value.is_meta or id(slot.value) in fresh for slot in mine):
            continue
        for slot in mine:
            if slot.value.is_meta:
                _allocate(slot, placer, pending, fresh)
        with torch.no_grad():
            init_fn(module)
        _refuse_unset(mine, fresh)
        for slot in mine:
            key = id(slot.value)
            if key not in fresh:
                continue
            pending[key] -= 1
            if pending[key] == 0:
                placer.put(slot)
                del fresh[key]


def _allocate(slot: Slot, placer: _Placer, pending: dict[int, int], fresh: dict[int, torch.Tensor]) -> None:
    old = slot.value
    real = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=placer.ranks.device)
    if real.is_floating_point():
        real.fill_(torch.nan)
    new: torch.Tensor = real
    if isinstance(old, nn.Parameter):
        new = parameter_like(old, real)
    found = placer.by_id.pop(id(old))
    for each in found:
        each.table[each.key] = new
    placer.by_id[id(new)] = found
    pending[id(new)] = pending.pop(id(old))
    fresh[id(new)] = new


def _refuse_unset(mine: list[Slot], fresh: Mapping[int, torch.Tensor]) -> None:
    unset = [
        slot.name
        for slot in mine
        if id(slot.value) in fresh and slot.value.is_floating_point() and bool(slot.value.isnan().any())
    ]
    if unset:
        raise uninitialised(unset)


def same_random_numbers(ranks: Ranks) -> None:
    """Give every rank rank 0's random state, so that all draw the values that a single device would."""
    torch.set_rng_state(ranks.from_first(torch.get_rng_state()))
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(ranks.from_first(torch.cuda.get_rng_state(ranks.device)), ranks.device)


def _equalise(values: list[torch.Tensor], ranks: Ranks) -> None:
    """Overwrite tensors whose values differ between ranks by rank 0's; equal ones are not sent."""
    if ranks.world_size == 1:
        return
    digests = ranks.gather([_digest(value) for value in values])
    for index, value in enumerate(values):
        if len({each[index] for each in digests}) > 1:
            whole = value.detach().to(ranks.device).contiguous()
            dist.broadcast(whole, src=0)
            with torch.no_grad():
                value.copy_(whole)


def _digest(value: torch.Tensor) -> int:
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data) if data.numel() else 0
