"""One step of a pipeline rank: its actions in order, with the messages, sums and outputs that belong to them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import local_of
from autopar.ir.schedule import Action
from autopar.ir.timeline import COMPUTE_STREAM, Event
from autopar.runtime.borrowing import Loans
from autopar.runtime.errors import group_lost
from autopar.runtime.joining import JOIN
from autopar.runtime.messages import Mailbox
from autopar.runtime.pipeline_outputs import Outputs
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.placing import Room
from autopar.runtime.program import Seeding
from autopar.runtime.routes import Message, Routes
from autopar.runtime.seeds import Seeds, microbatch_seed
from autopar.runtime.stage_run import Made, StageRun
from autopar.runtime.step import restrided


@dataclass(frozen=True)
class Way:
    """One way through the schedule, with backward or forward only."""

    routes: Routes
    stages: Mapping[int, StageRun]
    trains: bool


@dataclass(frozen=True)
class Input:
    """How a micro-batch gets its part of an input."""

    index: int
    """Among the call's tensors."""

    rows: int | None
    """Of dimension 0 for each micro-batch; `None`: each gets all."""

    strides: tuple[int, ...] | None
    """That the programs were made for; `None`: any."""


@dataclass(frozen=True)
class Totals:
    """What is summed over micro-batches before any runs."""

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    takes: Sequence[str]
    names: Sequence[str]
    reduces: Sequence[str]


@dataclass(frozen=True)
class Tied:
    """A parameter of several pipeline ranks, this one among them."""

    name: str
    group: Any
    peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a step finds what its programs take, and where its results go."""

    microbatches: int
    at_once: int
    """Micro-batches that an action runs: the schedule counts these as one."""

    inputs: Mapping[str, Input]
    tables: Mapping[str, tuple[dict[str, Any], str]]
    """Parameters and buffers: the module's table and the key in it."""

    rooms: Mapping[str, Room]
    """Of padded parameters that do not fill theirs."""

    constants: Mapping[str, torch.Tensor]
    totals: Sequence[Totals]
    """In turn: one may take the sums of those before it."""

    seeding: Seeding | None
    seeds: Seeds | None
    outputs: Outputs
    tied: Sequence[Tied]
    graded_inputs: Sequence[str]
    one: torch.Tensor | None
    """The tangent of the loss."""

    joined: Mapping[str, str] = field(default_factory=dict)
    """Buffers whose new value is made of what micro-batches give for it, and by which reduction."""

    loans: Loans = field(default_factory=Loans)
    """What evaluation takes of other pipeline ranks, or gives them."""


