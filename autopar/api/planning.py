"""From one captured program and a cluster to a plan: every candidate mesh is solved, the fastest that fits wins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, prod
from typing import Literal

from autopar.api import infeasible
from autopar.api.microbatching import in_time, in_time_for, require_splittable
from autopar.api.naming import name_axes, wished
from autopar.api.pipelining import Pipelined, Wanted, pipelined
from autopar.api.wishes import DATA_PARALLEL, Wishes, check_names, read_wishes, unfold_if_split
from autopar.capture.recompute import recomputed_graph
from autopar.costs.links import Links
from autopar.costs.liveness import least_peak_bytes
from autopar.costs.outcome import Outcome
from autopar.costs.table import Builder, Pricing
from autopar.costs.timing import timing
from autopar.errors import InfeasibleError, UnknownOperatorError, UsageError
from autopar.figures import format_bytes
from autopar.ir.graph import Graph, Op
from autopar.ir.plan import Alternative, Decisions, Fingerprint, Plan, Solver, Warned, Workload
from autopar.ir.stages import stage_of
from autopar.options import PlanOptions
from autopar.progress import Progress, Silent
from autopar.search.cuts import NoCut
from autopar.search.ilp import Ilp, Limits, Solution, smallest_peak, solve_program
from autopar.search.meshes import Candidate, MeshAxis, Role, candidates
from autopar.strategies import axis_strategies
from autopar.strategies.compose import compose
from autopar.version import __version__
from cost_models.cluster import ClusterSpec
from cost_models.errors import CostModelError

PEAK_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The type whose peak MFU refers to, by precision."""

Recompute = Literal["none", "full"]

_WHY_NOT = {
    "infeasible": "does not fit in memory",
    "cutoff": "does not fit in memory, or is proven slower than the plan",
    "time_limit": "no plan found within the time limit",
    "interrupted": "not solved: the search was interrupted",
}


@dataclass(frozen=True)
class Program:
    """What is planned: a captured graph and what it stands for."""

    graph: Graph
    name: str
    torch_version: str
    tokens_per_step: int | None = None


@dataclass
class Solved:
    """One candidate mesh and how its search ended."""

    candidate: Candidate
    solution: Solution
    outcome: Outcome | None = None
    step_s: float = inf
    why_not: str = ""
    recompute: Recompute = "none"
    pipeline: Pipelined | None = None


_INDISTINCT = 0.02
"""Relative difference of two predicted step times below which the plan with fewer moving parts is taken.

Predictions of step times are not that good (benchmarks/results/testbed.jsonl), and what each more collective costs on
top of its price is never in its favour.
"""


@dataclass
class Waiting:
    """One candidate mesh, priced and bounded."""

    candidate: Candidate
    links: Links
    pricing: Pricing
    program: Ilp
    bound_s: float
    recompute: Recompute = "none"


