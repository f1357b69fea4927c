"""How far what ranks computed is from what one device computes, and whether ranks that hold the same agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

FLOOR = 1e-3
"""A gradient whose norm is below this share of the whole gradient's counts as having that norm: one that is zero but
for rounding (of a key's bias, of one before a softmax or a difference) would differ from itself by its whole size. By
a limit of 1e-4 it may be 1e-7 of the whole gradient off, float32's rounding; a wrong one of 1e-6 is found."""


def whole(value: Any) -> Any:
    """Return a result with every DTensor gathered, `None` where others have it; all ranks must call this alike."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if not hasattr(value, "full_tensor"):
        return value
    return None if value.device_mesh.get_coordinate() is None else value.full_tensor()


def doubled(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, complex numbers as pairs."""
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference over that of `b`, of floating-point and complex tensors; of others, 0 or 1."""
    if not (b.is_floating_point() or b.is_complex()):
        return 0.0 if torch.equal(a, b) else 1.0
    if a.shape != b.shape:
        return float("inf")
    a, b = doubled(a), doubled(b)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors; equal infinite numbers, as in masks, count 0."""
    a, b = doubled(a), doubled(b)
    return float((a - b).masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0).norm())


def joint_norm(values: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all finite values together."""
    return float(sum(float(_finite(doubled(each)).norm()) ** 2 for each in values.values()) ** 0.5)


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value[torch.isfinite(value)]


def gradients_apart(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative difference of each gradient; small ones on the scale of all `wanted`, see `FLOOR`."""
    floor = FLOOR * joint_norm(wanted)
    return {
        name: distance(each, wanted[name]) / max(float(_finite(doubled(wanted[name])).norm()), floor, 1e-30)
        for name, each in got.items()
    }


def unequal_replicas(values: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ in some bit between ranks that hold the same part of them.

    All ranks must call this; a rank need not have every value.
    """
    mine = {}
    for name, value in values.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        data = local.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        mine[name] = (_part(value), hashlib.sha256(data).hexdigest())
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    bad = []
    for name in sorted({name for rank in everyone for name in rank}):
        by_part: dict[Any, set[str]] = {}
        for part, digest in (rank[name] for rank in everyone if name in rank):
            by_part.setdefault(part, set()).add(digest)
        if any(len(digests) > 1 for digests in by_part.values()):
            bad.append(name)
    return bad


def _part(value: Any) -> tuple[int, ...]:
    """Return which part of a tensor this rank holds: its coordinates on the axes that shard it."""
    if not hasattr(value, "device_mesh"):
        return ()
    coordinate = value.device_mesh.get_coordinate()
    return tuple(at for at, placement in zip(coordinate, value.placements, strict=True) if not placement.is_replicate())
