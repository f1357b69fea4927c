"""Parameters and buffers of other pipeline ranks, which an evaluation program needs for the step that it runs.

A rank holds what its stages use in training. Evaluation may compute elsewhere: a head that training leaves out, or one
operator for all of a layer (torch's fast path of `nn.TransformerEncoderLayer`), whose weights two stages train. What it
writes into buffers (a counter, a cache) goes to the ranks that hold them.
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
class Shared:
    """A parameter or buffer that a pipeline rank has, or makes, and others need; this rank is among them."""

    name: str
    source: int
    """The real rank that sends it."""

    form: Form
    group: Any
    peers: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int, tuple[int, ...]]:
        """Return under what those that share it keep it."""
        return self.name, self.source, self.peers

    def send(self, tensor: torch.Tensor | None, pipeline: PipelineRanks, doing: str) -> torch.Tensor:
        """Return what the source has, `tensor` there; all of the group must call this.

        Raises:
            PeerLostError: another rank stopped.
        """
        shape, dtype = self.form
        if tensor is None:
            whole = torch.empty(shape, dtype=dtype, device=pipeline.ranks.device)
        else:
            whole = tensor.detach().contiguous()
        # As bytes: gloo knows no complex numbers and no 8-bit floats.
        self._broadcast(bytes_of(whole), pipeline, doing)
        return whole

    def tell(self, flags: torch.Tensor, pipeline: PipelineRanks, doing: str) -> None:
        """Let all of the group have the source's flags."""
        self._broadcast(flags, pipeline, doing)

    def _broadcast(self, tensor: torch.Tensor, pipeline: PipelineRanks, doing: str) -> None:
        try:
            dist.broadcast(tensor, src=self.source, group=self.group)
        except RuntimeError as error:
            others = [each for each in self.peers if each != pipeline.ranks.rank]
            raise group_lost(f"{doing} of {self.name} for evaluation", others, str(error)) from error


def _differs(kept: torch.Tensor | None, now: torch.Tensor) -> bool:
    return kept is None or not torch.equal(bytes_of(kept), bytes_of(now))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8)


class Loans:
    """What pipeline ranks lend one another before a step of evaluation, and buffers that such a step gives back.

    What was lent is kept until the next step that trains (`PipelineRanks.lent`), with a copy where it came from: a
    tensor whose bytes are those that were sent last is not sent again. Versions would not do: writes to `.data` leave
    them as they are.
    """

    def __init__(self, lent: Sequence[Shared] = (), returned: Sequence[Shared] = ()) -> None:
        """Take what is lent and what is given back, each in an order that all ranks share."""
        self._batches: dict[tuple[int, tuple[int, ...]], list[Shared]] = {}
        for each in lent:
            self._batches.setdefault((each.source, each.peers), []).append(each)
        self._returned = returned

    @property
    def returned(self) -> frozenset[str]:
        """Return the names of buffers that a step gives to ranks that have them and do not make their new value."""
        return frozenset(each.name for each in self._returned)

    def borrow(self, held: Callable[[str], torch.Tensor], pipeline: PipelineRanks) -> dict[str, torch.Tensor]:
        """Return what this rank lacks, as its owners have it now; all ranks must call this.

        Raises:
            PeerLostError: another rank stopped.
        """
        borrowed, kept = {}, pipeline.lent
        for (source, _), batch in self._batches.items():
            mine = pipeline.ranks.rank == source
            now = {each.name: held(each.name).detach().contiguous() for each in batch} if mine else {}
            fresh = [mine and _differs(kept.get(each.key), now[each.name]) for each in batch]
            flags = torch.tensor(fresh, dtype=torch.uint8, device=pipeline.ranks.device)
            batch[0].tell(flags, pipeline, "loan")
            for each, is_fresh in zip(batch, flags.tolist(), strict=True):
                if is_fresh:
                    sent = each.send(now.get(each.name), pipeline, "loan")
                    kept[each.key] = sent.clone() if mine else sent
                if not mine:
                    borrowed[each.name] = kept[each.key]
        return borrowed

    def give_back(
        self, made: Mapping[str, torch.Tensor], put: Callable[[str, torch.Tensor], None], pipeline: PipelineRanks
    ) -> None:
        """Let all that have a buffer put its new value there; all ranks must call this.

        Raises:
            PeerLostError: another rank stopped.
        """
        for each in self._returned:
            mine = pipeline.ranks.rank == each.source
            new = each.send(made[each.name] if mine else None, pipeline, "new value")
            if not mine:
                put(each.name, new)


def loans(
    pipeline: PipelineRanks, wanted: Sequence[Sequence[str]], held: Sequence[Mapping[str, Form]]
) -> tuple[Shared, ...]:
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
        owners = _on(pipeline, name, held)
        if not owners:
            raise RuntimeError(f"stages take {name}, which no rank has: a fault of this compiler")
        found.append(_shared(pipeline, name, owners[0], lacking[name], held))
    return tuple(each for each in found if each is not None)


def returns(
    pipeline: PipelineRanks, changed: Sequence[Sequence[str]], held: Sequence[Mapping[str, Form]]
) -> tuple[Shared, ...]:
    """Return the buffers whose new value ranks have to be given, in an order that all share; all ranks must call this.

    `changed` are the names whose new value each real rank makes. Ranks that have a buffer and do not make its new
    value get it from the first that does: an evaluation program may change it where no stage of training has it, or
    on one of several ranks that have it.
    """
    found = []
    for name in sorted({name for names in changed for name in names}):
        makers = [at for at in range(pipeline.depth) if name in changed[pipeline.rank_at(at)]]
        idle = set(_on(pipeline, name, held)) - set(makers)
        if idle:
            found.append(_shared(pipeline, name, makers[0], idle, held))
    return tuple(each for each in found if each is not None)


def _on(pipeline: PipelineRanks, name: str, held: Sequence[Mapping[str, Form]]) -> list[int]:
    """Return the pipeline ranks that have a parameter or buffer."""
    return [at for at in range(pipeline.depth) if name in held[pipeline.rank_at(at)]]


def _shared(
    pipeline: PipelineRanks, name: str, source: int, others: set[int], held: Sequence[Mapping[str, Form]]
) -> Shared | None:
    members = sorted({source, *others})
    group = pipeline.shared_by(members)  # made by all ranks, also those that do not share it
    if group is None:
        return None
    form = held[pipeline.rank_at(_on(pipeline, name, held)[0])][name]
    return Shared(name, pipeline.rank_at(source), form, group, tuple(map(pipeline.rank_at, members)))
