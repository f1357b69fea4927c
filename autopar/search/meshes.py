"""Which meshes are worth solving: shapes laid on the link levels, and the role of each axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, isqrt, prod
from typing import Literal

Role = Literal["microbatch", "dp_replicate", "dp_shard", "cp", "ep", "tp", "free"]
"""What an axis is for: named by the user, or `free` to be whatever the solver makes of it; `microbatch` is in time."""

DATA: tuple[Role, ...] = ("dp_replicate", "dp_shard", "ep")
"""Roles of the axes along which the batch is split: what is between the products with experts is along `ep`, too."""

_OF_SOME: tuple[Role, ...] = ("cp", "ep")
"""Roles beside data and tensor parallelism: what is left over never becomes `cp`, and `ep` only of experts."""

SHARDING: tuple[Role, ...] = ("dp_shard", "cp", "ep")
"""Roles of the axes whose ranks a ZeRO stage shards parameters, gradients and states over."""

_ORDER: tuple[Role, ...] = ("microbatch", "dp_replicate", "dp_shard", "cp", "ep", "free", "tp")
"""Of axes on the levels of links, outermost first: who communicates most is innermost."""

_IN_FREE: tuple[Role, ...] = ("tp", "dp_replicate", "dp_shard")
"""Roles of axes that do nothing which free ones cannot."""

_SEVERAL = 4
"""Micro-batches a pipeline rank with which a pipeline is busy for most of a step."""

FREE_LIMIT = 16
"""World sizes up to which an axis over all devices is free; beyond, it is data parallel, and freedom stays inside."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a candidate."""

    role: Role
    size: int


Candidate = tuple[MeshAxis, ...]
"""Axes, outermost first."""


def candidates(
    devices: int,
    per_node: int,
    fixed: Mapping[str, int],
    forbidden: Sequence[str],
    experts: int = 0,
    splits_tensors: Callable[[int], bool] = lambda _: True,
    *,
    sharded: bool = False,
    free_limit: int = FREE_LIMIT,
) -> list[Candidate]:
    """Return the meshes to solve for `devices`, most promising first; empty if the fixed degrees do not divide them.

    Degrees in `fixed` become axes of that role; what they leave over is split in every way into
    a data-parallel part and an inner free one, or one that splits so many `experts` evenly. Inner ones are of the sizes
    that `splits_tensors` says are worth it. With `sharded`, each has ranks to shard over, which free ones need not be.
    Up to `free_limit` devices an axis over all of them is free.
    """
    axes: set[str] = {"dp_replicate", "dp_shard", "tp", *_OF_SOME}
    known = {role: size for role, size in fixed.items() if role in axes}
    taken = prod(known.values())
    if devices % taken:
        return []
    rest = devices // taken
    if {"dp_replicate", "dp_shard", "tp"} <= {*known, *forbidden} and rest > 1:
        return []
    splits = _splits(rest, per_node, known, forbidden, splits_tensors, free_limit)
    if sharded and rest > 1 and "dp_shard" not in {*known, *forbidden}:
        splits.append({"dp_shard": rest})
    if experts and not {"dp_shard", "ep"} & {*known, *forbidden}:
        splits += [{"dp_shard": rest // size, "ep": size} for size in divisors(rest) if size > 1 > experts % size]
    found = [_assemble(known, extra) for extra in splits]
    return [mesh for mesh in dict.fromkeys(found) if not sharded or any(axis.role in SHARDING for axis in mesh)]


def _splits(
    rest: int,
    per_node: int,
    known: Mapping[str, int],
    forbidden: Sequence[str],
    splits_tensors: Callable[[int], bool],
    free_limit: int,
) -> list[dict[Role, int]]:
    if rest == 1:
        return [{}]
    out: set[str] = {*known, *forbidden}
    outer: list[Role] = [role for role in ("dp_shard", "dp_replicate") if role not in out]
    free_ok = "tp" not in out
    found: list[dict[Role, int]] = []
    largest = max(2 * per_node, free_limit)
    inner = [size for size in divisors(rest) if 1 < size < rest and size <= largest and splits_tensors(size)]
    data: Role | None = outer[0] if outer else None
    if data is None:
        return [{"tp": rest}] if free_ok else []
    if free_ok and rest <= free_limit:
        found.append({"free": rest})
    # A free axis lies inside `cp` and `ep`, where data parallelism is not to be.
    if not found or any(known.get(role, 1) > 1 for role in _OF_SOME):
        found.append({data: rest})
    if free_ok:
        found += [{data: rest // size, "free": size} for size in inner]
    if len(outer) == 2:
        nodes = rest // per_node
        if nodes > 1 and rest % per_node == 0:
            found.append({"dp_replicate": nodes, "dp_shard": per_node})
            if free_ok:
                found += [
                    {"dp_replicate": nodes, "dp_shard": per_node // size, "free": size}
                    for size in divisors(per_node)
                    if 1 < size < per_node and splits_tensors(size)
                ]
    return found


def _assemble(known: Mapping[str, int], extra: Mapping[Role, int]) -> Candidate:
    sizes: dict[str, int] = {**known, **{str(role): size for role, size in extra.items()}}
    return tuple(MeshAxis(role, sizes[role]) for role in _ORDER if sizes.get(role, 1) > 1)


def by_tokens(mesh: Candidate, batch: int, depth: int, splits_tokens: Callable[[int], bool]) -> list[Candidate]:
    """Return a mesh with `cp` in place of data-parallel ranks that a batch has no samples for; empty where it has.

    Of pipelines, those for whose micro-batches it has none: data parallelism is left such that a rank has one for each
    of the `depth` stages, and such that it has several.
    """
    data = [axis for axis in mesh if axis.role in DATA]
    if len(data) != 1 or data[0].role == "ep" or any(axis.role in _OF_SOME for axis in mesh):
        return []
    ranks = data[0].size
    if batch % ranks == 0 and batch >= ranks * depth:
        return []
    shared = divisors(gcd(ranks, batch))
    enough = [max((each for each in shared if batch >= each * times * depth), default=1) for times in (1, _SEVERAL)]
    found = []
    for parts in dict.fromkeys(enough if depth > 1 else enough[:1]):
        if parts < ranks and splits_tokens(ranks // parts):
            axes = (replace(data[0], size=parts), MeshAxis("cp", ranks // parts))
            inner = (replace(axis, role="tp") for axis in mesh if axis.role in {"free", "tp"})
            found.append(in_order(axis for axis in (*axes, *inner) if axis.size > 1))
    return found


def in_order(mesh: Iterable[MeshAxis]) -> Candidate:
    """Return axes in the order in which they lie on the levels of links."""
    return tuple(sorted(mesh, key=lambda axis: _ORDER.index(axis.role)))


def freer(ranks: Candidate) -> Iterator[Candidate]:
    """Yield a mesh and those with free axes in place of some: these can do whatever it can."""
    beside_experts = any(axis.role == "ep" for axis in ranks)  # some of what axes are there, free ones are not
    yield from product(
        *(
            [axis]
            if axis.role not in _IN_FREE or (beside_experts and axis.role != "tp")
            else [axis, replace(axis, role="free")]
            for axis in ranks
        )
    )


def divisors(number: int) -> list[int]:
    """Return what divides a number, smallest first; by its root, since a batch may be any number."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return [*small, *(number // each for each in reversed(small) if each * each < number)]
