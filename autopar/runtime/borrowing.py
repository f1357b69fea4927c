"""Parameters and buffers of other pipeline ranks, which an evaluation program needs for the step that it runs.

A rank holds what its stages use in training. Evaluation may compute elsewhere: a head that training leaves out, or one
operator for all of a layer (torch's fast path of `nn.TransformerEncoderLayer`), whose weights two stages train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import local_of
from autopar.runtime.errors import group_lost
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.placing import Room

Form = tuple[tuple[int, ...], torch.dtype]
"""Local shape and dtype of what a rank holds."""


def form_of(tensor: torch.Tensor, room: Room | None) -> Form:
    """Return the form of a parameter or buffer as programs take it."""
    return tuple(local_of(tensor).shape if room is None else room.shape), tensor.dtype


@dataclass(frozen=True)
class Lent:
    """A tensor that a pipeline rank sends to others before a step, this rank among them."""

    name: str
    owner: int
    """The real rank that has it."""

    form: Form
    group: Any
    peers: tuple[int, ...]

    def borrow(self, held: Callable[[str], torch.Tensor], pipeline: PipelineRanks) -> torch.Tensor | None:
        """Return the tensor, `None` where it is at home; all of the group must call this.

        Raises:
            PeerLostError: another rank stopped.
        """
        mine = pipeline.ranks.rank == self.owner
        shape, dtype = self.form
        whole = (
            held(self.name).detach().contiguous()
            if mine
            else torch.empty(shape, dtype=dtype, device=pipeline.ranks.device)
        )
        try:
            # As bytes: gloo knows no complex numbers and no 8-bit floats.
            dist.broadcast(whole.reshape(-1).view(torch.uint8), src=self.owner, group=self.group)
        except RuntimeError as error:
            others = [each for each in self.peers if each != pipeline.ranks.rank]
            raise group_lost(f"loan of {self.name} for evaluation", others, str(error)) from error
        return None if mine else whole


def loans(
    pipeline: PipelineRanks, wanted: Sequence[Sequence[str]], held: Sequence[Mapping[str, Form]]
) -> tuple[Lent, ...]:
    """Return what this rank lends or borrows, in an order that all ranks share; all ranks must call this.

    `wanted` are the names that each real rank lacks, `held` what each has, both in the order of the ranks.

    Raises:
        RuntimeError: no rank has it.
    """
    lacking: dict[str, set[int]] = {}
    for rank, names in enumerate(wanted):
        for name in names:
            lacking.setdefault(name, set()).add(pipeline.holder(rank))
    found = []
    for name in sorted(lacking):
        owners = [index for index in range(pipeline.depth) if name in held[pipeline.rank_at(index)]]
        if not owners:
            raise RuntimeError(f"stages take {name}, which no rank has: a fault of this compiler")
        members = sorted({owners[0], *lacking[name]})
        group = pipeline.shared_by(members)  # made by all ranks, also those that do not share it
        if group is not None:
            owner = pipeline.rank_at(owners[0])
            found.append(Lent(name, owner, held[owner][name], group, tuple(map(pipeline.rank_at, members))))
    return tuple(found)
