"""The ranks that run a plan: who we are, and how all of them go on or all stop."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import group_timeout
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.tasks import axis_of, level_name, stream_name
from autopar.runtime.errors import (
    no_number,
    no_rendezvous,
    no_such_device,
    no_such_rank,
    rank_failed,
    ranks_disagree,
    world_size_differs,
)
from autopar.runtime.gloo import is_gloo, one_thread_backend
from autopar.runtime.heap import keep_freed_memory
from autopar.runtime.last_words import keep_last_words


@dataclass(frozen=True)
class Ranks:
    """One process among all that take part."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def join(cls, device: str | torch.device | None = None) -> Ranks:
        """Return this process's place: of the process group there is, else of torchrun's environment, else alone.

        A process group is made (nccl for cuda, gloo otherwise) only if there are several ranks and none exists. On CPUs
        what the process frees stays with it from now on (`heap`).

        Raises:
            UsageError: the environment is none of torchrun's, or there is no such device.
        """
        rank, world_size, local = _numbered("RANK", 0), _numbered("WORLD_SIZE", 1), _numbered("LOCAL_RANK", 0)
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        if not 0 <= rank < world_size:
            raise no_such_rank(rank, world_size)
        keep_last_words()
        place = _device(device, local)
        if place.type == "cuda":
            count = torch.cuda.device_count()
            if not torch.cuda.is_available() or (place.index or 0) >= count:
                raise no_such_device(str(place), count)
            torch.cuda.set_device(place)
        elif place.type == "cpu":
            keep_freed_memory()
        if world_size > 1 and not dist.is_initialized():
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise no_rendezvous(world_size, missing)
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(rank, world_size, place)

    def require(self, mesh: Mesh) -> None:
        """Raise unless there are as many ranks as the mesh has.

        Raises:
            StalePlanError: there are not.
        """
        if mesh.world_size != self.world_size:
            raise world_size_differs(mesh.world_size, self.world_size, str(mesh))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """Return rank 0's picklable `value` (its plan's text), whatever the others pass."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def agree(self, what: str, digest: str) -> None:
        """Raise on every rank unless all hold the same digest.

        Raises:
            RanksDisagreeError: they do not; no rank is left waiting.
        """
        found = self.gather(digest)
        if len(set(found)) > 1:
            raise ranks_disagree(what, found)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block that may raise on some ranks; if it does, every rank raises at its end and none hangs.

        The block itself must not communicate. Ranks whose own block succeeded raise what names the others' failure.

        Raises:
            RanksDisagreeError: this rank's block succeeded, another's did not.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  told to the other ranks, then raised here
            failure = error
        told = None if failure is None else f"{failure}" if isinstance(failure, AutoparError) else repr(failure)
        failures = [(rank, text) for rank, text in enumerate(self.gather(told)) if text is not None]
        if failure is not None:
            raise failure
        if failures:
            raise rank_failed(failures, doing)


@dataclass(frozen=True)
class Groups:
    """The process groups of a mesh's axes."""

    mesh: Mesh
    device_mesh: Any
    """torch's DeviceMesh; `None` if the mesh has no axis."""

    names: dict[str, str]
    """Mesh axis to the name of the process group this rank is in."""

    rank: int = 0
    """This rank's number in the mesh."""

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        ranks: Ranks,
        streams: Mapping[str, Sequence[str]] | None = None,
        levels: Collection[tuple[str, int]] = (),
    ) -> Groups:
        """Return the groups of a mesh without axes of size 1; all ranks must call this.

        `streams` names, by axis, the kinds of collectives that have a group of their own, called `AXIS:KIND`.
        `levels` says of which streams collectives run in two levels, and how many neighbours share the inner one.
        """
        ranks.require(mesh)
        if not mesh.axes:
            return cls(mesh, None, {}, ranks.rank)
        from torch.distributed.device_mesh import init_device_mesh

        kind = ranks.device.type
        backends: Any = dict.fromkeys(mesh.names, one_thread_backend()) if is_gloo(kind) else None
        made = init_device_mesh(
            kind, mesh.sizes, mesh_dim_names=mesh.names, backend_override=backends and dict(backends)
        )
        names: dict[str, str] = {name: made.get_group(name).group_name for name in mesh.names}
        own = one_thread_backend() if is_gloo(kind) else None
        for axis in mesh.names:
            for stream in (stream_name(axis, each) for each in (streams or {}).get(axis, ())):
                names[stream] = _mine_of(_lines(mesh, axis), ranks, own).group_name
        names |= level_groups(mesh, ranks, levels)
        return cls(mesh, made, names, ranks.rank)


def level_groups(
    mesh: Mesh, ranks: Ranks, levels: Collection[tuple[str, int]], blocks: Sequence[Sequence[int]] = ()
) -> dict[str, str]:
    """Return this rank's groups inside and across the runs of neighbours of some streams, by `level_name`.

    There is a mesh on each block of ranks, without blocks one on the first ranks; all ranks must call this.
    """
    own = one_thread_backend() if is_gloo(ranks.device.type) else None
    meshes, names = blocks or (range(mesh.world_size),), {}
    for stream, inner in sorted(set(levels)):
        lines = [[block[rank] for rank in line] for block in meshes for line in _lines(mesh, axis_of(stream))]
        parts = [line[at : at + inner] for line in lines for at in range(0, len(line), inner)]
        across = [line[at::inner] for line in lines for at in range(inner)]
        names[level_name(stream, "inner", inner)] = _mine_of(parts, ranks, own).group_name
        names[level_name(stream, "outer", inner)] = _mine_of(across, ranks, own).group_name
    return names


def _lines(mesh: Mesh, axis: str) -> list[list[int]]:
    """Return the ranks of every line along an axis, each in the order of the axis."""
    place = mesh.names.index(axis)
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        lines.setdefault((*at[:place], *at[place + 1 :]), []).append(rank)
    return list(lines.values())


def _mine_of(groups: Iterable[Sequence[int]], ranks: Ranks, backend: str | None) -> Any:
    """Return the group that this rank is in of those made now; all ranks make all of them, in one order."""
    mine = None
    for members in groups:
        made = dist.new_group(list(members), timeout=group_timeout(ranks.device), backend=backend)
        mine = made if ranks.rank in members else mine
    return mine


def _numbered(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "").strip()
    try:
        return int(text) if text else otherwise
    except ValueError:
        raise no_number(variable, text) from None


def _device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    named = str(wanted)
    return torch.device("cuda", local_rank) if named == "cuda" else torch.device(named)
