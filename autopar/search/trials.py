"""What the outer search tries: a mesh inside the stages, how many pipeline ranks, micro-batches and recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from autopar.search.meshes import DATA, Candidate, MeshAxis, Role, divisors, in_order

Uniform = Literal["none", "casts", "cheap", "selective", "per_operator", "keep_attention", "products", "full", "whole"]
"""One way of recomputing all blocks."""

Recompute = Uniform | tuple[tuple[str, str], ...]
"""One way of recomputing all blocks, or the ways of those that are, by their paths."""

_DEEPEST = 64
"""Pipeline ranks at most, where their number is open."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One point of the outer search; the search inside it decides all layouts."""

    mesh: Candidate
    """Of one stage; micro-batches are its first axis."""

    depth: int = 1
    """Pipeline ranks."""

    recompute: Recompute = "none"

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a step has."""
        return self.mesh[0].size if self.mesh and self.mesh[0].role == "microbatch" else 1

    @property
    def replicas(self) -> int:
        """Return into how many parts the batch is split over ranks; axes that are free are not counted."""
        return prod(axis.size for axis in self.mesh if axis.role in DATA)

    @property
    def ranks(self) -> Candidate:
        """Return the mesh without its micro-batches."""
        return self.mesh[1:] if self.microbatches > 1 else self.mesh


def ways_of(recompute: Recompute) -> dict[str, str]:
    """Return the way of each block that is recomputed, `*` for all, as plans have it."""
    if isinstance(recompute, str):
        return {} if recompute == "none" else {"*": recompute}
    return dict(recompute)


def depths(devices: int, blocks: int) -> list[int]:
    """Return numbers of pipeline ranks to try, fewest first: 1 and all that divide the devices."""
    most = min(devices, blocks, _DEEPEST)
    return [depth for depth in range(1, most + 1) if devices % depth == 0]


def sizes_worth_trying(samples: int) -> list[int]:
    """Return micro-batch sizes for the samples of a data-parallel rank, each at least twice the one before."""
    found: list[int] = []
    for size in divisors(samples):
        if not found or size >= 2 * found[-1]:
            found.append(size)
    return found


def other_sizes(trial: Trial, batch: int) -> list[Trial]:
    """Return a trial with micro-batches of all other sizes.

    None where the batch does not divide by the mesh, or axes are free: how many samples a rank has is then open.
    """
    if batch % trial.replicas or any(axis.role == "free" for axis in trial.ranks):
        return []
    return [
        replace(trial, mesh=(MeshAxis("microbatch", each), *trial.ranks) if each > 1 else trial.ranks)
        for each in divisors(batch // trial.replicas)
        if each != trial.microbatches
    ]


def near_sizes(trial: Trial, batch: int) -> list[Trial]:
    """Return those of `other_sizes` that are at most twice or at least half the trial's own."""
    count = trial.microbatches
    found = other_sizes(trial, batch)
    return [each for each in found if count <= 2 * each.microbatches and each.microbatches <= 2 * count]


def in_time(meshes: Iterable[Candidate], batch: int, microbatch: int | None) -> list[Candidate]:
    """Return the meshes with micro-batches: of `microbatch` samples a data-parallel rank, or all sizes worth trying.

    What divides the batch by no mesh is left out. A mesh with one micro-batch has no axis for it.
    """
    found: dict[Candidate, None] = {}
    for mesh in dict.fromkeys(variant for given in meshes for variant in settled(given)):
        replicas = prod(axis.size for axis in mesh if axis.role in DATA)
        if batch % replicas:
            continue
        samples = batch // replicas
        for size in [microbatch] if microbatch is not None else sizes_worth_trying(samples):
            if samples % size == 0:
                count = samples // size
                found[(MeshAxis("microbatch", count), *mesh) if count > 1 else mesh] = None
    return list(found)


def settled(mesh: Candidate) -> list[Candidate]:
    """Return a mesh whose axes are all of one kind: a free one would leave open how many samples a rank has."""
    if all(axis.role != "free" for axis in mesh):
        return [mesh]
    kinds: tuple[Role, ...] = ("tp", *(("dp_shard",) if all(axis.role != "dp_shard" for axis in mesh) else ()))
    return [in_order(MeshAxis(kind, axis.size) if axis.role == "free" else axis for axis in mesh) for kind in kinds]
