"""What each block of a solved program holds of one micro-batch: what it saves for backward, and what lives besides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from autopar.costs.liveness import gradients_of, lives, lives_of_step, local_bytes
from autopar.costs.outcome import Outcome
from autopar.costs.timing import pairs
from autopar.ir.graph import Graph, Op
from autopar.ir.roles import base_of
from autopar.ir.table import Floats


@dataclass(frozen=True, slots=True)
class _Held:
    """A value in its own memory, or a redistributed copy of one: positions, both inclusive."""

    block: int
    first: int
    last: int
    bytes: float
    value: tuple[str, int] | None = None
    """Operator and output of a value; `None` of a copy."""


@dataclass
class BlockMemory:
    """The blocks of a program, and what they hold of one micro-batch on one stage's mesh.

    A value that is read in another layout is there until the last that reads it as it is, and the copy up to the last
    reader of that. What is gathered again for backward is the value's own part between the two.
    """

    outcome: Outcome
    of: Mapping[str, int]
    """The block of every operator."""

    count: int
    _graph: Graph = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._graph = self.outcome.graph

    def saved(self) -> list[float]:
        """Return the bytes that each block saves for backward."""
        found = [0.0] * self.count
        for held in (*self._values, *self._copies):
            found[held.block] += held.bytes * self._is_saved(held)
        return found

    def away(self, blocks: int) -> Floats:
        """Return at each position what is in the host's memory of what the first `blocks` blocks save for backward.

        It is from the end of a block's forward to the begin of its backward; what is on its way is taken to be in no
        device's memory.
        """
        ops, steps = self._graph.ops, np.zeros(len(self._graph.ops) + 2)
        last, first = [0] * self.count, [len(ops)] * self.count
        for at, op in enumerate(ops):
            if op.kind == "call" and op.phase == "forward":
                last[self.of[op.name]] = at
            elif op.kind == "call":
                first[self.of[op.name]] = min(at, first[self.of[op.name]])
        for held in (*self._values, *self._copies):
            if held.block < blocks and self._is_saved(held):
                steps[max(held.first, last[held.block]) + 1] += held.bytes
                steps[max(held.first + 1, min(held.last, first[held.block]))] -= held.bytes
        return np.asarray(np.cumsum(steps)[: len(ops) + 1], dtype=np.float64)

    def kept(self, apart: Collection[str]) -> list[float]:
        """Return the bytes that wait for weight gradients `apart`, of forward or of the input gradients."""
        found, awaited = [0.0] * self.count, self._awaited(apart)
        for held in (*self._values, *self._copies):
            found[held.block] += held.bytes * self._waits(held, apart, awaited)
        return found

    def temporary(self, apart: Collection[str]) -> list[float]:
        """Return the most that each block holds at once beyond what it saves for backward, sums left out.

        A gradient is there for the moment in which it is added to its sum, unless what makes it adds it. Backward lets
        go of what forward saved as it goes, but of what weight gradients that come later (`apart`) wait for.
        """
        awaited, end = self._awaited(apart), len(self._graph.ops)
        steps: list[dict[int, float]] = [{} for _ in range(self.count)]

        def hold(block: int, first: int, last: int, size: float) -> None:
            mine = steps[block]
            mine[first] = mine.get(first, 0.0) + size
            mine[last + 1] = mine.get(last + 1, 0.0) - size

        for held in (*self._moments, *self._copies):
            waits = self._is_saved(held) and self._waits(held, apart, awaited)
            hold(held.block, held.first, end if waits else held.last, held.bytes)
        for at, op in enumerate(self._graph.ops):
            working = self.outcome.pricing.holdings.workspace(at)
            if working is not None:
                hold(self.of[op.name], at, at, float(working[1][self.outcome.options[working[0]]]))
        peaks = (max(accumulate(mine[at] for at in sorted(mine)), default=0.0) for mine in steps)
        return [max(0.0, peak - own) for peak, own in zip(peaks, self.saved(), strict=True)]

    @cached_property
    def _values(self) -> list[_Held]:
        """Return what operators make, and until when its own memory is read."""
        found = []
        for life in lives(self._graph):
            size = life.share * self._bytes(life.op, life.index)
            if size:
                value = (life.op, life.index)
                until = min(life.last, max(life.first, self.outcome.needed_until.get(value, life.last)))
                found.append(_Held(self.of[life.op], life.first, until, size, value))
        return found

    @cached_property
    def _moments(self) -> list[_Held]:
        """Return the same without sums over micro-batches, which are held throughout."""
        until: dict[tuple[str, int] | None, int] = {}
        for held in self._values:
            until[held.value] = max(held.last, until.get(held.value, 0))
        found = []
        for life in lives_of_step(self._graph, accumulates=True):
            size = life.share * self._bytes(life.op, life.index)
            if life.first > 0 and size and not self._joins_stages(self._graph.by_name[life.op]):
                value = (life.op, life.index)
                last = min(life.last, max(life.first, until.get(value, life.last)))
                found.append(_Held(self.of[life.op], life.first, last, size, value))
        return found

    @cached_property
    def _copies(self) -> list[_Held]:
        """Return the copies of values that each micro-batch has; those of parameters and gradients are other bytes."""
        table, end = self.outcome.pricing.table, len(self._graph.ops)
        found = []
        for group, copy in zip(table.groups, self.outcome.pricing.holdings.copies, strict=True):
            if group.category != "critical" or copy.of_parameter:
                continue
            chosen = pairs(group, self.outcome.options)
            of_copies = [(first, first, last) for first, last in copy.lives]
            for sizes, moments in ((copy.bytes, of_copies), *((each.bytes, each.lives) for each in copy.beside)):
                size = float(sum(sizes[pair] for pair in chosen))
                for place, first, last in moments if size else ():
                    if first > 0 and last < end:
                        found.append(_Held(self.of[self._graph.ops[place].name], first, last, size))
        return found

    def _bytes(self, name: str, index: int) -> float:
        """Return what an operator's output takes; parameters and inputs are other bytes."""
        op = self._graph.by_name[name]
        meta = op.outputs[index]
        if op.kind != "call" or meta is None:
            return 0.0
        layout = self.outcome.strategy(self._graph.representative(name)).outputs[index]
        return local_bytes(meta, layout, self.outcome.links.sizes)

    def _awaited(self, apart: Collection[str]) -> set[tuple[str, int]]:
        """Return the values that weight gradients `apart` read as they are."""
        base, needed, end = base_of(self._graph), self.outcome.needed_until, len(self._graph.ops)
        found = set()
        for name in apart:
            for ref in self._graph.by_name[name].refs:
                value = base[ref.op, ref.index]
                if self._graph.position[name] <= needed.get(value, end):
                    found.add(value)
        return found

    def _waits(self, held: _Held, apart: Collection[str], awaited: Collection[tuple[str, int]]) -> bool:
        """Return whether something is held for weight gradients `apart`, made by others than they."""
        if held.value is not None:
            return held.value in awaited and held.value[0] not in apart
        ops = self._graph.ops
        return ops[held.last].name in apart and ops[held.first].name not in apart

    def _joins_stages(self, op: Op) -> bool:
        """Return whether an operator adds up the gradients that two blocks have of one parameter: each has its own."""
        made = [self.of[ref.op] for ref in op.refs if self._graph.by_name[ref.op].kind == "call"]
        return (op.name, 0) in gradients_of(self._graph) and any(at != self.of[op.name] for at in made)

    def _is_saved(self, held: _Held) -> bool:
        """Return whether forward keeps it for backward."""
        ops = self._graph.ops
        return ops[held.first].phase == "forward" and held.last < len(ops) and ops[held.last].phase == "backward"
