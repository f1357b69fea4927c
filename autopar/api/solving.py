"""One point of the outer search: priced, bounded by its relaxation, solved, and, with stages, cut and simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Literal

from torch import fx

from autopar.api.merging import with_room
from autopar.api.microbatching import require_splittable
from autopar.api.pairing import in_pairs
from autopar.api.pipelining import Pipelined, Wanted, pipelined, rerun
from autopar.api.places import Places
from autopar.api.solved import NOTHING, WHY_NOT, Solved
from autopar.api.wishes import Wishes, unfold_if_split
from autopar.capture.recompute import recomputed_graph
from autopar.costs.held import freed_bytes
from autopar.costs.links import Links
from autopar.costs.operators import issued_operators, model_flops
from autopar.costs.outcome import Outcome
from autopar.costs.rough import Rough
from autopar.costs.stage_memory import Split, even_split
from autopar.costs.table import Builder, Pricing
from autopar.errors import InfeasibleError, UnknownOperatorError
from autopar.figures import format_bytes
from autopar.ir.graph import Graph, Op
from autopar.ir.stages import homes, units
from autopar.ir.strategy import MeshStrategy
from autopar.ir.table import Floats
from autopar.ir.weight_gradients import weight_gradients
from autopar.options import PlanOptions
from autopar.rewrite import cuts_in_time, require_alike
from autopar.search.cuts import NoCut
from autopar.search.fitting import solve_program
from autopar.search.ilp import Ilp, Limits, Solution
from autopar.search.meshes import MeshAxis
from autopar.search.stages import most_in_flight
from autopar.search.trials import Recompute, Trial, ways_of
from autopar.strategies import axis_strategies
from autopar.strategies.compose import AxisChoices, compose
from autopar.strategies.experts import experts, sent_to_experts
from cost_models.cluster import ClusterSpec
from cost_models.device import canonical_dtype
from cost_models.errors import CostModelError

_ROOMS = 3
"""Times that layouts are chosen where two micro-batches are to run at once: each time with as much less memory as both
lacked before."""

_ALONE = "no even number of micro-batches, which are to run two at a time"

_WORTH = 0.01
"""Share of a step that two micro-batches at once have to save."""

_MISLED = 0.05
"""Share of a plan's seconds that its table has to lack for layouts to be chosen anew."""


@dataclass
class Waiting:
    """One trial, priced and bounded."""

    trial: Trial
    links: Links
    pricing: Pricing
    program: Ilp
    bound_s: float
    """No plan of the trial is faster."""

    free_s: float
    """The same if memory were no limit."""

    ended: bool = True
    """Whether time was enough to relax it: if not, it is not enough to solve it, either, and the bound is a low one."""

    gap: float = 0.0
    """How much faster than its plan another may be, if that is more than the user allows: any plan is wanted soon."""


