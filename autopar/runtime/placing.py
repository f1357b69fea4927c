"""Layouts as DTensor's placements, and the part of a tensor that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar._torch import is_dtensor, local_of
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Replicate, Shard
from autopar.runtime.errors import layout_not_dtensor


def dtensor_placements(name: str, layout: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """Return DTensor's placements for a layout whose axes split each dimension in mesh order, outer axes further out.

    Raises:
        UsageError: they do not.
    """
    from torch.distributed import tensor as dt

    taken: dict[int, int] = {}
    found: list[Any] = []
    for placement, axis in zip(layout, mesh.axes, strict=True):
        match placement:
            case Replicate():
                found.append(dt.Replicate())
            case Partial(reduce):
                found.append(dt.Partial(reduce))
            case Shard(dim, outer):
                if outer != taken.get(dim, 1):
                    raise layout_not_dtensor(name, ", ".join(map(str, layout)))
                taken[dim] = outer * axis.size
                found.append(dt.Shard(dim))
    return tuple(found)


def own_part(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return a view (or where digits are split from inside, a copy) of what `rank` holds of `whole`."""
    part = whole
    shards = [
        (placement, axis.size, at)
        for placement, axis, at in zip(layout, mesh.axes, mesh.coordinate(rank), strict=True)
        if isinstance(placement, Shard)
    ]
    for placement, size, at in sorted(shards, key=lambda each: -each[0].outer):
        # Inner digits first: those further out are then still whole.
        dim, outer = placement.dim, placement.outer
        rest = part.shape[dim] // outer
        length = -(-rest // size)
        first = min(at * length, rest)
        runs = part.reshape((*part.shape[:dim], outer, rest, *part.shape[dim + 1 :]))
        part = runs.narrow(dim + 1, first, min(length, rest - first)).flatten(dim, dim + 1)
    return part


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a rank has for its part of a padded tensor: programs take all of it, the user what is filled."""

    shape: tuple[int, ...]
    filled: tuple[int, ...]

    def around(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the whole room of which `part` is what is filled.

        It shares the part's memory where that has the room, as it has until the user puts another tensor there. What it
        holds beside the part means nothing.
        """
        last = sum((n - 1) * step for n, step in zip(self.shape, part.stride(), strict=True))
        if part.untyped_storage().nbytes() >= (part.storage_offset() + last + 1) * part.element_size():
            return part.as_strided(self.shape, part.stride())
        made = part.new_zeros(self.shape)
        self.of(made).copy_(part)
        return made

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of what is filled of a tensor of the whole room."""
        return _corner(whole, self.filled)


def _corner(whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of the first elements along each dimension."""
    for dim, length in enumerate(shape):
        whole = whole.narrow(dim, 0, length)
    return whole


def room_of(tensor: torch.Tensor) -> Room | None:
    """Return the room of a padded DTensor on this rank; `None` where its part fills it, and of plain tensors."""
    if not is_dtensor(tensor):
        return None
    sharded: Any = tensor
    shape = list(tensor.shape)
    for placement, size in zip(sharded.placements, sharded.device_mesh.shape, strict=True):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // size)
    filled = tuple(local_of(tensor).shape)
    return None if tuple(shape) == filled else Room(tuple(shape), filled)


def dense_copy(part: torch.Tensor, like: torch.Tensor, room: Sequence[int] | None = None) -> torch.Tensor:
    """Return a copy of `part` without gaps whose dimensions lie in memory in the order of `like`.

    With `room`, a larger shape, it is a view of the first elements of a tensor of that shape, which is zero elsewhere.
    """
    shape = part.shape if room is None else room
    strides = [0] * part.dim()
    step = 1
    for dim in sorted(range(part.dim()), key=lambda d: (like.stride(d), -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    made = torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)
    if tuple(shape) != tuple(part.shape):
        made.zero_()
    return _corner(made, part.shape).copy_(part)
