"""DTensors as the whole tensors that they stand for: arguments of calls, outputs, numbers read, values assigned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar._torch import (
    is_dtensor,
    local_of,
    place_in_whole,
    put_before_data_of_dtensor,
    put_before_number_of_dtensor,
    put_before_random_of_dtensor,
    pytree,
)
from autopar.runtime.errors import data_of_other_form, number_of_part

_MESHES: set[Any] = set()
"""torch's DeviceMeshes of compiled models."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's whole value on every rank of its mesh, differentiable; a plain tensor itself.

    All ranks of the mesh must call this.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def plain_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with whole tensors in the places of DTensors, such as another model's outputs."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    if not any(isinstance(each, torch.Tensor) and is_dtensor(each) for each in leaves):
        return args, dict(kwargs)
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, whole, (args, dict(kwargs)))
    return found


def count_meshes(meshes: Iterable[Any]) -> None:
    """Count these meshes among those of compiled models."""
    _MESHES.update(meshes)


def is_counted(tensor: Any) -> bool:
    """Return whether a DTensor is on a compiled model's mesh."""
    return tensor.device_mesh in _MESHES


def refuse_numbers_of_parts(meshes: Iterable[Any]) -> None:
    """Refuse, from now on, to read a number of a DTensor on these meshes of which a rank holds its own part only.

    Torch reads that part without a word: another number on every rank, of a mean the mean of the rank's own samples.
    A reduction in its place would wait for ever where one rank alone asks, such as the one that logs.
    """
    _MESHES.update(meshes)
    put_before_number_of_dtensor(_require_whole)


def draw_for_the_whole(meshes: Iterable[Any]) -> None:
    """Let random operators on DTensors of these meshes draw for the whole tensor on every rank, from now on.

    Each keeps its part: of ranks that are seeded alike it is what one device draws, for `torch.nn.init` and for noise.
    Torch draws on CPUs as if the part were a tensor of its own, so that all ranks' parts are the same.
    """
    _MESHES.update(meshes)
    put_before_random_of_dtensor(_drawn)


def assign_data(meshes: Iterable[Any]) -> None:
    """Let `tensor.data = value` give DTensors on these meshes the value, from now on: torch does nothing there.

    The value, a plain whole tensor or a DTensor of any placements, is copied: memory is not shared with it.
    """
    _MESHES.update(meshes)
    put_before_data_of_dtensor(_assigned)


def _assigned(tensor: Any, value: Any) -> bool:
    """Give a DTensor on a compiled model's mesh a value, out of sight of autograd; return whether it was one's.

    Raises:
        UsageError: the value has another shape or type, which the program is not for.
    """
    if tensor.device_mesh not in _MESHES or not isinstance(value, torch.Tensor):
        return False
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise data_of_other_form(*(f"{list(each.shape)} of {each.dtype}" for each in (tensor, value)))
    with torch.no_grad():
        tensor.data.copy_(value.detach())
    return True


def _drawn(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a random operator makes of a DTensor on a compiled model's mesh; `None` of any other."""
    tensor = args[0]
    if tensor.device_mesh not in _MESHES or any(each.is_partial() for each in tensor.placements):
        return None
    local = local_of(tensor)
    drawn = operator(torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device), *args[1:], **kwargs)
    part = drawn[place_in_whole(tensor)]
    if operator._schema.is_mutable:
        local.copy_(part)
        return tensor
    return type(tensor).from_local(
        part.contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=drawn.shape,
        stride=drawn.stride(),
    )


def whole_here(tensor: Any) -> Any:
    """Return the whole of a DTensor on a compiled model's mesh, and anything else as it is."""
    if isinstance(tensor, torch.Tensor) and is_dtensor(tensor) and tensor.device_mesh in _MESHES:  # type: ignore[attr-defined]
        return whole(tensor)
    return tensor


def _require_whole(tensor: Any) -> None:
    placements = tensor.placements
    if not all(each.is_replicate() for each in placements) and tensor.device_mesh in _MESHES:
        raise number_of_part(", ".join(map(repr, placements)))