@dataclass
class Solving:
    """Solves trials of one program on one cluster; remembers what they share."""

    program: Graph
    cluster: ClusterSpec
    options: PlanOptions
    joint: fx.GraphModule | None = None
    unknown: dict[str, Op] = field(default_factory=dict)
    """Operators without a sharding rule that were met, by their targets."""

    _graphs: dict[tuple[Recompute, bool], Graph] = field(init=False, default_factory=dict)
    _axes: AxisChoices = field(init=False, default_factory=AxisChoices)
    _links: dict[tuple[tuple[int, ...], int], Links] = field(init=False, default_factory=dict)
    _rough: dict[Recompute, Rough] = field(init=False, default_factory=dict)
    _places: dict[int, Places] = field(init=False, default_factory=dict)
    _splits: dict[tuple[Recompute, Wanted, int], Split] = field(init=False, default_factory=dict)

    def graph(self, recompute: Recompute, wishes: Wishes) -> Graph:
        """Return the program with its layers recomputed or not, equal ones apart where the wishes tell them apart."""
        key = (recompute, bool(wishes.constraints or wishes.resting))
        if key not in self._graphs:
            ways = ways_of(recompute)
            graph = recomputed_graph(self.program, ways) if ways else self.program
            self._graphs[key] = unfold_if_split(graph, wishes)
        return self._graphs[key]

    @cached_property
    def model_flops(self) -> float:
        """Return the floating-point operations of a step, on all devices together, with nothing recomputed."""
        return model_flops(self.program)

    @cached_property
    def _parameter_bytes(self) -> int:
        made = [op.outputs[0] for op in self.program.ops if op.kind == "parameter"]
        return sum(meta.nbytes for meta in made if meta is not None)

    @cached_property
    def equal(self) -> ClusterSpec:
        """Return the cluster as if all its nodes were as slow as the slowest: at that pace synchronous ranks go."""
        return self.cluster.as_equal()

    def budget_of(self, cluster: ClusterSpec) -> int:
        """Return the bytes that a device of a cluster may hold."""
        return int(cluster.memory_bytes * (1.0 - self.options.memory_margin))

    @property
    def budget(self) -> int:
        """Return the bytes that any device may hold, also the smallest."""
        return self.budget_of(self.equal)

    def mean_budget(self, depth: int) -> int:
        """Return the bytes that the ranks of a pipeline may hold on average."""
        return sum(self.places(depth).budgets) // depth if depth > 1 else self.budget

    def places(self, depth: int) -> Places:
        """Return the blocks of ranks that the ranks of a pipeline can be."""
        if depth not in self._places:
            self._places[depth] = Places(self.cluster, depth, self.budget_of, canonical_dtype(self.options.precision))
        return self._places[depth]

    def proves(self, trial: Trial) -> bool:
        """Return whether a trial's relaxation bounds its step: not where stages are on unlike devices, see `pace`."""
        return trial.depth == 1 or len(self.places(trial.depth).clusters) == 1

    def pace(self, depth: int) -> float:
        """Return how many blocks of the slowest devices compute as much as all ranks of a pipeline.

        Of unlike devices, by their rates for large products: an estimate, no one rate holds for all operators.
        """
        return self.places(depth).pace if depth > 1 else 1.0

    @property
    def optimizer(self) -> str:
        """Return the optimizer as costs know it: the user's own, on the parameters as they are."""
        return self.options.optimizer

    def budget_of_all(self, depth: int) -> int:
        """Return bytes that the whole program needs at most on one stage's mesh for its stages to fit on theirs.

        Every rank has its own reserve, of which the program's memory counts one.
        """
        places = self.places(depth)
        return sum(places.budgets) - sum(places.reserved) + int(self.equal.device.reserved_bytes)

    def at_once(self, trial: Trial) -> float:
        """Return how many times as long as a trial's pipeline its stages take at most, one after another.

        That is the pipeline's ranks, or their pace where devices are unlike. Where they share cores, collectives of one
        can be waited for while others compute: a program whose ranks' mean work is w on `share` of a core each, and
        that waits c, takes w + c one after another and at least max(w, share w + c) in a pipeline, and so no less than
        (w + c) / (2 - share).
        """
        share = self.cluster.share if trial.depth > 1 and trial.ranks else 1.0
        return self.pace(trial.depth) * (2.0 - share)

    def price(
        self, trial: Trial, wishes: Wishes, without: Callable[[Graph], frozenset[str]] | None = None
    ) -> tuple[Links, Pricing]:
        """Return the priced table of a trial, `without` the time that some operators take.

        Raises:
            InfeasibleError: a wish cannot be met on this mesh, or the program cannot be cut into micro-batches.
            UnknownOperatorError: `strict`, and some operators have no sharding rule.
        """
        links = self.links(trial)
        return links, self._priced(trial, wishes, links, without)

    def _priced(
        self,
        trial: Trial,
        wishes: Wishes,
        links: Links,
        without: Callable[[Graph], frozenset[str]] | None = None,
    ) -> Pricing:
        graph, options = self.graph(trial.recompute, wishes), self.choices(trial, wishes)
        in_float32 = self.options.reduce_dtype == "fp32"
        left_out = frozenset[str]() if without is None else without(graph)
        found = Builder(
            graph, options, links, self.optimizer, wishes.gathers, wishes.reductions, in_float32, left_out
        ).build()

        def freed(options: tuple[int, ...]) -> Floats:
            return freed_bytes(Outcome(graph, found, links, options, self.optimizer))

        return replace(found, table=replace(found.table, freed=freed))

    def choices(self, trial: Trial, wishes: Wishes) -> Mapping[str, Sequence[MeshStrategy]]:
        """Return what each operator of a trial may do, by its representative.

        Raises:
            InfeasibleError: a wish cannot be met on this mesh, or the program cannot be cut into micro-batches.
            UnknownOperatorError: `strict`, and some operators have no sharding rule.
        """
        graph = self.graph(trial.recompute, wishes)
        choices = compose(graph, wishes.axes(trial.mesh), axis_strategies, self._axes)
        for op in choices.unknown:
            self.unknown.setdefault(op.target, op)
        if self.options.strict and self.unknown:
            raise no_rule(tuple(self.unknown.values()))
        if trial.microbatches > 1:
            require_splittable(graph, choices.of, choices.unknown)
        return wishes.apply(graph, trial.mesh, choices.of)

    def links(self, trial: Trial) -> Links:
        """Return the prices of moving data on a trial's mesh; those of trials alike in it are found once."""
        key = tuple(axis.size for axis in trial.mesh), int(trial.microbatches > 1)
        if key not in self._links:
            # Layouts are the same with and without overlap, and so are numbers.
            together = self._parameter_bytes
            self._links[key] = Links(self.equal, *key, two_level=self.options.two_level, bucket_bytes=together)
        return self._links[key]

    def issued_s(self, trial: Trial) -> float:
        """Return the seconds that hosts take at least to issue a step's operators.

        A host issues those of its own stages for every micro-batch; the one that issues most, no less than the mean.
        """
        every, in_turn = self._issued
        rounds = trial.microbatches / trial.depth
        return rounds * every if trial.depth == 1 else max(rounds * every, in_turn)

    @property
    def least_issued_s(self) -> float:
        """Return the seconds that hosts take at least, whatever the trial."""
        return self._issued[self.cluster.device_count > 1]

    @cached_property
    def _issued(self) -> tuple[float, float]:
        """Return the seconds in which the fastest host issues the program once, and what no stages issue side by side.

        A micro-batch goes forward through all stages and back, one after the other; weights' gradients can wait.
        """
        home = homes(self.program) if len(units(self.program)) > 1 else {}
        late = weight_gradients(self.program, home) if home else frozenset[str]()
        host_s = min((each.host_s for each in self.cluster.devices), default=0.0)
        return host_s * issued_operators(self.program), host_s * issued_operators(self.program, late)

    def uneven(self, trial: Trial) -> str | None:
        """Return why stages and their mesh cannot be laid on the cluster's levels (three ranks of eight, say)."""
        try:
            Links(self.equal, (trial.depth, *(axis.size for axis in trial.ranks)))
        except CostModelError as error:
            return str(error)
        return None

    def bound(self, trial: Trial, wishes: Wishes, left_s: float) -> Waiting | Solved:
        """Return the trial with the bound of its relaxation, or that it is impossible."""
        try:
            links, pricing = self.price(trial, wishes)
        except (CostModelError, InfeasibleError) as error:
            return Solved(trial, NOTHING, why_not=str(error))
        program = Ilp(pricing.table)
        budget = self.budget_of_all(trial.depth)
        relaxed = program.relaxed(Limits(budget, max(left_s, 0.1), seed=self.options.seed))
        apart = self.at_once(trial)
        if relaxed.bound_s == inf:
            nothing, free_s = NOTHING, relaxed.free_s / apart
            return Solved(trial, nothing, why_not=WHY_NOT["infeasible"], free_s=free_s)
        bound_s, free_s = relaxed.bound_s / apart, relaxed.free_s / apart
        return Waiting(trial, links, pricing, program, bound_s, free_s, relaxed.ended)

    def unbounded(self, trial: Trial, wishes: Wishes) -> Waiting | None:
        """Return the trial priced, without a bound; `None` if it is impossible."""
        try:
            links, pricing = self.price(trial, wishes)
        except (CostModelError, InfeasibleError):
            return None
        return Waiting(trial, links, pricing, Ilp(pricing.table), 0.0, 0.0)

    def solve(
        self,
        one: Waiting,
        wishes: Wishes,
        ways: Sequence[Wanted],
        best_s: float,
        left_s: float,
        cuts: Sequence[Literal["even", "any"]] = ("even", "any"),
    ) -> Solved:
        """Return the best plan of a trial that beats `best_s`, run in the fastest of `ways` if it has stages.

        `cuts` are those into stages whose memory layouts are chosen for, in order, until one of them fits.
        """
        trial = one.trial
        if one.bound_s >= best_s * (1.0 - self.options.gap):
            sure = "at least" if self.proves(trial) else "about"
            why = f"{sure} {one.bound_s:.4g} s, the bound of its relaxation"
            return Solved(trial, Solution("cutoff", (), inf, one.bound_s), why_not=why)
        if left_s <= 0 and best_s < inf:
            why = "not solved within the time limit"
            return Solved(trial, Solution("time_limit", (), inf, one.bound_s), why_not=why)
        if trial.depth > 1:
            return self._solve_staged(one, wishes, ways, best_s, left_s, cuts)
        return self._solve_whole(one, wishes, best_s, left_s)

    def _solve_whole(self, one: Waiting, wishes: Wishes, best_s: float, left_s: float) -> Solved:
        """Return the best plan of a trial without stages, micro-batches two at a time where that is faster and fits."""
        budget = self.budget
        for _ in range(_ROOMS):
            started = time.process_time()
            program = one.program if budget == self.budget else Ilp(one.pricing.table)  # rows of memory stay
            solution = solve_program(program, self._limits(one, budget, left_s, best_s))
            if not solution.options:
                return self._without_plan(one, solution)
            outcome = with_room(self.outcome(one, wishes, solution), self.budget)
            left_s -= time.process_time() - started
            found = self._called_singly(Solved(one.trial, solution, outcome, outcome.step_s), one, wishes, left_s)
            paired = in_pairs(found.outcome or outcome, one.trial.mesh, wishes.batch_overlap)
            if paired is None:
                return found if wishes.batch_overlap != 2 else Solved(one.trial, NOTHING, why_not=_ALONE)
            over = paired.memory().total - self.budget
            if over <= 0 and (wishes.batch_overlap == 2 or paired.step_s < found.step_s * (1.0 - _WORTH)):
                return replace(found, outcome=paired, step_s=paired.step_s)
            if wishes.batch_overlap != 2:
                return found
            budget -= over
            if budget <= 0:
                break
        return Solved(one.trial, NOTHING, why_not=WHY_NOT["infeasible"])

    def in_pairs(self, trial: Trial, wishes: Wishes, left_s: float) -> Solved:
        """Return the plan of a trial that runs two micro-batches at once."""
        one = self.unbounded(trial, wishes)
        if one is None:
            return Solved(trial, NOTHING, why_not=WHY_NOT["infeasible"])
        return self._solve_whole(one, replace(wishes, batch_overlap=2), inf, left_s)

    def _called_singly(self, found: Solved, one: Waiting, wishes: Wishes, left_s: float) -> Solved:
        """Return a solved trial, or the layouts found with each call paying for itself, where those are faster.

        The table gives calls that may travel together one latency, and lets each hide by itself. Together they are
        fewer and hide less, or travel alone after all: how far a plan is from its table tells where that misled it.
        """
        solution = found.solution
        as_told = found.step_s * (1.0 - max(_MISLED, self.options.gap)) <= solution.objective_s
        if as_told or not one.links.bucket_bytes or left_s <= 0 or one.gap:
            return found
        alone = self._priced(one.trial, wishes, replace(one.links, bucket_bytes=0))  # the same nodes and options
        other = solve_program(Ilp(alone.table), self._limits(one, self.budget, left_s, inf))
        if not other.options:
            return found
        outcome = with_room(self.outcome(one, wishes, other), self.budget)
        if outcome.step_s >= found.step_s:
            return found
        return Solved(found.trial, replace(other, bound_s=solution.bound_s), outcome, outcome.step_s)

    def outcome(self, one: Waiting, wishes: Wishes, solution: Solution) -> Outcome:
        """Return what a solution stands for."""
        graph = self.graph(one.trial.recompute, wishes)
        keep, on = self.options.keep_outputs, self.options.overlap
        return Outcome(graph, one.pricing, one.links, solution.options, self.optimizer, on, keep_outputs=keep)

    def _solve_staged(
        self, one: Waiting, wishes: Wishes, ways: Sequence[Wanted], best_s: float, left_s: float, cuts: Sequence[str]
    ) -> Solved:
        """Solve with the memory of an even cut first; if that finds nothing, with the least that any cut needs."""
        trial = one.trial
        found: Solved | None = None
        for even in (each == "even" for each in cuts):
            if even:
                pricing = one.pricing.staged(self.split(trial, wishes, ways[0]))
                program, budget = Ilp(pricing.table), self.budget
            else:
                program, budget = one.program, self.budget_of_all(trial.depth)
            apart = self.at_once(trial)
            solution = solve_program(program, self._limits(one, budget, left_s, best_s * apart))
            # Only the least that any cut needs proves anything of the trial.
            proven = one.bound_s if even else max(one.bound_s, solution.bound_s / apart)
            solution = replace(solution, bound_s=proven)
            if not solution.options:
                found = self._without_plan(one, solution)
                continue
            found = self.cut(trial, one, wishes, solution, ways)
            if found.outcome is not None:
                return found
        if found is None:
            raise RuntimeError("a trial was solved for no cut")
        return found

    def cut(
        self,
        trial: Trial,
        one: Waiting,
        wishes: Wishes,
        solution: Solution,
        ways: Sequence[Wanted],
        known: Pipelined | None = None,
    ) -> Solved:
        """Return the assignment of a trial cut into stages, run in the fastest of `ways` that fits.

        The cut of a `known` pipeline is tried, too.
        """
        outcome = self.outcome(one, wishes, solution)
        cut = pipelined(outcome, ways, self.places(trial.depth), known)
        if isinstance(cut, NoCut):
            budget = max(self.places(trial.depth).budgets)
            why = (
                f"the largest of {trial.depth} pipeline ranks needs {format_bytes(cut.least_bytes)} and has "
                f"{format_bytes(budget)}; smaller micro-batches (--fix microbatch=N) or more stages need less"
            )
            # That no cut of these layouts fits proves nothing of others: the trial keeps its bound.
            return Solved(trial, replace(solution, status="cutoff"), why_not=why)
        return Solved(trial, solution, outcome, cut.step_s, pipeline=cut)

    def recut(self, one: Solved, ways: Sequence[Wanted]) -> Pipelined | None:
        """Return a solved trial run in the fastest of other ways, or that none of them fits or divides."""
        return None if one.outcome is None else rerun(one.outcome, ways, self.places(one.trial.depth))

    def rough(self, recompute: Recompute, wishes: Wishes) -> Rough:
        """Return the sizes of the program, for estimates."""
        if recompute not in self._rough:
            theirs, sent = frozenset(experts(self.program).counts), sent_to_experts(self.program)
            self._rough[recompute] = Rough(self.graph(recompute, wishes), self.equal, self.optimizer, theirs, sent)
        return self._rough[recompute]

    def require_parts(self, wishes: Wishes) -> None:
        """Check that the program can be cut into micro-batches, and so into stages that work at the same time.

        Raises:
            InfeasibleError: it needs its whole batch at once, has a table with a row for each sample, or does not
                return a loss that its backward starts at.
        """
        graph = self.program
        if not graph.batch_size:
            raise InfeasibleError(
                "no input has a batch dimension to cut into micro-batches; leave pp and microbatch out"
            )
        if graph.batch_size > 1:  # one sample goes through the stages whole
            parts = next((part for part in range(2, 65) if graph.batch_size % part == 0), graph.batch_size)
            axis = MeshAxis("microbatch", parts)
            choices = compose(graph, wishes.axes((axis,)), axis_strategies, self._axes)
            require_splittable(graph, choices.of, choices.unknown)
            if self.joint is not None:
                follow = {name: each[0].axes[0] for name, each in choices.of.items()}
                require_alike(cuts_in_time(self.joint, graph, follow, parts), graph)
        starts = [op for op in graph.ops if op.kind == "tangent"]
        if len(starts) != 1 or any(meta is not None and meta.shape for meta in starts[0].outputs):
            raise InfeasibleError(
                f"several micro-batches need a model that returns its loss, one scalar; here gradients start at "
                f"{', '.join(op.target for op in starts) or 'no output'}. Compute the loss inside forward and "
                "detach() other scalars, or leave pp and microbatch out"
            )

    def split(self, trial: Trial, wishes: Wishes, wanted: Wanted) -> Split:
        """Return the cut into even stages that memory is foreseen for."""
        key = (trial.recompute, wanted, trial.microbatches)
        if key not in self._splits:
            schedule = wanted.schedule_for(trial.microbatches)
            graph = self.graph(trial.recompute, wishes)
            self._splits[key] = even_split(graph, schedule.rank_of, most_in_flight(schedule))
        return self._splits[key]

    def _limits(self, one: Waiting, budget: int, left_s: float, cutoff_s: float) -> Limits:
        return Limits(budget, max(left_s, 1.0), max(self.options.gap, one.gap), self.options.seed, cutoff_s)

    def _without_plan(self, one: Waiting, solution: Solution) -> Solved:
        solution = replace(solution, bound_s=max(solution.bound_s, one.bound_s))
        return Solved(one.trial, solution, why_not=WHY_NOT.get(solution.status, solution.status))


def no_rule(unknown: Sequence[Op]) -> UnknownOperatorError:
    """Return the error about operators that no sharding rule covers, all of them."""
    lines = "\n".join(f"    {op.where}" for op in unknown)
    return UnknownOperatorError(
        f"{len(unknown)} operator{'s have' if len(unknown) > 1 else ' has'} no sharding rule:\n{lines}\n"
        "Register one with torch.distributed.tensor.experimental.register_sharding, or leave out --strict to run them "
        "whole on every rank."
    )
