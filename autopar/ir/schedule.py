"""Pipeline schedules: the actions of every rank in order, and their CSV.

One rank a row, one action a cell, `STAGE KIND MICROBATCH` without spaces, in the letters of
`torch.distributed.pipelining`: `1F0` is the forward of stage 1 on micro-batch 0.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

from autopar.errors import ScheduleError, UsageError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward; full backward; its two halves, input and weight gradient; transfers of activations and gradients."""

COMPUTE: frozenset[Kind] = frozenset({"F", "B", "I", "W"})

MEANING: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "SEND_F": "send of the activation",
    "RECV_F": "receive of the activation",
    "SEND_B": "send of the gradient",
    "RECV_B": "receive of the gradient",
}

_CELL = re.compile(rf"(\d+)({'|'.join(sorted(get_args(Kind), key=len, reverse=True))})(\d+)")
_FSDP_CELL = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Action(NamedTuple):
    """One thing that a rank does for one stage and one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """Return the cell of the CSV, such as `1F0` or `0SEND_F3`."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def words(self) -> str:
        """Return what it is: `forward of stage 1, micro-batch 0`."""
        return f"{MEANING[self.kind]} of stage {self.stage}, micro-batch {self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that a cell names.

        Raises `UsageError` where it names none.
        """
        found = _CELL.fullmatch(text)
        if found is None:
            raise _no_action(text)
        stage, kind, microbatch = found.groups()
        return Action(int(stage), cast(Kind, kind), int(microbatch))


@dataclass(frozen=True)
class PipelineSchedule:
    """What every rank of a pipeline does, in order; when it does it, times decide."""

    rank_of: tuple[int, ...]
    """The rank of each stage."""

    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """Of each rank. Without sends and receives these are implied: as soon as the value is there."""

    name: str = ""

    def __post_init__(self) -> None:
        ranks, stages = len(self.actions), len(self.rank_of)
        for stage, rank in enumerate(self.rank_of):
            if not 0 <= rank < ranks:
                raise ScheduleError(f"stage {stage} is on rank {rank}, but the schedule has {ranks} ranks")
        for rank, actions in enumerate(self.actions):
            for action in actions:
                if not (0 <= action.stage < stages and 0 <= action.microbatch < self.microbatches):
                    raise _outside(self, rank, action)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Return the number of stages over all ranks."""
        return len(self.rank_of)

    @cached_property
    def has_transfers(self) -> bool:
        """Return whether sends and receives are written out."""
        return any(action.kind not in COMPUTE for actions in self.actions for action in actions)

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether weight gradients come later than input gradients."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    def compute_only(self) -> PipelineSchedule:
        """Return the schedule without its sends and receives."""
        if not self.has_transfers:
            return self
        return replace(self, actions=tuple(tuple(a for a in row if a.kind in COMPUTE) for row in self.actions))

    def to_csv(self) -> str:
        """Return a row a rank; `torch.distributed.pipelining` reads it as `compute_only` or `compute_comms`."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([str(each) for each in row] for row in self.actions)
        return out.getvalue()

    @staticmethod
    def from_csv(text: str, name: str = "") -> PipelineSchedule:
        """Return the schedule in a CSV; numbers of stages and micro-batches are the largest it names.

        Empty cells (torch writes one where a rank idles) and torch's marks of sharded parameters (`UNSHARD`,
        `RESHARD`, `REDUCE_GRAD`) are left out. A stage belongs to the first rank that computes it; `simulate.check`
        reports any other. Raises `UsageError` where a cell is no action or a stage is nowhere.
        """
        rows = tuple(_row(number, cells) for number, cells in enumerate(csv.reader(io.StringIO(text))))
        found = [action for row in rows for action in row]
        if not found:
            raise UsageError("the schedule holds no action; a row is a rank, its cells are actions such as 0F0")
        owner: dict[int, int] = {}
        for rank, row in enumerate(rows):
            for action in row:
                owner.setdefault(action.stage, rank)
        absent = [stage for stage in range(max(owner) + 1) if stage not in owner]
        if absent:
            raise UsageError(f"the schedule has actions of stage {max(owner)}, but none of stage {absent[0]}")
        rank_of = tuple(owner[stage] for stage in range(len(owner)))
        return PipelineSchedule(rank_of, 1 + max(action.microbatch for action in found), rows, name)


def loop(ranks: int, interleave: int) -> tuple[int, ...]:
    """Return the rank of each stage when stages go round the ranks: 0 1 2 0 1 2."""
    return tuple(range(ranks)) * interleave


def v_shape(ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage when two stages a rank go down the ranks and back: 0 1 2 2 1 0."""
    return (*range(ranks), *reversed(range(ranks)))


def _row(rank: int, cells: Sequence[str]) -> tuple[Action, ...]:
    found = []
    for column, cell in enumerate(cells):
        text = cell.strip()
        if not text or _FSDP_CELL.fullmatch(text):
            continue
        try:
            found.append(Action.parse(text))
        except UsageError as error:
            raise UsageError(f"row {rank + 1}, cell {column + 1}: {error}") from None
    return tuple(found)


def _no_action(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no action: write stage, kind ({', '.join(get_args(Kind))}) and micro-batch, such as 1F0"
    )


def _outside(schedule: PipelineSchedule, rank: int, action: Action) -> ScheduleError:
    return ScheduleError(
        f"rank {rank} has {action}, but the schedule has {schedule.stages} stages and {schedule.microbatches} "
        "micro-batches, both counted from 0"
    )
