"""What recomputing each block costs and saves, read from a program in which all blocks are recomputed."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.costs.liveness import local_bytes
from autopar.costs.outcome import Outcome
from autopar.ir.graph import Graph, Ref
from autopar.ir.roles import base_of, is_view, parameter_like


def kept_values(graph: Graph, again: Collection[str]) -> set[tuple[str, int]]:
    """Return what backward, and the operators that run again in it, read of what does not run again: kept until then.

    Of views, what they are views of. What backward makes itself is among these.
    """
    base = base_of(graph)
    found: set[tuple[str, int]] = set()
    for op in graph.ops:
        if op.phase == "backward" or op.name in again:
            found |= {base[ref.op, ref.index] for ref in op.refs if not _is_made_again(graph, ref, again)}
    return found


def _is_made_again(graph: Graph, ref: Ref, again: Collection[str]) -> bool:
    """Return whether a value runs again, or is a view that backward takes of such one."""
    op = graph.by_name[ref.op]
    while op.name not in again and op.phase == "backward" and is_view(op):
        op = graph.by_name[op.refs[0].op]
    return op.name in again


@dataclass(frozen=True)
class Again:
    """A solved program whose blocks are all recomputed, beside the program as it was captured."""

    outcome: Outcome
    plain: Graph
    block: Mapping[str, str]
    """Block of each forward operator that may run again."""

    copy_of: Mapping[str, str]
    """By the name of an operator of the solved program that runs again, the captured operator it repeats."""

    paths: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        """Note the blocks in the order they run."""
        object.__setattr__(self, "paths", list(dict.fromkeys(self.block.values())))

    def seconds(self, again: Collection[str]) -> list[float]:
        """Return what running these operators again takes in one micro-batch, of each block."""
        spent: dict[str, float] = defaultdict(float)
        graph, links = self.outcome.graph, self.outcome.links
        for name, original in self.copy_of.items():
            if original in again:
                spent[self.block[original]] += self.outcome.seconds(graph.representative(name))
        for issued in self.outcome.messages():
            original = self.copy_of.get(issued.at, "")
            if original in again:
                spent[self.block[original]] += links.message_s(issued.message)
        return [spent[path] for path in self.paths]

    def kept_bytes(self, again: Collection[str]) -> list[float]:
        """Return what each block keeps of one micro-batch if these operators run again, and all others do not."""
        graph, solved = self.plain, self.outcome
        gathered = parameter_like(graph)
        held: dict[str, float] = defaultdict(float)
        for name, index in kept_values(graph, again):
            path = self.block.get(name)
            meta = graph.by_name[name].outputs[index]
            if path is None or meta is None or name in gathered:
                continue
            layout = solved.strategy(solved.graph.representative(name)).outputs[index]
            held[path] += local_bytes(meta, layout, solved.links.sizes)
        return [held[path] for path in self.paths]

    @cached_property
    def moments(self) -> list[tuple[float, list[bool]]]:
        """Return what is held at most while the same blocks wait for their backward, and which these are.

        Of a program without stages. A block whose backward runs has its values there in any case.
        """
        graph = self.outcome.graph
        number = {path: at for at, path in enumerate(self.paths)}
        made, used = [0] * len(number), [len(graph.ops)] * len(number)
        for at, op in enumerate(graph.ops):
            original = self.copy_of.get(op.name)
            path = self.block.get(original or op.name)
            if path is None:
                continue
            if original is None:
                made[number[path]] = at
            used[number[path]] = min(used[number[path]], at) if original else used[number[path]]
        curve = self.outcome.memory_curve
        borders = sorted({0, len(curve), *(at + 1 for at in made), *(at for at in used if at < len(curve))})
        found = []
        for start, end in itertools.pairwise(borders):
            waits = [made[at] < start and start < used[at] for at in range(len(number))]
            found.append((float(np.max(curve[start:end])), waits))
        return found
