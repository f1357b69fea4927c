"""Where a solved program is cut into pipeline stages: its blocks priced, cut by `search.cuts`, judged by `simulate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from autopar.api.crossings import Crossings
from autopar.costs.issued import Issued
from autopar.costs.liveness import Life, base_of, gradients_of, lives, lives_of_step, local_bytes
from autopar.costs.optimizer import optimizer_seconds, state_bytes
from autopar.costs.outcome import Outcome
from autopar.ir import stages as blocks
from autopar.ir.graph import Graph, Op
from autopar.ir.pipeline import PipelineCosts
from autopar.ir.plan import Decisions, Estimates, Memory, Schedule, Stage, StageEstimate
from autopar.ir.roles import is_view, parameter_like
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.timeline import Timeline
from autopar.ir.weight_gradients import weight_gradients
from autopar.search.cuts import Cut, NoCut, even_cut, find_cuts, pipeline_costs
from autopar.search.stages import Unit
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate
from autopar.simulate.sharing import shared_cores


@dataclass(frozen=True)
class Wanted:
    """A pipeline as asked for."""

    depth: int
    schedule: str = "1f1b"
    interleave: int = 1
    even: bool = False
    """Whether stages have as many blocks each as can be, instead of the best cut."""

    def schedule_for(self, microbatches: int) -> PipelineSchedule:
        """Return the actions of every pipeline rank."""
        return generate(self.schedule, ranks=self.depth, microbatches=microbatches, interleave=self.interleave)


@dataclass(frozen=True)
class Pipelined:
    """A cut that was simulated."""

    wanted: Wanted
    schedule: PipelineSchedule
    stages: tuple[tuple[str, ...], ...]
    """Paths of the blocks of each stage."""

    costs: PipelineCosts
    timeline: Timeline
    finish_s: tuple[float, ...]
    """Of each pipeline rank, after the last micro-batch: reduction of gradients, and optimizer."""

    optimizer_s: float
    """Of these, what the slowest optimizer takes."""

    communication_s: tuple[float, ...]
    """Of each pipeline rank in a step: what shows of its stages' collectives, a part of what their actions take."""

    rank_bytes: tuple[int, ...]
    static: Memory
    """Of the rank that holds most; activations are in flight."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: a rank finishes as soon as its own last action is done."""
        ends = (rank.events[-1].end_s if rank.events else 0.0 for rank in self.timeline.ranks)
        return max(end + finish for end, finish in zip(ends, self.finish_s, strict=True))

    @property
    def bubble_s(self) -> float:
        """Return how long the busiest rank waits for others in a step."""
        return max(self.timeline.ranks, key=lambda each: each.compute_s).bubble_s

    def decisions(self, found: Decisions, homes: Mapping[str, int], graph: Graph) -> Decisions:
        """Return the decisions of one stage's mesh with the stages; `homes` is the stage of every operator."""
        width = found.mesh.world_size
        at: dict[str, int] = {}
        for op in graph.ops:
            if op.kind in {"parameter", "buffer"}:
                at |= dict.fromkeys(graph.aliases.get(op.target, (op.target,)), homes[op.name])
        parameters = {name: replace(each, stage=at[name]) for name, each in found.parameters.items()}
        stages = tuple(
            Stage(
                index=index,
                ranks=tuple(range(rank * width, (rank + 1) * width)),
                blocks=paths,
                parameters=tuple(name for name in found.parameters if at[name] == index),
            )
            for index, (paths, rank) in enumerate(zip(self.stages, self.schedule.rank_of, strict=True))
        )
        schedule = Schedule(
            name=self.wanted.schedule,
            interleave=self.wanted.interleave,
            num_microbatches=found.schedule.num_microbatches,
        )
        degrees = {**found.degrees, "pp": self.wanted.depth}
        return replace(found, parameters=parameters, stages=stages, schedule=schedule, degrees=degrees)

    def estimates(self, whole: Estimates) -> Estimates:
        """Return the estimates of the pipeline, given those of all stages one after another on one stage's mesh."""
        ranks = self.timeline.ranks
        slowest, shown = max(zip(ranks, self.communication_s, strict=True), key=lambda each: each[0].compute_s)
        bubble = slowest.bubble_s
        # The optimizer that takes longest may be that of a rank which is done earlier.
        rest = max(0.0, self.step_s - slowest.compute_s - bubble)
        optimizer = min(self.optimizer_s, rest)
        scale = whole.step_time_s / self.step_s / self.wanted.depth
        return replace(
            whole,
            step_time_s=self.step_s,
            mfu=whole.mfu * scale,
            peak_memory_bytes=self.static.total,
            memory=self.static,
            breakdown=replace(
                whole.breakdown,
                compute_s=slowest.compute_s - shown,
                exposed_communication_s=rest - optimizer + shown,
                bubble_s=bubble,
                optimizer_s=optimizer,
            ),
            per_stage=tuple(
                StageEstimate(
                    index=stage,
                    step_time_s=sum(e.end_s - e.start_s for e in ranks[rank].events if e.action.stage == stage),
                    peak_memory_bytes=self.rank_bytes[rank],
                    forward_s=cost.forward_s,
                    input_gradient_s=cost.input_gradient_s,
                    weight_gradient_s=cost.weight_gradient_s,
                    forward_waiting_s=cost.forward_waiting_s,
                    input_gradient_waiting_s=cost.input_gradient_waiting_s,
                    weight_gradient_waiting_s=cost.weight_gradient_waiting_s,
                    send_forward_s=edge.forward_s if edge else 0.0,
                    send_backward_s=edge.backward_s if edge else 0.0,
                )
                for stage, (rank, cost, edge) in enumerate(
                    zip(self.schedule.rank_of, self.costs.stages, (*self.costs.edges, None), strict=True)
                )
            ),
            sources={**whole.sources, "bubble_s": "autopar.simulate: timeline of the schedule on the stages' costs"},
        )


