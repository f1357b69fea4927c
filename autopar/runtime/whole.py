"""DTensors as the whole tensors that they stand for: arguments of calls, outputs, and numbers read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar._torch import is_dtensor, put_before_number_of_dtensor, pytree
from autopar.runtime.errors import number_of_part

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


def refuse_numbers_of_parts(meshes: Iterable[Any]) -> None:
    """Refuse, from now on, to read a number of a DTensor on these meshes of which a rank holds its own part only.

    Torch reads that part without a word: another number on every rank, of a mean the mean of the rank's own samples.
    A reduction in its place would wait for ever where one rank alone asks, such as the one that logs.
    """
    _MESHES.update(meshes)
    put_before_number_of_dtensor(_require_whole)


def whole_here(tensor: Any) -> Any:
    """Return the whole of a DTensor on a compiled model's mesh, and anything else as it is."""
    if isinstance(tensor, torch.Tensor) and is_dtensor(tensor) and tensor.device_mesh in _MESHES:  # type: ignore[attr-defined]
        return whole(tensor)
    return tensor


def _require_whole(tensor: Any) -> None:
    placements = tensor.placements
    if not all(each.is_replicate() for each in placements) and tensor.device_mesh in _MESHES:
        raise number_of_part(", ".join(map(repr, placements)))
