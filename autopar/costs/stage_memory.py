"""What the ranks of a pipeline hold, as a function of the decisions, under an assumed cut into stages.

The search inside a stage's mesh decides for all stages at once, before they are cut. Each moment of the program is one
of the rank whose stage runs then: that rank holds its own parameters, what its stages saved for the micro-batches in
flight, and what is alive just then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.costs.liveness import CopyLife, Holdings, Life, local_bytes
from autopar.costs.segments import weight
from autopar.ir.graph import Graph
from autopar.ir.stages import stage_of, units
from autopar.ir.table import Floats, MemoryRow


@dataclass(frozen=True)
class Split:
    """An assumed cut."""

    stage_of: Mapping[str, int]
    """Stage of every operator, parameter and input."""

    rank_of: tuple[int, ...]
    """Pipeline rank of each stage."""

    in_flight: tuple[int, ...]
    """Micro-batches of which each stage holds what it saved for backward, at most."""

    def rank(self, name: str) -> int:
        """Return the pipeline rank that an operator runs on."""
        return self.rank_of[self.stage_of[name]]


def even_split(graph: Graph, rank_of: Sequence[int], in_flight: Sequence[int]) -> Split:
    """Return the cut into stages of about equal work, by blocks.

    Raises:
        InfeasibleError: more stages than blocks.
    """
    stages = len(rank_of)
    found = units(graph)
    works = np.array([sum(weight(graph, graph.by_name[name]) for name in unit.ops) for unit in found])
    middle = (np.cumsum(works) - works / 2) / max(works.sum(), 1e-30)
    blocks: list[list[str]] = [[] for _ in range(stages)]
    at = 0
    for place, unit in enumerate(found):
        left = len(found) - place
        wanted = min(stages - 1, int(middle[place] * stages))
        # Every stage gets a block, and no stage is passed over.
        if blocks[at] and (wanted > at or left <= stages - 1 - at):
            at = min(at + 1, stages - 1)
        blocks[at].append(unit.path)
    return Split(stage_of(graph, blocks), tuple(rank_of), tuple(in_flight))


@dataclass
class StageHoldings:
    """Memory of one program's pipeline ranks, by position; see `Holdings` for that of one that runs whole."""

    whole: Holdings
    split: Split

    def __post_init__(self) -> None:
        graph, split = self.whole.graph, self.split
        self._ranks = max(split.rank_of) + 1
        ends = [*(split.rank(op.name) for op in graph.ops), 0]
        self._rank_at = np.array(ends)
        self._resting: list[dict[int, Floats]] = [{} for _ in range(self._ranks)]
        counts = Counter((split.rank(op.name), graph.representative(op.name)) for op in graph.ops)
        for (rank, rep), count in counts.items():
            node = self.whole.home[rep]
            if graph.by_name[rep].kind in {"parameter", "buffer"}:
                mine = self._resting[rank]
                mine[node] = mine.get(node, 0.0) + count * self.whole.resting_bytes(node)

    @cached_property
    def _lives(self) -> list[tuple[Life, tuple[str, int], int | None, int]]:
        """Return each life, what it is an instance of, the one rank that holds it (None: any), and its weight beside.

        The weight is of other micro-batches' values that the rank holds throughout.
        """
        graph, end = self.whole.graph, len(self.whole.graph.ops)
        found = []
        for life in self.whole.lives:
            op = graph.by_name[life.op]
            late = life.last < end and graph.ops[life.last].phase == "backward"
            saved = op.kind == "call" and op.phase == "forward" and late
            own = saved or life.last >= end
            beside = self.split.in_flight[self.split.stage_of[life.op]] - 1 if saved else 0
            rank = self.split.rank(life.op) if own else None
            found.append((life, (graph.representative(life.op), life.index), rank, beside))
        return found

    def _copy_lives(self, copy: CopyLife) -> list[tuple[int, int, int, int]]:
        """Return first and last position, rank and weight beside of each instance of a redistributed copy."""
        graph = self.whole.graph
        found = []
        for first, last in copy.early or copy.lives:
            stage = self.split.stage_of[graph.ops[min(first, len(graph.ops) - 1)].name]
            crosses = graph.ops[first].phase == "forward" and last < len(graph.ops)
            saved = crosses and graph.ops[last].phase == "backward" and not copy.of_parameter
            beside = self.split.in_flight[stage] - 1 if saved else 0
            found.append((first, last, self.split.rank_of[stage], beside))
        return found

    def _rank_of(self, place: int) -> int:
        return int(self._rank_at[min(place, len(self.whole.graph.ops) - 1)])

    def row(self, at: int) -> MemoryRow:
        """Return what the rank that runs the operator at position `at` holds then."""
        rank = int(self._rank_at[at])
        alive: dict[tuple[str, int], float] = defaultdict(float)
        for life, rep, own, beside in self._lives:
            if own is None or own == rank:
                count = (life.first <= at <= life.last) + beside
                if count:
                    alive[rep] += life.share * count
        nodes = {node: held.copy() for node, held in self._resting[rank].items()}
        for (rep_name, index), times in alive.items():
            node = self.whole.home[rep_name]
            held = times * self.whole.value_bytes(rep_name, index)
            nodes[node] = nodes[node] + held if node in nodes else held
        groups: dict[int, Floats] = {}
        for number, copy in enumerate(self.whole.copies):
            held = np.zeros_like(copy.bytes)
            if copy.bytes.any():
                held = copy.bytes * sum(
                    (first <= at <= last) + beside for first, last, own, beside in self._copy_lives(copy) if own == rank
                )
            for more in copy.beside:
                held = held + more.bytes * sum(
                    first <= at <= last for place, first, last in more.lives if self._rank_of(place) == rank
                )
            if held.any():
                groups[number] = held
        return MemoryRow(at, self.whole.reserved_bytes, nodes, groups)

    def curve(self, options: Sequence[int], copies: Sequence[set[tuple[int, int]]]) -> Floats:
        """Return what the rank that runs holds at each position."""
        whole = self.whole
        count = len(whole.graph.ops)
        shared, own = np.zeros(count + 2), np.zeros((self._ranks, count + 2))
        for rank, mine in enumerate(self._resting):
            own[rank, 0] = whole.reserved_bytes + sum(held[options[node]] for node, held in mine.items())
        size: dict[tuple[str, int], float] = {}
        for life, rep, holder, beside in self._lives:
            if rep not in size:
                node = whole.home[rep[0]]
                layout = whole.clusters[node].strategy(rep[0], options[node]).outputs[rep[1]]
                meta = whole.graph.by_name[rep[0]].outputs[rep[1]]
                size[rep] = local_bytes(meta, layout, whole.sizes) if meta is not None else 0.0
            steps, held = shared if holder is None else own[holder], life.share * size[rep]
            steps[life.first] += held
            steps[life.last + 1] -= held
            if beside and holder is not None:
                own[holder, 0] += beside * held
        for copy, pairs in zip(whole.copies, copies, strict=True):
            held = sum(copy.bytes[pair] for pair in pairs)
            for first, last, rank, beside in self._copy_lives(copy) if held else ():
                own[rank, first] += held
                own[rank, last + 1] -= held
                own[rank, 0] += beside * held
            for more in copy.beside:
                held = sum(more.bytes[pair] for pair in pairs)
                for place, first, last in more.lives if held else ():
                    own[self._rank_of(place), first] += held
                    own[self._rank_of(place), last + 1] -= held
        now = np.cumsum(shared)[: count + 1] + np.cumsum(own, axis=1)[self._rank_at, np.arange(count + 1)]
        return np.asarray(now, dtype=np.float64)