def pipelined(
    outcome: Outcome, ways: Sequence[Wanted], budget_bytes: int, known: Pipelined | None = None
) -> Pipelined | NoCut:
    """Return the fastest simulated cut of a solved program that fits, of all `ways` to run it, or what would fit.

    The cut of a `known` pipeline of the same blocks is among those tried.

    Raises:
        InfeasibleError: more stages than blocks.
        UsageError: a schedule cannot be made for these numbers.
    """
    found = blocks.units(outcome.graph)
    priced = _Blocks(outcome, ways[0].depth, [unit.path for unit in found])
    reserved = int(outcome.links.cluster.device.reserved_bytes) + priced.batch_bytes
    tried: list[Pipelined] = []
    without: list[NoCut] = []
    if known is not None:
        sizes = [len(paths) for paths in known.stages[:-1]]
        kept = Cut(tuple(accumulate(sizes, initial=0)), 0.0, ())
        again = priced.judged(kept, known.wanted, known.schedule, reserved)
        tried += [again] if max(again.rank_bytes) <= budget_bytes else []
    for wanted in ways:
        schedule = wanted.schedule_for(outcome.microbatches)
        if len(found) < schedule.stages:
            raise blocks.too_many_stages(schedule.stages, found, wanted.interleave)
        if wanted.even:
            tried.append(priced.judged(Cut(even_cut(len(found), schedule.stages), 0.0, ()), wanted, schedule, reserved))
            continue
        cuts = find_cuts(priced.units, priced.crossings.boundaries, schedule, budget_bytes=budget_bytes - reserved)
        if isinstance(cuts, NoCut):
            without.append(NoCut(cuts.least_bytes + reserved, cuts.bound_bytes + reserved))
        else:
            tried += [priced.judged(cut, wanted, schedule, reserved) for cut in cuts.cuts]
    if not tried:
        return min(without, key=lambda each: each.least_bytes)
    return min(tried, key=lambda each: each.step_s)


class _Ends(NamedTuple):
    """Seconds of what each block's rank does once a step, and what could hide of them."""

    reduce_s: list[float]
    reduce_hidable_s: list[float]
    gather_s: list[float]
    gather_hidable_s: list[float]
    step_s: list[float]
    """The optimizer's."""


