"""One pipeline stage: its compiled programs, what its micro-batches keep between them, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.ir.schedule import Kind
from autopar.runtime.staged_program import Item, StageProgram

Compile = Callable[[fx.GraphModule], Callable[[list[Any]], Sequence[Any]]]
"""Compiles a program to a function of one list, which it empties."""

Lookup = Callable[[str, int], torch.Tensor]
"""The tensor of a start, by its operator's name, for a micro-batch."""


@dataclass
class Made:
    """What one action made."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    mutations: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """One program, compiled."""

    run: Callable[[list[Any]], Sequence[Any]]
    takes: Sequence[Item]
    gives: Sequence[Item]
    later: frozenset[str]
    """Values that programs after it read."""

    passed: frozenset[str]
    """Gradients that are arguments as they are."""

    last: bool


class StageRun:
    """A stage of this rank, during one step."""

    def __init__(self, program: StageProgram, compile_boxed: Compile, *, backward: bool) -> None:
        self.stage = program.stage
        given: dict[Kind, tuple[fx.GraphModule, Sequence[Item], Sequence[Item]]]
        given = {"F": (program.forward, program.takes, program.gives)}
        if backward and program.backward is not None:
            given["I"] = program.backward, program.backward_takes, program.backward_gives
        if backward and program.weights is not None:
            given["W"] = program.weights, program.weights_takes, program.weights_gives
        parts: list[_Part] = []
        for gm, takes, gives in reversed(given.values()):
            after = [each.name for part in parts for each in part.takes if each.kind == "value"]
            part = _Part(compile_boxed(gm), takes, gives, frozenset(after), _passed(gm, gives), last=not parts)
            parts.insert(0, part)
        by_kind: dict[Kind, Sequence[_Part]] = {kind: [part] for kind, part in zip(given, parts, strict=True)}
        self._parts: Mapping[Kind, Sequence[_Part]] = {**by_kind, "B": parts[1:]}
        self.starts = {each.name for part in parts for each in part.takes if each.kind == "start"}
        self.mutated = {each.name for each in program.gives if each.kind == "mutation"}
        self.trained = list(dict.fromkeys(e.name for part in parts for e in part.gives if e.kind == "gradient"))
        finish = program.finish if backward else None
        self._finish = None if finish is None else compile_boxed(finish)
        self._finish_names = (program.finish_takes, program.finish_gives)
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Forget what a step that failed left behind."""
        self._kept.clear()
        self._sums.clear()

    def keep(self, microbatch: int, name: str, value: torch.Tensor) -> None:
        """Keep a value of another stage until the last of this one's programs that reads it runs."""
        self._kept.setdefault(microbatch, {})[name] = value

    def run(self, kind: Kind, microbatch: int, lookup: Lookup, tangent: torch.Tensor | None) -> Made:
        """Run an action on what is kept of a micro-batch, and keep what its later ones need."""
        made = Made()
        for part in self._parts.get(kind, ()):
            self._run(part, microbatch, lookup, tangent, made)
        return made

    def _run(self, part: _Part, microbatch: int, lookup: Lookup, tangent: torch.Tensor | None, made: Made) -> None:
        kept = self._kept.setdefault(microbatch, {})
        args: list[Any] = []
        for item in part.takes:
            if item.kind == "start":
                args.append(lookup(item.name, microbatch))
            elif item.kind == "tangent":
                args.append(tangent)
            else:
                args.append(kept[item.name])
        # From here on only the list holds what no later program reads; the program empties it.
        self._kept[microbatch] = kept = {name: value for name, value in kept.items() if name in part.later}
        results = part.run(args)
        shared: set[int] = set()
        for item, result in zip(part.gives, results, strict=True):
            if item.kind == "value":
                made.values[item.name] = result
                shared.add(storage_key(result))
                if item.name in part.later:
                    kept[item.name] = result
            elif item.kind == "output":
                made.outputs[item.name] = result
            elif item.kind == "mutation":
                made.mutations[item.name] = result
        for item, result in zip(part.gives, results, strict=True):
            if item.kind == "gradient" and result is not None:
                made.gradients[item.name] = result
        self._own(made.gradients, part.passed, shared)
        if part.last:
            del self._kept[microbatch]

    def _own(self, gradients: dict[str, torch.Tensor], passed: frozenset[str], shared: set[int]) -> None:
        """Copy gradients that sums cannot be written into: part of something larger, or seen elsewhere too."""
        for name, value in gradients.items():
            if name in self._sums:
                continue
            key = storage_key(value)
            if name in passed or key in shared or value.untyped_storage().nbytes() != value.nbytes:
                gradients[name] = value.clone(memory_format=torch.contiguous_format)
            shared.add(key)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a micro-batch's gradient to the sum, in place."""
        held = self._sums.get(name)
        if held is None:
            self._sums[name] = gradient
        else:
            held.add_(gradient)

    def finished(self) -> dict[str, torch.Tensor]:
        """Return the step's gradients in their parameters' layout, which this stage then no longer holds."""
        sums, self._sums = self._sums, {}
        if self._finish is None:
            return sums
        takes, gives = self._finish_names
        args = [sums.pop(name) for name in takes]
        sums.update(zip(gives, self._finish(args), strict=True))
        return sums


def _passed(gm: fx.GraphModule, gives: Sequence[Item]) -> frozenset[str]:
    (output,) = gm.graph.find_nodes(op="output")
    results = output.args[0]
    return frozenset(
        item.name
        for item, node in zip(gives, results, strict=True)
        if item.kind == "gradient" and isinstance(node, fx.Node) and node.op == "placeholder"
    )
