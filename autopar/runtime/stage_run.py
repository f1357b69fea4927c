"""One pipeline stage: its compiled programs, what its micro-batches keep between them, and its gradients.

Gradients of parameters are added up where a program makes them, so that at most one at a time is there beside the sums;
the last micro-batch's addition lets the sum's reduction begin.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.ir.schedule import Kind
from autopar.runtime.finishing import Finishing
from autopar.runtime.staged_program import Item, StageProgram
from autopar.runtime.summing import Summing, summing

CPU = torch.device("cpu")

Take = Callable[[torch.Tensor], None]

Compile = Callable[[fx.GraphModule, Mapping[int, Take]], Callable[[list[Any]], Sequence[Any]]]
"""Compiles a program to a function of one list, which it empties; results at the places given go to who takes them."""

Of = tuple[str, int]
"""A name, and which of the micro-batches that an action runs it is of."""

Lookup = Callable[[str, int], torch.Tensor]
"""The tensor of a start, by its operator's name, for a micro-batch."""


@dataclass
class Made:
    """What one action made."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Of each of the micro-batches that an action runs."""

    mutations: dict[Of, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Of, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """One program, compiled."""

    run: Callable[[list[Any]], Sequence[Any]]
    takes: Sequence[Item]
    gives: Sequence[Item]
    later: frozenset[str]
    """Values that programs after it read."""

    passed: frozenset[Of]
    """Gradients that are arguments as they are."""

    summed: frozenset[str]
    """Gradients that are added to their sums as soon as they are made."""

    summing: Summing | None
    """How the program adds to sums that it takes."""

    last: bool


class StageRun:
    """A stage of this rank, during one step."""

    def __init__(
        self,
        program: StageProgram,
        compile_boxed: Compile,
        *,
        backward: bool,
        actions: int = 0,
        at_once: int = 1,
        device: torch.device = CPU,
    ) -> None:
        """Compile a stage's programs, whose actions each run micro-batches `at_once`.

        With `actions`, the sums of what so many of them give are reduced as soon as they are complete.
        """
        self.stage = program.stage
        self._at_once = at_once
        self._terms: Counter[str] = Counter()
        self._device = device
        given: dict[Kind, tuple[fx.GraphModule, Sequence[Item], Sequence[Item]]]
        given = {"F": (program.forward, program.takes, program.gives)}
        if backward and program.backward is not None:
            given["I"] = program.backward, program.backward_takes, program.backward_gives
        if backward and program.weights is not None:
            given["W"] = program.weights, program.weights_takes, program.weights_gives
        parts: list[_Part] = []
        finish_takes = frozenset(program.finish_takes)
        for gm, takes, gives in reversed(given.values()):
            after = [each.name for part in parts for each in part.takes if each.kind == "value"]
            summed = {at: e.name for at, e in enumerate(gives) if e.kind == "gradient" and e.name in finish_takes}
            self._terms.update({name: actions * count for name, count in Counter(summed.values()).items()})
            adding = summing(gm, summed) if actions * at_once > 1 and summed else None
            taken: dict[int, Take] = {
                at: functools.partial(self._count if adding is not None and name in adding.like else self.add, name)
                for at, name in summed.items()
            }
            run = compile_boxed(gm if adding is None else adding.program, taken)
            passed = _passed(gm, gives)
            names = frozenset(summed.values())
            part = _Part(run, takes, gives, frozenset(after), passed, names, adding, last=not parts)
            parts.insert(0, part)
        by_kind: dict[Kind, Sequence[_Part]] = {kind: [part] for kind, part in zip(given, parts, strict=True)}
        self._parts: Mapping[Kind, Sequence[_Part]] = {**by_kind, "B": parts[1:]}
        self._begin = None if program.begin is None else compile_boxed(program.begin, {})
        self._begin_names = (program.begin_takes, program.begin_gives)
        self._whole: dict[str, torch.Tensor] = {}
        taken_starts = {each.name for part in parts for each in part.takes if each.kind == "start"}
        self.starts = (taken_starts - {*program.begin_gives}) | {*program.begin_takes}
        self.mutated = {each.name for each in program.gives if each.kind == "mutation"}
        self.trained = list(dict.fromkeys(e.name for part in parts for e in part.gives if e.kind == "gradient"))
        finish = program.finish if backward else None
        self._finishing = None
        if finish is not None:
            self._finishing = Finishing(
                finish, program.finish_takes, program.finish_gives, lambda gm: compile_boxed(gm, {})
            )
        self._added: Counter[str] = Counter()
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Forget what a step, or one that failed, left behind."""
        self._kept.clear()
        self._whole.clear()
        self._sums.clear()
        self._added.clear()
        if self._finishing is not None:
            self._finishing.reset()

    def keep(self, microbatch: int, name: str, value: torch.Tensor) -> None:
        """Keep a value of another stage until the last of this one's programs that reads it runs."""
        self._kept.setdefault(microbatch, {})[name] = value

    def begin(self, lookup: Lookup) -> None:
        """Issue the gathers of parameters that stay whole for all micro-batches."""
        if self._begin is not None:
            takes, gives = self._begin_names
            self._whole.update(zip(gives, self._begin([lookup(name, 0) for name in takes]), strict=True))

    def run(self, kind: Kind, microbatch: int, lookup: Lookup, tangent: torch.Tensor | None) -> Made:
        """Run an action on what is kept of a micro-batch, and keep what its later ones need."""
        made = Made()
        for part in self._parts.get(kind, ()):
            self._run(part, microbatch, lookup, tangent, made)
        return made

    def _run(self, part: _Part, microbatch: int, lookup: Lookup, tangent: torch.Tensor | None, made: Made) -> None:
        kept = self._kept.setdefault(microbatch, {})
        adding = part.summing
        args: list[Any] = [] if adding is None else [self._sum(name, adding) for name in adding.like]
        for item in part.takes:
            if item.kind == "start":
                whole = self._whole.get(item.name)
                args.append(lookup(item.name, microbatch * self._at_once + item.turn) if whole is None else whole)
            elif item.kind == "tangent":
                args.append(tangent)
            else:
                args.append(kept[item.name])
        # From here on only the list holds what no later program reads; the program empties it.
        self._kept[microbatch] = kept = {name: value for name, value in kept.items() if name in part.later}
        new = part.summed - self._sums.keys()
        results = part.run(args)
        shared: set[int] = set()
        for item, result in zip(part.gives, results, strict=True):
            if item.kind == "value":
                made.values[item.name] = result
                shared.add(storage_key(result))
                if item.name in part.later:
                    kept[item.name] = result
            elif item.kind == "output":
                made.outputs.setdefault(item.turn, {})[item.name] = result
            elif item.kind == "mutation":
                made.mutations[item.name, item.turn] = result
        for item, result in zip(part.gives, results, strict=True):
            if item.kind == "gradient" and result is not None:
                made.gradients[item.name, item.turn] = result
        first = {name: (name, 0) for name in sorted(new & self._sums.keys())}
        _own(self._sums, first, part.passed, shared)
        rest = {each: each for each in made.gradients if each[0] not in self._sums}
        _own(made.gradients, rest, part.passed, shared)
        if part.last:
            del self._kept[microbatch]

    def _sum(self, name: str, made_by: Summing) -> torch.Tensor:
        if name not in self._sums:
            self._sums[name] = made_by.zeros(name, self._device)
        return self._sums[name]

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a micro-batch's gradient to the sum, in place."""
        held = self._sums.get(name)
        if held is None:
            self._sums[name] = gradient
        else:
            held.add_(gradient)
        self._count(name)

    def _count(self, name: str, _: object = None) -> None:
        """Note that a micro-batch's gradient is in the sum, and let a complete one be reduced."""
        self._added[name] += 1
        # A first gradient may be another's memory until its program ends: see `_own`.
        if self._finishing is not None and self._added[name] == self._terms[name] > 1:
            self._finishing.give(name, self._sums.pop(name))

    def finished(self) -> dict[str, torch.Tensor]:
        """Return the step's gradients in their parameters' layout, which this stage then no longer holds."""
        self._whole.clear()
        sums, self._sums = self._sums, {}
        self._added.clear()
        if self._finishing is None:
            return sums
        for name in self._finishing.takes:
            if name in sums:
                self._finishing.give(name, sums.pop(name))
        return {**sums, **self._finishing.end()}


Key = TypeVar("Key")


def _own(gradients: dict[Key, torch.Tensor], of: Mapping[Key, Of], passed: frozenset[Of], shared: set[int]) -> None:
    """Copy gradients that sums cannot be written into: part of something larger, or seen elsewhere too."""
    for key, name in of.items():
        value = gradients[key]
        memory = storage_key(value)
        if name in passed or memory in shared or value.untyped_storage().nbytes() != value.nbytes:
            gradients[key] = value.clone(memory_format=torch.contiguous_format)
        shared.add(memory)


def _passed(gm: fx.GraphModule, gives: Sequence[Item]) -> frozenset[Of]:
    (output,) = gm.graph.find_nodes(op="output")
    results = output.args[0]
    return frozenset(
        (item.name, item.turn)
        for item, node in zip(gives, results, strict=True)
        if item.kind == "gradient" and isinstance(node, fx.Node) and node.op == "placeholder"
    )