@dataclass
class _Blocks:
    """The blocks of a program, priced for one micro-batch on one stage's mesh."""

    outcome: Outcome
    depth: int
    paths: list[str]

    def __post_init__(self) -> None:
        self.graph = self.outcome.graph
        self.of = blocks.stage_of(self.graph, [[path] for path in self.paths])
        self.crossings = Crossings(self.outcome, self.depth, self.of, len(self.paths))
        links = self.outcome.links
        self.shared = shared_cores(links.cluster, prod(links.sizes[links.time_axes :]))

    @cached_property
    def units(self) -> list[Unit]:
        """Return what each block costs."""
        count = len(self.paths)
        seconds = {part: [0.0] * count for part in ("forward", "backward", "weights")}
        behind, waiting = ({part: [0.0] * count for part in seconds} for _ in range(2))
        apart = weight_gradients(self.graph, self.of)
        temporary = self._temporary()
        known: dict[str, float] = {}
        launched = {part: [0] * count for part in seconds}
        for op in self.graph.ops:
            rep = self.graph.representative(op.name)
            if rep not in known:
                known[rep] = self.outcome.seconds(rep)
            part: str = "weights" if op.name in apart else op.phase
            seconds[part][self.of[op.name]] += known[rep]
            launched[part][self.of[op.name]] += op.kind == "call" and not is_view(op)
        for issued in self.outcome.messages():
            if not self._is_once(issued):
                late = bool(issued.readers) and apart.issuperset(issued.readers)
                part = "weights" if late else issued.phase
                hidden = self._hidden_s(issued)
                waiting[part][self.of[issued.at]] += self.outcome.links.message_s(issued.message) - hidden
                behind[part][self.of[issued.at]] += hidden
        device, share = self.outcome.links.cluster.device, self.outcome.links.cluster.share
        for part, found in seconds.items():
            # What is priced is what ranks take while all compute; here, what one takes that has a core.
            work = [each * share for each in found]
            shown = [each + waits for each, waits in zip(work, waiting[part], strict=True)]
            # A block's gathers run behind the block before it, which is about as long; the host runs ahead of both.
            busy = map(max, shown, behind[part])
            seconds[part] = [device.with_host_s(*each) for each in zip(busy, launched[part], strict=True)]
            waiting[part] = [whole - each for whole, each in zip(seconds[part], work, strict=True)]
        static = self._static
        saved, kept = self._saved(apart)
        return [
            Unit(
                forward_s=seconds["forward"][at],
                input_gradient_s=seconds["backward"][at],
                weight_gradient_s=seconds["weights"][at],
                forward_waiting_s=waiting["forward"][at],
                input_gradient_waiting_s=waiting["backward"][at],
                weight_gradient_waiting_s=waiting["weights"][at],
                static_bytes=round(sum(static[at])),
                activation_bytes=round(saved[at]),
                kept_bytes=round(kept[at]),
                temporary_bytes=round(temporary[at]),
            )
            for at in range(count)
        ]

    @cached_property
    def _shown_s(self) -> list[float]:
        """Return, of each block, what shows of the collectives of one micro-batch; its seconds have them too."""
        found = [0.0] * len(self.paths)
        for issued in self.outcome.messages():
            if not self._is_once(issued):
                found[self.of[issued.at]] += self.outcome.links.message_s(issued.message) - self._hidden_s(issued)
        return found

    def _hidden_s(self, issued: Issued) -> float:
        """Return the part of a collective that computation runs behind, as the costs of the whole program have it."""
        return self.outcome.links.hidable_s(issued.message) if issued.overlapped else 0.0

    def _is_once(self, issued: Issued) -> bool:
        """Return whether a collective runs once a step, not for each micro-batch."""
        return issued.finishes or issued.times < self.outcome.microbatches

    def _bytes(self, op: Op) -> float:
        strategy = self.outcome.strategy(self.graph.representative(op.name))
        return sum(
            local_bytes(meta, layout, self.outcome.links.sizes)
            for meta, layout in zip(op.outputs, strategy.outputs, strict=True)
            if meta is not None
        )

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a rank's part of the batch, which the caller holds on every stage."""
        return round(sum(self._bytes(op) for op in self.graph.ops if op.kind == "input"))

    @cached_property
    def _static(self) -> list[tuple[float, float, float]]:
        """Return the bytes of parameters, gradients and optimizer state of each block."""
        found = [(0.0, 0.0, 0.0)] * len(self.paths)
        gradients = {o.name: o.ref for o in self.graph.outputs if o.kind == "gradient" and o.ref is not None}
        for op in self.graph.ops:
            if op.kind not in {"parameter", "buffer"}:
                continue
            layout = self.outcome.layout(self.graph.representative(op.name))
            state = 0.0
            if op.kind == "parameter" and op.requires_grad:
                state = state_bytes(op, layout, self.outcome.links.sizes, self.outcome.optimizer)
            ref = gradients.get(op.name)
            gradient = 0.0
            if ref is not None:
                early = self.outcome.reduces_early(self.graph.representative(op.name))
                made_in = layout if early else self.outcome.layout(self.graph.representative(ref.op), ref.index)
                gradient = local_bytes(self.graph.meta(ref), made_in, self.outcome.links.sizes)
            # A tied parameter is held by each stage that reads it, and so is what is gathered of it.
            for at in {self.of[op.name], *(self.of[reader] for reader in self._readers(op.name))}:
                p, g, s = found[at]
                found[at] = (p + self._bytes(op), g + gradient, s + state)
        for issued in self.outcome.messages():
            if issued.times == 1 < self.outcome.microbatches and issued.message.op == "all_gather":
                p, g, s = found[self.of[issued.at]]
                found[self.of[issued.at]] = (p + issued.message.bytes, g, s)
        return found

    def _readers(self, name: str) -> Iterator[str]:
        """Yield the operators that read a parameter, as it is or viewed or cast: a view is made where it is read."""
        for user in self.graph.users[name]:
            if user in parameter_like(self.graph):
                yield from self._readers(user)
            else:
                yield user

    def _saved(self, apart: Collection[str]) -> tuple[list[float], list[float]]:
        """Return the bytes that each block saves for backward, and those that wait for its weight gradients `apart`.

        The latter are of forward or of the input gradients.
        """
        saved, kept = [0.0] * len(self.paths), [0.0] * len(self.paths)
        base = base_of(self.graph)
        awaited = {base[ref.op, ref.index] for name in apart for ref in self.graph.by_name[name].refs}
        for life in lives(self.graph):
            op = self.graph.by_name[life.op]
            meta = op.outputs[life.index]
            if op.kind != "call" or meta is None:
                continue
            layout = self.outcome.strategy(self.graph.representative(op.name)).outputs[life.index]
            held = local_bytes(meta, layout, self.outcome.links.sizes)
            if self._is_saved(life):
                saved[self.of[op.name]] += held
            if (op.name, life.index) in awaited and op.name not in apart:
                kept[self.of[op.name]] += held
        return saved, kept

    def _temporary(self) -> list[float]:
        """Return the most that each block holds at once of what it neither saves for backward nor sums.

        A gradient is there for the moment in which it is added to its sum, unless what makes it adds it.
        """
        steps: list[dict[int, float]] = [{} for _ in self.paths]
        # Sums themselves are held throughout.
        lives_of = [each for each in lives_of_step(self.graph, accumulates=True) if each.first > 0]
        for life in lives_of:
            op = self.graph.by_name[life.op]
            meta = op.outputs[life.index]
            if op.kind != "call" or meta is None or self._is_saved(life) or self._joins_stages(op):
                continue
            layout = self.outcome.strategy(self.graph.representative(life.op)).outputs[life.index]
            held = local_bytes(meta, layout, self.outcome.links.sizes)
            mine = steps[self.of[life.op]]
            mine[life.first] = mine.get(life.first, 0.0) + held
            mine[life.last + 1] = mine.get(life.last + 1, 0.0) - held
        peaks = []
        for mine in steps:
            now = peak = 0.0
            for at in sorted(mine):
                now += mine[at]
                peak = max(peak, now)
            peaks.append(peak)
        return peaks

    def _joins_stages(self, op: Op) -> bool:
        """Return whether an operator adds up the gradients that two blocks have of one parameter: each has its own."""
        made = [self.of[ref.op] for ref in op.refs if self.graph.by_name[ref.op].kind == "call"]
        return (op.name, 0) in gradients_of(self.graph) and any(at != self.of[op.name] for at in made)

    def _is_saved(self, life: Life) -> bool:
        """Return whether forward keeps a value for backward."""
        last = self.graph.ops[life.last] if life.last < len(self.graph.ops) else None
        return self.graph.by_name[life.op].phase == "forward" and last is not None and last.phase == "backward"

    @cached_property
    def _ends(self) -> _Ends:
        """Return, of each block, what its rank does once a step."""
        found = _Ends(*([0.0] * len(self.paths) for _ in _Ends._fields))
        links = self.outcome.links
        # Frameworks differ in whether they reduce sums behind the last micro-batch.
        hides = links.hides_reductions or not links.flat_bytes
        for issued in self.outcome.messages():
            if self._is_once(issued):
                at, taken = self.of[issued.at], links.message_s(issued.message)
                hidable = links.hidable_s(issued.message)
                if issued.finishes:
                    found.reduce_s[at] += taken
                    found.reduce_hidable_s[at] += hidable if hides else 0.0
                else:
                    found.gather_s[at] += taken
                    found.gather_hidable_s[at] += 0.0 if links.flat_bytes else hidable
        for op in self.graph.ops:
            if op.kind == "parameter" and op.requires_grad:
                layout = self.outcome.layout(self.graph.representative(op.name))
                spent = optimizer_seconds(op, [layout], links.sizes, self.outcome.optimizer, links.cluster.device)
                found.step_s[self.of[op.name]] += float(spent[0])
        return found

    def _exposed_s(self, blocks_of_rank: list[int]) -> float:
        """Return what shows of what a rank does once a step: what its first forward or last backward does not hide."""
        ends, units = self._ends, [self.units[at] for at in blocks_of_rank]
        reduce_s, reduce_hidable_s, gather_s, gather_hidable_s, _ = (
            sum(each[at] for at in blocks_of_rank) for each in ends
        )
        forward_s = sum(unit.forward_s for unit in units)
        backward_s = sum(unit.input_gradient_s + unit.weight_gradient_s for unit in units)
        return reduce_s - min(reduce_hidable_s, backward_s) + gather_s - min(gather_hidable_s, forward_s)

    def judged(self, cut: Cut, wanted: Wanted, schedule: PipelineSchedule, reserved: int) -> Pipelined:
        """Return a cut with its simulated timeline."""
        costs = pipeline_costs(self.units, self.crossings.of_cut(cut, schedule), schedule, cut.first_units)
        timeline = simulate(schedule, costs, shared=self.shared)
        stops = (*cut.first_units[1:], len(self.paths))
        runs = [range(first, stop) for first, stop in zip(cut.first_units, stops, strict=True)]
        mine: dict[int, list[int]] = defaultdict(list)
        for run, rank in zip(runs, schedule.rank_of, strict=True):
            mine[rank] += run
        step_s = self._ends.step_s
        spent = [sum(step_s[at] for at in mine[rank]) for rank in range(schedule.ranks)]
        finish = tuple(self._exposed_s(mine[rank]) + spent[rank] for rank in range(schedule.ranks))
        peaks = tuple(rank.peak_bytes + reserved for rank in timeline.ranks)
        fullest = peaks.index(max(peaks))
        static = self._static
        parts = [round(sum(static[at][kind] for at in mine[fullest])) for kind in range(3)]
        temporary = max(self.units[at].temporary_bytes for at in mine[fullest])
        activations = max(0, peaks[fullest] - reserved - sum(parts) - temporary)
        return Pipelined(
            wanted=wanted,
            schedule=schedule,
            stages=tuple(tuple(self.paths[at] for at in run) for run in runs),
            costs=costs,
            timeline=timeline,
            finish_s=finish,
            optimizer_s=max(spent),
            communication_s=tuple(
                schedule.microbatches * sum(self._shown_s[at] for at in mine[rank]) for rank in range(schedule.ranks)
            ),
            rank_bytes=peaks,
            static=Memory(
                parameters=parts[0], gradients=parts[1], optimizer=parts[2],
                activations=activations + self.batch_bytes, temporary=temporary,
                reserved=reserved - self.batch_bytes,
            ),
        )  # fmt: skip