@dataclass
class Planner:
    """One run of the outer search."""

    program: Program
    cluster: ClusterSpec
    options: PlanOptions
    progress: Progress = field(default_factory=Silent)
    _unknown: dict[str, Op] = field(init=False, default_factory=dict)
    _interrupted: bool = field(init=False, default=False)
    _wanted: Wanted | None = field(init=False, default=None)

    def plan(self) -> Plan:
        """Return the fastest plan that fits.

        Raises:
            InfeasibleError: no plan satisfies the memory budget and the constraints.
            UnknownOperatorError: `strict`, and some operators have no sharding rule.
            UsageError: the cluster or a wish is not plannable.
        """
        started = time.monotonic()
        wishes = read_wishes(self.options)
        self._wanted = wishes.pipeline
        check_names(self.program.graph, wishes)
        meshes = self._meshes(wishes)
        solved: list[Solved] = []
        graph = self.program.graph
        for recompute in self._recompute_ways():
            graph = recomputed_graph(self.program.graph) if recompute == "full" else self.program.graph
            graph = unfold_if_split(graph, wishes)
            if least_peak_bytes(graph, self.cluster.device_count, self.options.optimizer) > self._budget:
                why = f"does not fit in memory however it is split, recompute {recompute}"
                solved += [Solved(mesh, Solution("infeasible", (), inf, inf), why_not=why) for mesh in meshes]
                continue
            self.progress.phase(f"bound {len(meshes)} mesh{'es' if len(meshes) > 1 else ''}, recompute {recompute}")
            solved += self._solve_all(graph, meshes, wishes, started, recompute)
            best = min(solved, key=lambda each: each.step_s)
            if best.outcome is not None:
                if not self._interrupted:
                    best = self._plainer(graph, best, solved, wishes, started)
                return self._finish(best, solved, time.monotonic() - started)
            if self._interrupted:
                raise KeyboardInterrupt
            stopped = sum(one.solution.status == "time_limit" for one in solved)
            if stopped:
                plain = self._plain(graph, meshes[0], wishes)
                if plain.outcome is None:
                    raise infeasible.no_time(self.options.time_limit, stopped, len(solved))
                plain.recompute = recompute
                return self._finish(plain, [*solved, plain], time.monotonic() - started)
        raise self._infeasible(graph, wishes, solved[-len(meshes) :])

    def _recompute_ways(self) -> tuple[Recompute, ...]:
        """Return the recomputations to try in order: the next one where nothing fits with those before."""
        fixed = self.options.fix.get("recompute")
        if fixed == "none" or "recompute" in self.options.forbid:
            return ("none",)
        return ("full",) if fixed == "full" else ("none", "full")

    def follow(self, known: Decisions) -> Decisions:
        """Return decisions for a program of a model whose parameters already are where `known` says.

        For evaluation: the mesh, what its axes are for, and the parameters are given, only the operators are open;
        where nothing fits so, the axes are open, too.

        Raises:
            InfeasibleError: no plan fits beside the parameters.
        """
        wishes = Wishes(fixed={}, forbidden=(), zero=None, constraints=(), resting=known.parameters)
        graph = unfold_if_split(self.program.graph, wishes)
        axes = known.mesh.axes
        open_axes = tuple(
            MeshAxis("free" if place >= len(axes) - 2 else "dp_shard", axis.size) for place, axis in enumerate(axes)
        )
        kept = tuple(MeshAxis("dp_shard" if axis.name.startswith("dp") else "tp", axis.size) for axis in axes)
        for candidate in (kept, open_axes):
            solved = self._solve_one(graph, candidate, wishes)
            if solved.outcome is not None:
                return solved.outcome.decisions(known.mesh, known.degrees)
        raise self._infeasible(graph, wishes, [solved])

    def _solve_one(self, graph: Graph, candidate: Candidate, wishes: Wishes) -> Solved:
        """Return one candidate's plan; one that exists is found, however long that takes."""
        found = self._bound(graph, candidate, wishes, self.options.time_limit)
        if isinstance(found, Solved):
            return found
        solved = self._solve(graph, found, inf, self.options.time_limit)
        if solved.solution.status == "time_limit" and solved.outcome is None:
            solved = self._solve(graph, found, inf, inf)
        return solved

    def _meshes(self, wishes: Wishes) -> list[Candidate]:
        try:
            per_node, devices = self.cluster.devices_per_node, self.cluster.device_count
            _ = self.cluster.device
        except CostModelError as error:
            raise UsageError(str(error)) from None
        if devices % self._depth:
            raise infeasible.degrees({**wishes.fixed, "pp": self._depth}, wishes.forbidden, devices)
        devices //= self._depth
        batch, parts = self.program.graph.batch_size, prod(wishes.fixed.get(key, 1) for key in DATA_PARALLEL)
        if batch and batch % parts:
            raise infeasible.batch(wishes.fixed, batch)
        found = candidates(devices, per_node, wishes.fixed, wishes.forbidden)
        if not found:
            raise infeasible.degrees(wishes.fixed, wishes.forbidden, devices)
        if wishes.microbatch is None and wishes.pipeline is None:
            return found
        if not batch:
            raise UsageError("no input has a batch dimension to cut into micro-batches; leave pp and microbatch out")
        if wishes.microbatch is not None:
            return in_time(found, wishes.microbatch, batch)
        return in_time_for(found, self._depth, batch)

    def _solve_all(
        self, graph: Graph, meshes: Sequence[Candidate], wishes: Wishes, started: float, recompute: Recompute
    ) -> list[Solved]:
        """Return every candidate as far as it was solved.

        The relaxation of each is solved first, which costs little and bounds it; then the candidates are
        solved in the order of their bounds, until the bound of the next is no better than the best plan.
        """
        waiting: list[Waiting] = []
        solved: list[Solved] = []
        for number, candidate in enumerate(meshes):
            bounded = self._bound(graph, candidate, wishes, self._left(started))
            bounded.recompute = recompute
            (waiting if isinstance(bounded, Waiting) else solved).append(bounded)  # type: ignore[arg-type]
            self.progress.update(done=number + 1, total=len(meshes))
        waiting.sort(key=lambda each: each.bound_s)
        if waiting:
            self.progress.phase(f"solve {len(waiting)} of {len(meshes)} meshes, best bound first")
        best, total = inf, len(waiting)
        try:
            while waiting:
                found = self._solve(graph, waiting[0], best, self._left(started))
                one = waiting.pop(0)
                found.recompute = recompute
                solved.append(found)
                best = min(best, found.step_s)
                if found.solution.status == "interrupted":
                    raise KeyboardInterrupt
                gap = max(0.0, 1.0 - one.bound_s / best) if best < inf else None
                done = total - len(waiting)
                self.progress.update(best_s=best if best < inf else None, gap=gap, done=done, total=total)
        except KeyboardInterrupt:
            self._interrupted = True
            solved += [_unsolved(each) for each in waiting]
        return solved

    def _plainer(self, graph: Graph, best: Solved, solved: list[Solved], wishes: Wishes, started: float) -> Solved:
        """Return a plan on the best's mesh that gathers no parameter, if that is as fast as predictions can tell."""
        if best.outcome is None or wishes.zero is not None or not best.outcome.gathers:
            return best
        allowed = best.step_s * (1.0 + _INDISTINCT)
        bounded = self._bound(graph, best.candidate, replace(wishes, zero=0), self._left(started))
        if isinstance(bounded, Solved) or bounded.bound_s > allowed:
            return best
        found = self._solve(graph, bounded, allowed / (1.0 - self.options.gap), self._left(started))
        if found.outcome is None or found.step_s > allowed:
            return best
        found.recompute = best.recompute
        # What was proven of the mesh is the bound of the search that had all choices.
        found.solution = replace(found.solution, bound_s=best.solution.bound_s)
        best.why_not = "as fast within what predictions can tell, and gathers parameters"
        solved.append(found)
        return found

    def _plain(self, graph: Graph, mesh: Candidate, wishes: Wishes) -> Solved:
        """Return data parallelism on a mesh's open axes: a small search, for when the whole one ran out of time."""
        roles: list[Role] = [role for role in ("dp_shard", "dp_replicate") if role not in wishes.forbidden]
        if not roles:
            return Solved(mesh, Solution("time_limit", (), inf, 0.0))
        role = roles[0]
        candidate = tuple(replace(axis, role=role) if axis.role == "free" else axis for axis in mesh)
        self.progress.phase("time is over without a plan: data parallelism")
        return self._solve_one(graph, candidate, wishes)

    def _left(self, started: float) -> float:
        return self.options.time_limit - (time.monotonic() - started)

    def _bound(self, graph: Graph, candidate: Candidate, wishes: Wishes, left: float) -> Waiting | Solved:
        try:
            links, pricing = self._price(graph, candidate, wishes)
        except (CostModelError, InfeasibleError) as error:
            return Solved(candidate, Solution("infeasible", (), inf, inf), why_not=str(error))
        program = Ilp(pricing.table)
        bound = program.relaxed_bound_s(Limits(self._whole_budget, max(left, 0.1), seed=self.options.seed))
        if bound == inf:
            return Solved(candidate, Solution("infeasible", (), inf, inf), why_not="does not fit in memory")
        return Waiting(candidate, links, pricing, program, bound / self._depth)

    def _solve(self, graph: Graph, one: Waiting, best_s: float, left: float) -> Solved:
        if one.bound_s >= best_s * (1.0 - self.options.gap):
            why = f"at least {one.bound_s:.4g} s, the bound of its relaxation"
            return Solved(one.candidate, Solution("cutoff", (), inf, one.bound_s), why_not=why)
        if left <= 0 and best_s < inf:
            why = "not solved within the time limit"
            return Solved(one.candidate, Solution("time_limit", (), inf, one.bound_s), why_not=why)
        cutoff_s = best_s * self._depth
        limits = Limits(self._whole_budget, max(left, 1.0), self.options.gap, self.options.seed, cutoff_s)
        solution = solve_program(one.program, limits)
        solution = replace(solution, bound_s=solution.bound_s / self._depth)
        if not solution.options:
            solution = replace(solution, bound_s=max(solution.bound_s, one.bound_s))
            return Solved(one.candidate, solution, why_not=_WHY_NOT.get(solution.status, solution.status))
        outcome = Outcome(graph, one.pricing, one.links, solution.options, self.options.optimizer)
        if self._wanted is None:
            return Solved(one.candidate, solution, outcome, timing(one.pricing.table, solution.options).step_s)
        cut = pipelined(outcome, self._wanted, self._budget)
        if isinstance(cut, NoCut):
            why = (
                f"the largest of {self._depth} pipeline ranks needs {format_bytes(cut.least_bytes)} and has "
                f"{format_bytes(self._budget)}; smaller micro-batches (--fix microbatch=N) or more stages need less"
            )
            return Solved(one.candidate, replace(solution, status="infeasible"), why_not=why)
        return Solved(one.candidate, solution, outcome, cut.step_s, pipeline=cut)

    def _price(self, graph: Graph, candidate: Candidate, wishes: Wishes) -> tuple[Links, Pricing]:
        sizes = tuple(axis.size for axis in candidate)
        microbatches = int(bool(candidate) and candidate[0].role == "microbatch")
        links = Links(self.cluster, sizes, microbatches)
        choices = compose(graph, wishes.axes(candidate), axis_strategies)
        self._note_unknown(choices.unknown)
        if microbatches:
            require_splittable(graph, choices.of)
        options = wishes.apply(graph, candidate, choices.of)
        return links, Builder(graph, options, links, self.options.optimizer, wishes.gathers).build()

    def _note_unknown(self, unknown: Sequence[Op]) -> None:
        for op in unknown:
            self._unknown.setdefault(op.target, op)
        if self.options.strict and self._unknown:
            raise no_rule(tuple(self._unknown.values()))

    @property
    def _depth(self) -> int:
        """Return the number of pipeline ranks."""
        return 1 if self._wanted is None else self._wanted.depth

    @property
    def _whole_budget(self) -> int:
        """Return bytes that the whole program needs at most on one stage's mesh for its stages to fit on theirs."""
        return self._budget * self._depth

    @property
    def _budget(self) -> int:
        return int(self.cluster.memory_bytes * (1.0 - self.options.memory_margin))

    def _infeasible(self, graph: Graph, wishes: Wishes, solved: Sequence[Solved]) -> InfeasibleError:
        """Return the error that says how far the best candidate is from fitting, and what would make it fit."""
        least: Outcome | None = None
        reasons = [one.why_not for one in solved if one.solution.status == "infeasible"]
        if self._wanted is not None and reasons:
            return infeasible.wishes(reasons[0])
        for one in solved:
            try:
                links, pricing = self._price(graph, one.candidate, wishes)
            except (CostModelError, InfeasibleError):
                continue
            found = smallest_peak(pricing.table, Limits(self._budget, 20.0, 0.01, self.options.seed))
            if not found.options:
                continue
            outcome = Outcome(graph, pricing, links, found.options, self.options.optimizer)
            if least is None or outcome.memory().total < least.memory().total:
                least = outcome
        if least is None:
            return infeasible.wishes(reasons[0] if reasons else "no candidate mesh admits a plan")
        return infeasible.memory(least, self._budget, self.cluster, self.options)

    def _finish(self, best: Solved, solved: Sequence[Solved], seconds: float) -> Plan:
        outcome = best.outcome
        if outcome is None:
            raise RuntimeError("a plan without an outcome cannot be finished")
        graph, options = self.program.graph, self.options
        mesh, degrees = name_axes(outcome, best.candidate)
        estimates = outcome.estimates(self._budget, PEAK_DTYPE[options.precision])
        decisions = outcome.decisions(mesh, degrees)
        if best.pipeline is not None:
            homes = stage_of(outcome.graph, best.pipeline.stages)
            estimates = best.pipeline.estimates(estimates)
            decisions = best.pipeline.decisions(decisions, homes, outcome.graph)
        batch, replicas = graph.batch_size, prod(degrees[key] for key in DATA_PARALLEL)
        found = _solver(best, solved, seconds, options)
        recompute = {} if best.recompute == "none" else {"*": best.recompute}
        return Plan(
            fingerprint=Fingerprint(
                graph=graph.fingerprint, cluster=self.cluster.fingerprint(), torch=self.program.torch_version
            ),
            workload=Workload(
                model=self.program.name,
                global_batch=batch,
                microbatch=batch // (outcome.microbatches * replicas),
                num_microbatches=outcome.microbatches,
                precision=options.precision,
                optimizer=options.optimizer,
                tokens_per_step=self.program.tokens_per_step,
            ),
            cluster=self.cluster.to_dict(),
            decisions=replace(decisions, recompute=recompute),
            estimates=estimates,
            solver=replace(found, status="interrupted") if self._interrupted else found,
            constraints=options.constraints,
            alternatives=_alternatives(best, solved, options.top_k),
            warnings=tuple(self._warnings(outcome)),
            autopar_version=__version__,
        )

    def _warnings(self, outcome: Outcome) -> list[Warned]:
        found = [
            Warned(
                code="no-rule",
                text=f"{op.target} has no sharding rule; it runs whole on every rank (--strict makes this an error)",
                location=", ".join(part for part in (op.module, op.source) if part),
            )
            for op in self._unknown.values()
        ]
        batch = self.program.graph.batch_size
        if outcome.links.sizes and batch and all(batch % size for size in outcome.links.sizes if size > 1):
            sizes = " x ".join(map(str, outcome.links.sizes))
            text = f"the batch of {batch} divides by no mesh axis ({sizes}), so data parallelism was not possible"
            found.append(Warned(code="indivisible-batch", text=text))
        return found


