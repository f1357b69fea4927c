"""The ranks of a pipeline: which of them hold the same stages, and the groups along and across it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import group_timeout
from autopar.ir.mesh import Mesh
from autopar.runtime.errors import world_size_differs
from autopar.runtime.gloo import is_gloo, one_thread_backend
from autopar.runtime.ranks import Groups, Ranks, level_groups


@dataclass(frozen=True)
class PipelineRanks:
    """One rank's place in a pipeline of `depth` ranks, each of which is a mesh of `width` real ranks."""

    ranks: Ranks
    depth: int
    groups: Groups
    """Of the mesh that this rank is in."""

    blocks: tuple[tuple[int, ...], ...] = ((0,),)
    """The real ranks of each pipeline rank, in the order of its mesh."""

    index: int = 0
    """This rank's number in the pipeline."""

    messages: Any = None
    """Group of all ranks for what stages send one another; `None` if there is one pipeline rank."""

    line: Any = None
    """Group of the ranks with this one's place in their meshes; or `None`."""

    meshes: tuple[Any, ...] = ()
    """torch's DeviceMesh of each pipeline rank; empty if there is one."""

    ordered: bool = False
    """Whether messages must be issued in one order on all ranks: all but gloo have no tags to tell them apart."""

    lent: dict[tuple[str, int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    """What was lent for evaluation since the last step that trained: by name, owner, and who share it."""

    _shared: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _met: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        depth: int,
        ranks: Ranks,
        levels: Collection[tuple[str, int]] = (),
        blocks: Sequence[Sequence[int]] = (),
    ) -> PipelineRanks:
        """Return the place of this rank in a pipeline of equal meshes without axes of size 1; all ranks must call this.

        `levels` as for `Groups.of`; `blocks` are the real ranks of each pipeline rank, without them one mesh behind
        the other.

        Raises:
            StalePlanError: there are not as many ranks as pipeline and mesh have.
        """
        if depth == 1:
            return cls(ranks, 1, Groups.of(mesh, ranks, levels=levels), (tuple(range(mesh.world_size)),))
        width = mesh.world_size
        if depth * width != ranks.world_size:
            raise world_size_differs(depth * width, ranks.world_size, f"pp={depth} x {mesh}".removesuffix(" x "))
        own = tuple(map(tuple, blocks)) or tuple(tuple(range(at * width, (at + 1) * width)) for at in range(depth))
        index, inner = next((at, each.index(ranks.rank)) for at, each in enumerate(own) if ranks.rank in each)
        meshes = tuple(_device_mesh(ranks.device.type, mesh, each) for each in own)
        names = {name: meshes[index].get_group(name).group_name for name in mesh.names}
        names |= level_groups(mesh, ranks, levels, own)
        groups = Groups(mesh, meshes[index] if mesh.axes else None, names, inner)
        messages = dist.new_group(timeout=group_timeout(ranks.device))
        lines = [_group((each[at] for each in own), ranks) for at in range(width)]
        ordered = not is_gloo(ranks.device.type)
        return cls(ranks, depth, groups, own, index, messages, lines[inner], meshes, ordered)

    @property
    def name(self) -> str:
        """Return what tells this pipeline from others of the job, the same on all its ranks."""
        return str(getattr(self.messages, "group_name", ""))

    @property
    def width(self) -> int:
        """Return the number of real ranks that share each stage."""
        return self.groups.mesh.world_size

    def rank_at(self, index: int) -> int:
        """Return the real rank on pipeline rank `index` that has this one's place in its mesh."""
        return self.blocks[index][self.groups.rank]

    def holder(self, rank: int) -> int:
        """Return the pipeline rank that a real rank belongs to."""
        return next(at for at, each in enumerate(self.blocks) if rank in each)

    def shared_by(self, indices: Iterable[int]) -> Any:
        """Return the group of this rank and those with its place on some pipeline ranks; all ranks must call this.

        `None` where that is one pipeline rank, or this rank is on none of them.
        """
        wanted = tuple(sorted(set(indices)))
        if len(wanted) < 2:
            return None
        if wanted not in self._shared:
            made = [_group([self.blocks[at][i] for at in wanted], self.ranks) for i in range(self.width)]
            self._shared[wanted] = made[self.groups.rank] if self.index in wanted else None
        return self._shared[wanted]

    def meet(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of pipeline ranks, in an order that all share; all ranks must call this.

        The first message of a pair on NCCL blocks until the other rank sends or receives too, which in the middle of a
        schedule it may be kept from by a third.
        """
        for pair in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]} - self._met):
            self._met.add(pair)
            if self.index not in pair:
                continue
            peer = self.rank_at(pair[1] if self.index == pair[0] else pair[0])
            byte = torch.zeros(1, dtype=torch.uint8, device=self.ranks.device)
            if self.index == pair[0]:
                dist.send(byte, peer, group=self.messages)
            else:
                dist.recv(byte, peer, group=self.messages)


def _device_mesh(kind: str, mesh: Mesh, block: Sequence[int]) -> Any:
    """Return the DeviceMesh of the real ranks of a block; a rank alone is a mesh of one axis."""
    from torch.distributed.device_mesh import DeviceMesh

    sizes, names = (mesh.sizes, mesh.names) if mesh.axes else ((1,), ("stage",))
    members = torch.tensor(block).reshape(sizes)
    override = ((one_thread_backend(), None),) * len(sizes) if is_gloo(kind) else None
    return DeviceMesh(kind, members, mesh_dim_names=names, backend_override=override)


def _group(members: Iterable[int], ranks: Ranks) -> Any:
    backend = one_thread_backend() if is_gloo(ranks.device.type) else None
    return dist.new_group(list(members), timeout=group_timeout(ranks.device), backend=backend)
