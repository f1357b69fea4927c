"""Where a solved program is cut into pipeline stages: its blocks priced, cut by `search.cuts`, judged by `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from autopar.api.block_costs import block_costs
from autopar.api.climbing import Climbing
from autopar.api.crossings import Crossings
from autopar.api.places import Places
from autopar.costs.held import output_bytes
from autopar.costs.outcome import Outcome
from autopar.errors import InfeasibleError, UsageError
from autopar.ir import stages as blocks
from autopar.ir.graph import Graph
from autopar.ir.pipeline import PipelineCosts
from autopar.ir.plan import Decisions, Estimates, Memory, Schedule, Stage, StageEstimate
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.timeline import Timeline
from autopar.search.assignments import MOST, MOST_INTERLEAVED, Order, Placed, find_placed
from autopar.search.cuts import Cut, NoCut, even_cut, find_cuts, find_cuts_on, pipeline_costs
from autopar.search.stages import Assigned, Boundary, temporary_bytes
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate
from autopar.simulate.sharing import shared_cores

_NEAR = 1.1
"""Times as long as the fastest that a way to run stages may take to be climbed from: that saved 10 % at most."""


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

    host_s: tuple[float, ...]
    """Likewise, how long it waits for its host."""

    rank_bytes: tuple[int, ...]
    static: Memory
    """Of the rank that has least to spare; activations are in flight."""

    order: Order
    """The block of ranks that each pipeline rank is."""

    budgets: tuple[int, ...]
    """What a device of each pipeline rank may hold."""

    devices: tuple[str, ...]
    """Of each pipeline rank, as people read them."""

    dropped: tuple[str, ...] = ()
    """Outputs beside the loss that are not kept over the micro-batches."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: a rank finishes as soon as its own last action is done."""
        ends = (rank.events[-1].end_s if rank.events else 0.0 for rank in self.timeline.ranks)
        return max(end + finish for end, finish in zip(ends, self.finish_s, strict=True))

    @property
    def bubble_s(self) -> float:
        """Return how long the busiest rank waits for others in a step."""
        return max(self.timeline.ranks, key=lambda each: each.compute_s).bubble_s

    @property
    def fullest(self) -> int:
        """Return the pipeline rank that has least to spare."""
        return _fullest(self.rank_bytes, self.budgets)

    @property
    def fits(self) -> bool:
        """Return whether no rank holds more than it may."""
        return all(held <= budget for held, budget in zip(self.rank_bytes, self.budgets, strict=True))

    @property
    def _compute_source(self) -> dict[str, str]:
        """Return what computation is priced by, where that is not one device for all stages."""
        kinds = list(dict.fromkeys(self.devices))
        return {"compute_s": f"cost_models.compute: roofline of {'; '.join(kinds)}"} if len(kinds) > 1 else {}

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
                ranks=tuple(range(self.order[rank] * width, (self.order[rank] + 1) * width)),
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
        rows = zip(ranks, self.communication_s, self.host_s, strict=True)
        slowest, shown, host = max(rows, key=lambda each: each[0].compute_s)
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
            memory_budget_bytes=self.budgets[self.fullest],
            breakdown=replace(
                whole.breakdown,
                compute_s=slowest.compute_s - shown - host,
                exposed_communication_s=rest - optimizer + shown,
                bubble_s=bubble,
                optimizer_s=optimizer,
                host_s=host,
            ),
            per_stage=tuple(
                StageEstimate(
                    index=stage,
                    step_time_s=sum(e.end_s - e.start_s for e in ranks[rank].events if e.action.stage == stage),
                    peak_memory_bytes=self.rank_bytes[rank],
                    memory_budget_bytes=self.budgets[rank],
                    devices=self.devices[rank],
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
            sources={
                **whole.sources,
                **self._compute_source,
                "bubble_s": "autopar.simulate: timeline of the schedule on the stages' costs",
            },
        )


def pipelined(
    outcome: Outcome, ways: Sequence[Wanted], places: Places, known: Pipelined | None = None
) -> Pipelined | NoCut:
    """Return the fastest simulated cut of a solved program that fits, of all `ways` to run it, or what would fit.

    Where blocks of ranks have unlike devices, which of them takes which stages is part of the cut. That of a `known`
    pipeline of the same blocks is among those tried.

    Raises:
        InfeasibleError: more stages than blocks.
        UsageError: a schedule cannot be made for these numbers.
    """
    priced = _Placed(outcome, places, [unit.path for unit in blocks.units(outcome.graph)])
    tried: list[Pipelined] = []
    without: list[NoCut] = []
    if known is not None:
        kept = Placed(known.order, Cut(_first_units(known.stages), 0.0, ()))
        again = priced.judged(kept, known.wanted, known.schedule)
        tried += [again] if again.fits else []
    for wanted in ways:
        cuts = priced.run(wanted)
        if isinstance(cuts, NoCut):
            without.append(cuts)
        else:
            tried += cuts
    if not tried:
        return min(without, key=lambda each: each.least_bytes)
    return min([*tried, *priced.climbed(tried)], key=lambda each: each.step_s)


def rerun(outcome: Outcome, ways: Sequence[Wanted], places: Places) -> Pipelined | None:
    """Return the fastest simulated cut of a solved program in those of `ways` that can be scheduled and fit, if any."""
    priced = _Placed(outcome, places, [unit.path for unit in blocks.units(outcome.graph)])
    tried: list[Pipelined] = []
    for wanted in ways:
        try:
            cuts = priced.run(wanted)
        except (UsageError, InfeasibleError):
            continue
        tried += [] if isinstance(cuts, NoCut) else cuts
    return min([*tried, *priced.climbed(tried)], key=lambda each: each.step_s, default=None)


def priced_as(
    outcome: Outcome, wanted: Wanted, places: Places, stages: Sequence[Sequence[str]], order: Order
) -> Pipelined:
    """Return a solved program cut into given stages (paths of their blocks) on given blocks of ranks, simulated."""
    priced = _Placed(outcome, places, [unit.path for unit in blocks.units(outcome.graph)])
    cut = Cut(_first_units(stages), 0.0, ())
    return priced.judged(Placed(order, cut), wanted, wanted.schedule_for(outcome.microbatches))


def _first_units(stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return which block is the first of each stage, given the paths of their blocks."""
    return tuple(accumulate((len(paths) for paths in stages[:-1]), initial=0))


def _fullest(held: Sequence[int], budgets: Sequence[int]) -> int:
    spare = [budget - each for each, budget in zip(held, budgets, strict=True)]
    return spare.index(min(spare))


@dataclass
class _Placed:
    """The blocks of a program on all blocks of ranks that may run them."""

    outcome: Outcome
    places: Places
    paths: list[str]

    def __post_init__(self) -> None:
        of = blocks.homes(self.outcome.graph)
        links, clusters = self.outcome.links, self.places.clusters
        on = [links] if len(clusters) == 1 else [links.on(each) for each in clusters]
        outcomes = [self.outcome if each is links else replace(self.outcome, links=each) for each in on]
        self._of_kind = [block_costs(each) for each in outcomes]
        self._crossings = Crossings(self.outcome, self.places, of, len(self.paths))
        self._shared = shared_cores(links.cluster, prod(links.sizes[links.time_axes :]))
        batch_bytes = self._of_kind[0].batch_bytes
        sizes, self._outputs = output_bytes(self.outcome), dict[int, int]()
        for each in self.outcome.graph.outputs:
            if each.name in sizes and each.ref is not None:
                unit = of[each.ref.op]
                self._outputs[unit] = self._outputs.get(unit, 0) + sizes[each.name]
        self._reserved = [each + batch_bytes for each in self.places.reserved]
        self._free = [budget - taken for budget, taken in zip(self.places.budgets, self._reserved, strict=True)]

    def run(self, wanted: Wanted) -> list[Pipelined] | NoCut:
        """Return the best cuts for a way to run them, simulated.

        Raises:
            InfeasibleError: more stages than blocks.
            UsageError: the schedule cannot be made for these numbers.
        """
        schedule = wanted.schedule_for(self.outcome.microbatches)
        if len(self.paths) < schedule.stages:
            raise blocks.too_many_stages(schedule.stages, blocks.units(self.outcome.graph), wanted.interleave)
        if wanted.even:
            even = Placed(self.places.given, Cut(even_cut(len(self.paths), schedule.stages), 0.0, ()))
            return [self.judged(even, wanted, schedule)]
        cuts = self.cuts(schedule)
        return cuts if isinstance(cuts, NoCut) else [self.judged(cut, wanted, schedule) for cut in cuts]

    def cuts(self, schedule: PipelineSchedule) -> list[Placed] | NoCut:
        """Return the best cuts for the closed form, and the order of blocks of ranks that each is for."""
        places, free = self.places, self._free
        if len(places.clusters) == 1:
            units, boundaries = self._of_kind[0].units, self._crossings.boundaries
            alike = find_cuts(units, boundaries, schedule, budget_bytes=free[0])
            if isinstance(alike, NoCut):
                return NoCut(alike.least_bytes + self._reserved[0], alike.bound_bytes + self._reserved[0])
            # Equal blocks stay in the order of their ranks, see `search.assignments`.
            return [Placed(places.given, cut) for cut in alike.cuts]
        most = max(free)
        found = find_placed(
            places.kind_of,
            places.kinds(self._of_kind[0].batch_bytes),
            lambda order: find_cuts_on(self._assigned(order, schedule, free), schedule, budget_bytes=most),
            most=MOST if schedule.stages == schedule.ranks else MOST_INTERLEAVED,
        )
        roomy = free.index(most)
        if isinstance(found, NoCut):
            return NoCut(found.least_bytes + self._reserved[roomy], found.bound_bytes + self._reserved[roomy])
        return found

    def climbed(self, tried: Sequence[Pipelined]) -> list[Pipelined]:
        """Return shorter cuts, if there are, of the ways to run them that were about as fast as the fastest."""
        best: dict[Wanted, Pipelined] = {}
        for each in sorted(tried, key=lambda each: each.step_s):
            if each.fits and not each.wanted.even:
                best.setdefault(each.wanted, each)
        # Ranks that share cores slow one another down, which no order of actions foretells.
        if self._shared is not None or not best:
            return []
        most_s = _NEAR * min(each.step_s for each in best.values())
        found = []
        for wanted, each in best.items():
            if each.step_s > most_s:
                continue
            assigned = self._assigned(each.order, each.schedule, self._free)
            climbing = Climbing(assigned, each.schedule, max(self._free), [kind.ends for kind in self._of_kind])
            first = climbing.best(_first_units(each.stages))
            if first is not None:
                found.append(self.judged(Placed(each.order, Cut(first, 0.0, ())), wanted, each.schedule))
        return [each for each in found if each.fits]

    def _assigned(self, order: Order, schedule: PipelineSchedule, free: Sequence[int]) -> Assigned:
        """Return units and boundaries as the pipeline's ranks find them in an order of blocks."""
        links: list[list[Boundary]] = []
        link_of = [0]
        for stage in range(1, schedule.stages):
            one, other = (order[schedule.rank_of[each]] for each in (stage - 1, stage))
            found = self._crossings.between(one, other)
            known = next((at for at, each in enumerate(links) if each is found), len(links))
            links += [found] if known == len(links) else []
            link_of.append(known)
        return Assigned(
            units=tuple(each.units for each in self._of_kind),
            boundaries=tuple(links),
            device_of=tuple(self.places.kind_of[block] for block in order),
            link_of=tuple(link_of),
            less_bytes=tuple(max(free) - free[block] for block in order),
        )

    def judged(self, placed: Placed, wanted: Wanted, schedule: PipelineSchedule) -> Pipelined:
        """Return a cut with its simulated timeline."""
        cut, order, places = placed.cut, placed.order, self.places
        on_rank = [self._of_kind[places.kind_of[block]] for block in order]
        first = self._of_kind[0]
        edges = self._crossings.of_cut(cut, schedule, order)
        costs = pipeline_costs(first.units, edges, schedule, cut.first_units, [each.units for each in on_rank])
        timeline = simulate(schedule, costs, shared=self._shared)
        stops = (*cut.first_units[1:], len(self.paths))
        runs = [range(start, stop) for start, stop in zip(cut.first_units, stops, strict=True)]
        mine: list[list[int]] = [[] for _ in range(schedule.ranks)]
        for run, rank in zip(runs, schedule.rank_of, strict=True):
            mine[rank] += run
        spent = [sum(each.ends.step_s[at] for at in own) for each, own in zip(on_rank, mine, strict=True)]
        exposed = [each.exposed_s(own) for each, own in zip(on_rank, mine, strict=True)]
        shown, host = (
            [sum(seconds[at] for at in own) for seconds, own in zip(found, mine, strict=True)]
            for found in zip(*((each.shown_s, each.host_s) for each in on_rank), strict=True)
        )
        reserved = [self._reserved[block] for block in order]
        budgets = tuple(places.budgets[block] for block in order)
        peaks = tuple(rank.peak_bytes + taken for rank, taken in zip(timeline.ranks, reserved, strict=True))
        outputs = [sum(self._outputs.get(at, 0) for at in own) for own in mine]
        with_outputs = tuple(peak + own for peak, own in zip(peaks, outputs, strict=True))
        fit = all(held <= budget for held, budget in zip(with_outputs, budgets, strict=True))
        keeps = fit if self.outcome.keep_outputs is None else self.outcome.keep_outputs
        peaks = with_outputs if keeps else peaks
        fullest = _fullest(peaks, budgets)
        parts = [round(sum(first.static[at][kind] for at in mine[fullest])) for kind in range(3)]
        temporary = max(temporary_bytes(first.units[at], schedule) for at in mine[fullest])
        activations = max(0, peaks[fullest] - reserved[fullest] - sum(parts) - temporary)
        return Pipelined(
            wanted=wanted,
            schedule=schedule,
            stages=tuple(tuple(self.paths[at] for at in run) for run in runs),
            costs=costs,
            timeline=timeline,
            finish_s=tuple(ends + step for ends, step in zip(exposed, spent, strict=True)),
            optimizer_s=max(spent),
            communication_s=tuple(schedule.microbatches * each for each in shown),
            host_s=tuple(schedule.microbatches * each for each in host),
            rank_bytes=peaks,
            static=Memory(
                parameters=parts[0], gradients=parts[1], optimizer=parts[2],
                activations=activations + first.batch_bytes, temporary=temporary,
                reserved=reserved[fullest] - first.batch_bytes,
            ),
            order=order,
            budgets=budgets,
            devices=tuple(places.devices(block) for block in order),
            dropped=() if keeps else tuple(output_bytes(self.outcome)),
        )  # fmt: skip
