"""Modules that wait for their first call: their parameters exist, their plan does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import local_of
from autopar.runtime.copying import copy_tree, with_own_calls
from autopar.runtime.errors import uninitialised
from autopar.runtime.module import runner_of
from autopar.runtime.parameters import parameter_like, slots
from autopar.runtime.ranks import Ranks


def require_values(model: nn.Module) -> None:
    """Check that nothing of the model is on meta.

    Raises:
        UsageError: something is; with an example batch or a plan, `init_fn` can give it values.
    """
    empty = [slot.name for slot in slots(model) if slot.value.is_meta]
    if empty:
        raise uninitialised(empty)


def hold_whole(model: nn.Module, ranks: Ranks) -> None:
    """Replace every parameter by a DTensor that is whole on every rank; tied ones stay tied."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    held: dict[int, nn.Parameter] = {}
    for slot in list(slots(model)):
        if isinstance(slot.value, nn.Parameter):
            old = slot.value
            if id(old) not in held:
                whole = DTensor.from_local(old.detach().to(ranks.device), mesh, [Replicate()], run_check=False)
                held[id(old)] = parameter_like(old, whole)
            slot.table[slot.key] = held[id(old)]


def plain_copy(waiting: nn.Module, model: nn.Module) -> nn.Module:
    """Return a copy of a waiting module as what `model` is, with plain parameters, for capture and placement."""
    copied = with_own_calls(copy_tree(waiting, {}), model)
    copied.__class__ = type(model)
    plain: dict[int, nn.Parameter] = {}
    for slot in list(slots(copied)):
        if isinstance(slot.value, DTensor):
            old: Any = slot.value
            if id(old) not in plain:
                plain[id(old)] = parameter_like(old, local_of(old).detach())
            slot.table[slot.key] = plain[id(old)]
    return copied


def take_over(waiting: nn.Module, built: nn.Module) -> None:
    """Give a waiting module the contents of the built one, its own parameter objects included.

    Where each stage of a pipeline is one rank, parameters are plain; a DTensor takes over what such a one holds as what
    it is to that rank alone.
    """
    runner = runner_of(built)
    pipeline = None if runner is None else runner.pipeline
    mine = {slot.name: slot.value for slot in slots(waiting) if isinstance(slot.value, DTensor)}
    swapped: set[int] = set()
    for slot in list(slots(built)):
        old = mine.get(slot.name)
        if old is None:
            continue
        if id(old) not in swapped:
            new = slot.value
            if pipeline is not None and not isinstance(new, DTensor):
                alone = DTensor.from_local(
                    new.detach(), pipeline.meshes[pipeline.index], [Replicate()], run_check=False
                )
                new = parameter_like(new, alone)
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
            swapped.add(id(old))
        slot.table[slot.key] = old
    waiting.__dict__.update(built.__dict__)
    if runner is not None:
        runner.watch(waiting)