class Step:
    """Runs one step."""

    def __init__(self, way: Way, sources: Sources, pipeline: PipelineRanks, tensors: Sequence[torch.Tensor]) -> None:
        self._way = way
        self._sources = sources
        self._pipeline = pipeline
        self._tensors = tensors
        self._totals: dict[str, torch.Tensor] = {}
        self._borrowed: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._mutations: dict[str, tuple[int, torch.Tensor]] = {}
        """New values of buffers, each with the stage that made it: others may make the same."""

        self.action: Action | None = None
        """What it does, for messages about what stopped it."""

        self.events: list[Event] = []
        """When it computed what, by `time.perf_counter`; the rest of the step it waited, or was about messages."""

        left = Counter(action.stage for action in way.routes.row if action.kind != "F")
        self._left = left

    def run(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Return the user outputs, and the gradients of this rank's parameters and of inputs by operator name.

        Raises:
            PeerLostError: another rank stopped.
        """
        sources, routes = self._sources, self._way.routes
        for stage in self._way.stages.values():
            stage.reset()
        sources.outputs.begin(trains=self._way.trains)
        seed = None if sources.seeds is None else sources.seeds.draw()
        self._borrow()
        self._add_up()
        for stage in self._way.stages.values():
            stage.begin(self._lookup)  # before anything is waited for from other stages
        mailbox = Mailbox(routes, self._pipeline)
        for position, action in enumerate(routes.row):
            self.action = action
            mailbox.receive(position, self._deliver)
            start_s = time.perf_counter()
            with self._seeded(seed, action.microbatch):
                made = self._way.stages[action.stage].run(action.kind, action.microbatch, self._lookup, sources.one)
            mailbox.send(position, made.values)
            for transfer in routes.handed[position]:
                self._way.stages[transfer.target].keep(action.microbatch, transfer.value, made.values[transfer.value])
            self._take(action, made)
            del made  # what nobody keeps is gone before the next action computes
            self.events.append(Event(self._pipeline.index, COMPUTE_STREAM, action, start_s, time.perf_counter()))
        self.action = None
        for stage in self._way.stages.values():
            stage.reset()
        self._mutate()
        outputs = sources.outputs.whole()
        self._sum_ties()
        self._sum_inputs()
        mailbox.finish()
        return outputs, self._gradients

    def _deliver(self, message: Message, tensor: torch.Tensor) -> None:
        stage = self._way.stages[message.target.stage]
        stage.keep(message.target.microbatch, message.transfer.value, tensor)

    def _seeded(self, seed: int | None, microbatch: int) -> AbstractContextManager[None]:
        if seed is None or self._sources.seeding is None:
            return nullcontext()
        first = microbatch * self._sources.at_once
        second = microbatch_seed(seed, first + 1) if self._sources.at_once > 1 else None
        return self._sources.seeding.step_seed(microbatch_seed(seed, first), seed, second)

    def _lookup(self, name: str, microbatch: int) -> torch.Tensor:
        """Return a start: the micro-batch's part of an input, or what all micro-batches share."""
        sources = self._sources
        found = sources.inputs.get(name)
        if found is None:
            if name in self._totals:
                return self._totals[name]
            if name in sources.constants:
                return sources.constants[name]
            return self._held(name)
        tensor = local_of(self._tensors[found.index])
        if found.rows is not None:
            tensor = tensor.narrow(0, microbatch * found.rows, found.rows)
        if found.strides is None or tensor.stride() == found.strides:
            return tensor
        return restrided(tensor, found.strides)

    def _held(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer as programs take it."""
        if name in self._borrowed:
            return self._borrowed[name]
        table, key = self._sources.tables[name]
        room = self._sources.rooms.get(name)
        return local_of(table[key]) if room is None else room.around(local_of(table[key]))

    def _borrow(self) -> None:
        """Get what this step needs of other pipeline ranks, and give them what they need."""
        if self._way.trains:
            self._pipeline.lent.clear()
        else:
            self._borrowed = self._sources.loans.borrow(self._held, self._pipeline)

    def _add_up(self) -> None:
        for totals in self._sources.totals:
            for microbatch in range(self._sources.microbatches):
                made = totals.run([self._lookup(name, microbatch) for name in totals.takes])
                for name, reduce, term in zip(totals.names, totals.reduces, made, strict=True):
                    held = self._totals.get(name)
                    self._totals[name] = term if held is None else JOIN[reduce](held, term)

    def _take(self, action: Action, made: Made) -> None:
        """Put away what an action made for the model and its user."""
        sources = self._sources
        first = action.microbatch * sources.at_once
        for turn, outputs in made.outputs.items():
            sources.outputs.add(first + turn, outputs)
        for (name, _), new in made.mutations.items():
            maker, held = self._mutations.get(name, (action.stage, None))
            if maker == action.stage:
                how = sources.joined.get(name)
                self._mutations[name] = maker, new if held is None or how is None else JOIN[how](held, new)
        stage = self._way.stages[action.stage]
        for (name, turn), gradient in made.gradients.items():
            if name in sources.inputs:
                self._add_input(name, first + turn, gradient)
            else:
                stage.add(name, gradient)
        if action.kind == "F":
            return
        self._left[action.stage] -= 1
        if not self._left[action.stage]:
            for name, gradient in stage.finished().items():
                held = self._gradients.get(name)
                self._gradients[name] = gradient if held is None else held + gradient

    def _mutate(self) -> None:
        """Give buffers their new values, once: every micro-batch reads what they were when the step began."""
        loans = self._sources.loans
        made = {name: new for name, (_, new) in self._mutations.items()}
        for name, new in made.items():
            if name in self._sources.tables:
                self._put(name, new)
            elif name not in loans.returned:
                raise RuntimeError(f"{name} has a new value here, which no rank takes: a fault of this compiler")
        loans.give_back(made, self._put, self._pipeline)

    def _put(self, name: str, new: torch.Tensor) -> None:
        table, key = self._sources.tables[name]
        local_of(table[key]).copy_(new)

    def _add_input(self, name: str, microbatch: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of an input, of which a micro-batch may have its rows."""
        found = self._sources.inputs[name]
        held = self._input_sum(name)
        (held if found.rows is None else held.narrow(0, microbatch * found.rows, found.rows)).add_(gradient)

    def _input_sum(self, name: str) -> torch.Tensor:
        if name not in self._gradients:
            tensor = local_of(self._tensors[self._sources.inputs[name].index])
            self._gradients[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        return self._gradients[name]

    def _sum_ties(self) -> None:
        """Sum tied parameters' gradients over pipeline ranks: equal bits on all, so that their values stay equal."""
        if self._sources.one is None or not self._left:
            return
        for tie in self._sources.tied:
            mine = self._gradients.get(tie.name)
            if mine is None:
                mine = torch.zeros_like(self._held(tie.name))
            mine = mine.contiguous()
            self._reduce(mine, tie.group, f"sum of the gradients of {tie.name} over its stages", tie.peers)
            self._gradients[tie.name] = mine

    def _sum_inputs(self) -> None:
        """Give all ranks the gradients of inputs, which are on all ranks, from the stages that read them."""
        if self._pipeline.depth == 1 or not self._left:
            return
        peers = tuple(self._pipeline.rank_at(each) for each in range(self._pipeline.depth))
        for name in self._sources.graded_inputs:
            self._reduce(self._input_sum(name), self._pipeline.line, f"sum of the gradients of input {name}", peers)

    def _reduce(self, tensor: torch.Tensor, group: Any, doing: str, peers: Sequence[int]) -> None:
        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            others = [each for each in peers if each != self._pipeline.ranks.rank]
            raise group_lost(doing, others, str(error)) from error
