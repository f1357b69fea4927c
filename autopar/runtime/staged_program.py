"""What the runtime needs to know of a program cut into pipeline stages, whoever cut it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx, nn

from autopar.ir.placement import Placement
from autopar.ir.schedule import PipelineSchedule
from autopar.runtime.parameters import slots
from autopar.runtime.program import Call, Result, Seeding, Start, Value


class Item(Protocol):
    """One argument or result of a stage's program."""

    @property
    def kind(self) -> str:
        """Return `start`, `value`, `output`, `mutation`, `tangent` or `gradient`."""

    @property
    def name(self) -> str:
        """Return the operator's name, of a user output the output's."""

    @property
    def turn(self) -> int:
        """Return which of the micro-batches that a program runs at once it is of."""


class Transfer(Protocol):
    """One tensor that goes from a stage to another, once a micro-batch."""

    @property
    def value(self) -> str:
        """Return its name, which both stages' programs use."""

    @property
    def source(self) -> int:
        """Return the stage that makes it."""

    @property
    def target(self) -> int:
        """Return the stage that reads it."""

    @property
    def phase(self) -> str:
        """Return `forward` or `backward`: which of the source's programs makes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its local shape."""

    @property
    def dtype(self) -> str:
        """Return torch's name of its dtype."""


class Tie(Protocol):
    """A parameter that several stages use."""

    @property
    def name(self) -> str:
        """Return its operator's name."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages whose gradients of it are summed."""


class StageProgram(Protocol):
    """One stage's share of a micro-batch; its programs never write into what they take."""

    @property
    def stage(self) -> int:
        """Return its number."""

    @property
    def forward(self) -> fx.GraphModule:
        """Return the forward of one micro-batch."""

    @property
    def takes(self) -> Sequence[Item]:
        """Return forward's arguments: starts and received values."""

    @property
    def gives(self) -> Sequence[Item]:
        """Return forward's results: outputs, mutations, and values kept or sent."""

    @property
    def backward(self) -> fx.GraphModule | None:
        """Return the backward of one micro-batch, with `weights` only its input gradients."""

    @property
    def backward_takes(self) -> Sequence[Item]:
        """Return backward's arguments: starts, values and tangents."""

    @property
    def backward_gives(self) -> Sequence[Item]:
        """Return backward's results: values and gradients."""

    @property
    def weights(self) -> fx.GraphModule | None:
        """Return the weight gradients of one micro-batch, where they are a program of their own."""

    @property
    def weights_takes(self) -> Sequence[Item]:
        """Return the arguments of `weights`."""

    @property
    def weights_gives(self) -> Sequence[Item]:
        """Return the results of `weights`."""

    @property
    def begin(self) -> fx.GraphModule | None:
        """Return what makes parameters whole before the first micro-batch, where they stay so for all of them."""

    @property
    def begin_takes(self) -> Sequence[str]:
        """Return the names of the parameters that it takes."""

    @property
    def begin_gives(self) -> Sequence[str]:
        """Return the names of its results, under which the stage's other programs take them as starts."""

    @property
    def finish(self) -> fx.GraphModule | None:
        """Return what makes gradients in the parameters' layout of those summed over micro-batches."""

    @property
    def finish_takes(self) -> Sequence[str]:
        """Return the names of its arguments."""

    @property
    def finish_gives(self) -> Sequence[str]:
        """Return the names of its results."""


class TotalsProgram(Protocol):
    """What is summed over micro-batches before the first runs."""

    @property
    def program(self) -> fx.GraphModule:
        """Return what makes a micro-batch's terms."""

    @property
    def takes(self) -> Sequence[str]:
        """Return the names of its arguments: inputs, buffers and constants, and earlier sums."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the sums, under which the stages' programs take them as starts."""

    @property
    def reduces(self) -> Sequence[str]:
        """Return how the terms of each are joined: by `sum`, `max` or `min`."""