def _unsolved(one: Waiting) -> Solved:
    """Return a candidate that an interrupted search left with the bound of its relaxation."""
    solution = Solution("interrupted", (), inf, one.bound_s)
    return Solved(one.candidate, solution, why_not=_WHY_NOT["interrupted"], recompute=one.recompute)


def no_rule(unknown: Sequence[Op]) -> UnknownOperatorError:
    """Return the error about operators that no sharding rule covers, all of them."""
    lines = "\n".join(f"    {op.where}" for op in unknown)
    return UnknownOperatorError(
        f"{len(unknown)} operator{'s have' if len(unknown) > 1 else ' has'} no sharding rule:\n{lines}\n"
        "Register one with torch.distributed.tensor.experimental.register_sharding, or leave out --strict to run them "
        "whole on every rank."
    )


def _solver(best: Solved, solved: Sequence[Solved], seconds: float, options: PlanOptions) -> Solver:
    """Return the proof: no candidate can be faster than the least of their bounds."""
    bounds = [one.solution.bound_s for one in solved if one.solution.status != "infeasible"]
    bound = min([best.step_s, *bounds])
    gap = (best.step_s - bound) / best.step_s if best.step_s else 0.0
    stopped = any(one.solution.status == "time_limit" for one in solved)
    return Solver(
        status="time_limit" if stopped else "optimal" if gap < 1e-6 else "gap",
        objective=best.step_s,
        bound=bound,
        gap=gap,
        seconds=options.time_limit * max(1, ceil(seconds / options.time_limit)),
        seed=options.seed,
        candidates=len(solved),
    )


def _alternatives(best: Solved, solved: Sequence[Solved], top_k: int) -> tuple[Alternative, ...]:
    others = sorted((one for one in solved if one is not best), key=lambda one: one.step_s)
    return tuple(_alternative(one, best) for one in others[:top_k])


def _alternative(one: Solved, best: Solved) -> Alternative:
    if one.outcome is None:
        return Alternative(degrees=wished(one.candidate), step_time_s=None, peak_memory_bytes=None, why_not=one.why_not)
    _, degrees = name_axes(one.outcome, one.candidate)
    slower = one.step_s / best.step_s - 1.0 if best.step_s else 0.0
    return Alternative(
        degrees=degrees,
        step_time_s=one.step_s,
        peak_memory_bytes=one.outcome.memory().total,
        why_not=one.why_not or (f"{slower:.1%} slower" if slower > 0 else "as fast, found later"),
    )
