"""Layouts as DTensor's placements, and the part of a tensor that one rank holds."""

from __future__ import annotations

from typing import Any

import torch

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
        split = (*part.shape[:dim], outer, size, part.shape[dim] // (outer * size), *part.shape[dim + 1 :])
        part = part.reshape(split).select(dim + 1, at).flatten(dim, dim + 1)
    return part


def dense_copy(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of `part` without gaps whose dimensions lie in memory in the order of `like`."""
    strides = [0] * part.dim()
    step = 1
    for dim in sorted(range(part.dim()), key=lambda d: (like.stride(d), -d)):
        strides[dim] = step
        step *= max(part.shape[dim], 1)
    made = torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device)
    return made.copy_(part)