class StagedPrograms(Protocol):
    """One rank's stages, and what joins the stages of all ranks."""

    @property
    def stages(self) -> Mapping[int, StageProgram]:
        """Return this rank's stages."""

    @property
    def transfers(self) -> Sequence[Transfer]:
        """Return the transfers of the whole pipeline, in one order on all ranks."""

    @property
    def ties(self) -> Sequence[Tie]:
        """Return the parameters that several stages use, in one order on all ranks."""

    @property
    def stage_of(self) -> Mapping[str, int]:
        """Return the first stage that uses each parameter and buffer, by its operator's name."""

    @property
    def totals(self) -> Sequence[TotalsProgram]:
        """Return the programs of what is summed over micro-batches before any runs, each after those it reads of."""

    @property
    def outputs(self) -> Sequence[tuple[str, Placement]]:
        """Return the user outputs, and where the micro-batches' parts of each lie along time."""

    @property
    def joined(self) -> Mapping[str, str]:
        """Return the buffers whose new value is made of what the micro-batches give for it: by `sum`, `max`, `min`."""

    @property
    def dropped(self) -> Sequence[str]:
        """Return the user outputs that steps with backward do not put together."""


@dataclass(frozen=True, kw_only=True)
class PipelinedProgram:
    """A program of several stages or micro-batches that is ready to run on one rank, for calls of one form."""

    call: Call
    result: Result
    placeholders: Sequence[Start]
    constants: Mapping[str, torch.Tensor]
    staged: StagedPrograms
    schedule: PipelineSchedule
    inputs: Sequence[Value]
    """Every input: shape of the whole batch, and the layout in which ranks bring it."""

    split_inputs: Collection[str]
    """Operator names of the inputs of which a micro-batch gets its rows; it gets all of the others."""

    outputs: Sequence[Value]
    """The user outputs, in the order of `staged.outputs`: shapes of the whole step, layouts on the stage's mesh."""

    trained: Collection[str] | None = None
    """Operator names of the parameters that require a gradient, unused ones too; `None`: those that get one."""

    seeding: Seeding | None = None
    """How the random operators are given their seed; not used where no stage has any."""

    batch_overlap: int = 1
    """Micro-batches of a step that each action of the schedule runs at once."""

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a step has."""
        return self.schedule.microbatches * self.batch_overlap


def names_on_rank(
    staged: StagedPrograms, placeholders: Iterable[Start], schedule: PipelineSchedule, rank: int, model: nn.Module
) -> frozenset[str]:
    """Return the names of the model's parameters and buffers that a pipeline rank holds, all names of tied ones.

    Those that its stages use, so a tied one may be on several ranks; what no stage uses is with stage 0.
    """
    targets = {each.name: each.target for each in placeholders if each.kind in ("parameter", "buffer")}
    first = {targets[name]: stage for name, stage in staged.stage_of.items() if name in targets}
    read = {name for stage in staged.stages.values() for name in (*_starts(stage), *stage.begin_takes)}
    read |= read_by_totals(staged, read)
    taken = {targets[name] for name in read if name in targets}
    tied: dict[int, list[str]] = {}
    for slot in slots(model):
        tied.setdefault(id(slot.value), []).append(slot.name)
    found: set[str] = set()
    for names in tied.values():
        stage = min((first[each] for each in names if each in first), default=0)
        if schedule.rank_of[stage] == rank or not taken.isdisjoint(names):
            found.update(names)
    return frozenset(found)


def read_by_totals(staged: StagedPrograms, read: Collection[str]) -> set[str]:
    """Return what the sums take that stages which read `read` need: all of them, where they need one."""
    totals = {name for each in staged.totals for name in each.names}
    if totals.isdisjoint(read):
        return set()
    return {name for each in staged.totals for name in each.takes} - totals


def _starts(stage: StageProgram) -> Iterable[str]:
    items = (*stage.takes, *stage.backward_takes, *stage.weights_takes)
    return (item.name for item in items if item.kind == "start")
