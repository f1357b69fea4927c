"""From one captured program and a cluster to a plan: every candidate mesh is solved, the fastest that fits wins."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, gcd, inf, prod

from torch import fx

from autopar.api import infeasible
from autopar.api.admitted import looks_up_most, require_admitted, splits_tensors
from autopar.api.alternatives import alternatives
from autopar.api.describing import PEAK_DTYPE, described
from autopar.api.floors import WAYS
from autopar.api.microbatching import nothing_divides, nothing_pairs
from autopar.api.naming import name_axes, repeating
from autopar.api.outer import Outer
from autopar.api.overlapping import overlapped
from autopar.api.proving import proven_s
from autopar.api.sequences import splits_tokens
from autopar.api.smallest import smallest
from autopar.api.solved import Solved
from autopar.api.solving import Solving
from autopar.api.standing import Standing
from autopar.api.wishes import Wishes, check_names, read_wishes
from autopar.costs.liveness import least_peak_bytes
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Decisions, Fingerprint, Plan, Solver, Warned, Workload
from autopar.ir.stages import too_many_stages, units
from autopar.options import PlanOptions
from autopar.progress import Progress, Silent
from autopar.search.ilp import Solution
from autopar.search.meshes import DATA, FREE_LIMIT, Candidate, MeshAxis, Role, by_tokens, candidates
from autopar.search.trials import Recompute, Trial, Uniform, depths, in_time
from autopar.strategies.experts import experts
from autopar.version import __version__
from cost_models.cluster import ClusterSpec


@dataclass(frozen=True)
class Program:
    """What is planned: a captured graph and what it stands for."""

    graph: Graph
    name: str
    torch_version: str
    tokens_per_step: int | None = None
    joint: fx.GraphModule | None = None
    """The graph's nodes: with them, values unlike from micro-batch to micro-batch are found before a plan is to run."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Overrides of the configuration that the model was made with."""


_INDISTINCT = 0.02
"""Relative difference of two predicted step times below which the plan with fewer moving parts is taken.

Predictions of step times are not that good (benchmarks/results/testbed.jsonl), and what each more collective costs on
top of its price is never in its favour.
"""


@dataclass
class Planner:
    """One run of the outer search."""

    program: Program
    cluster: ClusterSpec
    options: PlanOptions
    progress: Progress = field(default_factory=Silent)

    def __post_init__(self) -> None:
        self._solving = Solving(self.program.graph, self.cluster, self.options, self.program.joint)

    def plan(self) -> Plan:
        """Return the fastest plan that fits.

        Raises:
            InfeasibleError: no plan satisfies the memory budget and the constraints.
            UnknownOperatorError: `strict`, and some operators have no sharding rule.
            UsageError: the cluster or a wish is not plannable.
        """
        started = time.process_time()
        wishes = read_wishes(self.options)
        check_names(self.program.graph, wishes)
        require_admitted(self.program.graph, wishes.fixed)
        whole, others, hopeless = self._trials(wishes)
        mixes = len(self._recompute_ways()) > 1
        standing = Standing(self._solving, wishes, started, mixes)
        outer = Outer(standing, self.progress)
        outer.standing.solved += hopeless
        outer.run(whole, others)
        best = outer.standing.best
        if best is None:
            if outer.interrupted:
                raise KeyboardInterrupt
            best = self._without_time(outer, [*whole, *others], wishes)
        if best is None:
            best = smallest(self._solving, wishes, outer.standing.solved)
            best.solution = replace(best.solution, bound_s=outer.standing.lightest_s(best.trial))
            outer.standing.solved.append(best)
        if not outer.interrupted:
            best = self._plainer(best, outer, wishes)
        return self._finish(best, outer, time.process_time() - started)

    def _recompute_ways(self) -> tuple[Uniform, ...]:
        """Return the recomputations to try in order: the next one where nothing fits with those before."""
        fixed = self.options.fix.get("recompute")
        if fixed == "none" or "recompute" in self.options.forbid:
            return ("none",)
        return next(((way,) for way in WAYS if way == fixed), ("none", "full"))

    def follow(self, known: Decisions, *, microbatches: int = 1) -> Decisions:
        """Return decisions for a program of a model whose parameters already are where `known` says.

        For evaluation, and for training on batches of another form: the mesh, what its axes are for, the parameters and
        which blocks are recomputed are given, only the operators are open. Where nothing fits so, or the program cannot
        be cut into so many micro-batches, it is one, and at last the axes are open, too.

        Raises:
            InfeasibleError: no plan fits beside the parameters.
        """
        wishes = Wishes(fixed={}, forbidden=(), zero=None, constraints=(), resting=known.parameters)
        axes = known.mesh.axes
        open_axes = tuple(
            MeshAxis("free" if place >= len(axes) - 2 else "dp_shard", axis.size) for place, axis in enumerate(axes)
        )
        kept = tuple(MeshAxis(_role_of(axis), axis.size) for axis in axes)
        recompute: Recompute = tuple(sorted(known.recompute.items())) or "none"
        in_parts = [(MeshAxis("microbatch", microbatches), *kept)] if microbatches > 1 else []
        for candidate in (*in_parts, kept, open_axes):
            solved = self._solve_one(Trial(candidate, recompute=recompute), wishes)
            if solved.outcome is not None:
                break
        outcome = solved.outcome or smallest(self._solving, wishes, [solved]).outcome
        if outcome is None:
            raise RuntimeError("the smallest plan has no outcome")
        estimates = outcome.estimates(
            self._solving.budget, PEAK_DTYPE[self.options.precision], self._solving.model_flops
        )
        found = overlapped(outcome, known.mesh, known.degrees, estimates, on=self.options.overlap)
        return replace(found.decisions, streams=known.streams, recompute=dict(known.recompute))

    def _solve_one(self, trial: Trial, wishes: Wishes) -> Solved:
        """Return one trial's plan; one that exists is found, however long that takes."""
        found = self._solving.bound(trial, wishes, self.options.time_limit)
        if isinstance(found, Solved):
            return found
        solved = self._solving.solve(found, wishes, (), inf, self.options.time_limit)
        if solved.solution.status == "time_limit" and solved.outcome is None:
            solved = self._solving.solve(found, wishes, (), inf, inf)
        return solved

    def _trials(self, wishes: Wishes) -> tuple[list[Trial], list[Trial], list[Solved]]:
        """Return the trials of the whole program at once, all others, and those that no layout makes fit.

        Raises:
            InfeasibleError: degrees or batch do not divide, or what is asked for cannot be cut into micro-batches.
            UsageError: the cluster cannot be planned for, or the batch not be cut as asked.
        """
        batch = self.program.graph.batch_size
        meshes = self._meshes(wishes)
        tokens = self._by_tokens(meshes, wishes)
        self._require_divisible(wishes)
        asked = wishes.microbatch is not None or wishes.depth not in {None, 1} or not wishes.schedule_is_open
        try:
            self._solving.require_parts(wishes)
        except InfeasibleError:
            if asked:
                raise
            meshes = {1: meshes.get(1, [])}
            in_parts: list[Trial] = []
        else:
            in_parts = [
                Trial(mesh, depth, way)
                for depth, found in meshes.items()
                for mesh in in_time([*found, *tokens.get(depth, ())], batch, wishes.microbatch)
                for way in self._recompute_ways()
            ]
        split = tokens.get(1, [])
        whole, hopeless = self._whole([*meshes[1], *split] if 1 in meshes else [], wishes)
        others = [trial for trial in in_parts if trial.depth > 1 or trial.microbatches > 1 or wishes.microbatch]
        if wishes.batch_overlap == 2:
            others = [trial for trial in others if trial.microbatches % 2 == 0]
            if not others:
                raise nothing_pairs(batch, wishes.microbatch)
        if not (whole or others or hopeless):
            raise nothing_divides(
                [each for found in meshes.values() for each in found], wishes.microbatch, batch, wishes.depth
            )
        # Where ranks have no samples, repeating one another's work or splitting tokens, estimates say what comes first.
        first = self._recompute_ways()[0]
        late = {each for each in whole if each.mesh in split or (split and batch % each.replicas)}
        now = [each for each in whole if each.recompute == first and each not in late]
        return now, [*(each for each in whole if each not in now), *others], hopeless

    def _require_divisible(self, wishes: Wishes) -> None:
        batch = self.program.graph.batch_size
        parts = prod(wishes.fixed.get(key, 1) for key in DATA)
        if batch and batch % parts:
            inputs = [op.outputs[0] for op in self.program.graph.ops if op.kind == "input"]
            leading = [meta.shape[0] for meta in inputs if meta is not None and meta.shape]
            raise infeasible.batch(wishes.fixed, batch, leading)

    def _whole(self, meshes: Sequence[Candidate], wishes: Wishes) -> tuple[list[Trial], list[Solved]]:
        """Return the trials of the whole batch at once that may fit in memory, and those that do not however split."""
        if wishes.microbatch is not None or wishes.batch_overlap == 2:
            return [], []
        whole = [Trial(mesh, 1, way) for way in self._recompute_ways() for mesh in meshes]
        hopeless: list[Solved] = []
        for way in self._recompute_ways() if whole else ():
            least = least_peak_bytes(
                self._solving.graph(way, wishes), self.cluster.device_count, self.options.optimizer
            )
            if least <= self._solving.budget:
                break
            why = f"does not fit in memory however it is split, recompute {way}"
            solution = Solution("infeasible", (), inf, inf)
            hopeless += [Solved(each, solution, why_not=why) for each in whole if each.recompute == way]
            whole = [each for each in whole if each.recompute != way]
        return whole, hopeless

    def _by_tokens(self, meshes: Mapping[int, Sequence[Candidate]], wishes: Wishes) -> dict[int, list[Candidate]]:
        """Return meshes that split tokens where data-parallel ranks have no samples, by numbers of pipeline ranks."""
        batch = self.program.graph.batch_size
        if not batch or "cp" in wishes.forbidden or {"cp", "dp_shard", "dp_replicate"} & wishes.fixed.keys():
            return {}
        splits = partial(splits_tokens, self.program.graph)
        found = {
            depth: [each for mesh in of_depth for each in by_tokens(mesh, batch, depth, splits)]
            for depth, of_depth in meshes.items()
        }
        return {depth: list(dict.fromkeys(tried)) for depth, tried in found.items() if tried}

    def _meshes(self, wishes: Wishes) -> dict[int, list[Candidate]]:
        """Return the meshes of one stage, by the number of pipeline ranks.

        Raises:
            InfeasibleError: no mesh has the degrees that are asked for, or too few blocks are there for the stages.
        """
        per_node, devices = self._solving.equal.devices_per_node, self.cluster.device_count
        if wishes.depth is not None:
            tried = [wishes.depth]
            self._require_blocks(wishes.depth, wishes)
        else:
            blocks = len(units(self.program.graph)) // wishes.wanted(2).interleave
            tried = [each for each in depths(devices, blocks) if each > 1 or wishes.schedule_is_open]
        found = {}
        graph = self.program.graph
        splits, count = partial(splits_tensors, graph), gcd(*experts(graph).counts.values())
        sharded = bool(wishes.zero) and devices > 1  # one device holds no copies
        free_limit = devices if looks_up_most(graph) else FREE_LIMIT
        for depth in tried:
            if devices % depth == 0:
                ranks, asked = devices // depth, (wishes.fixed, wishes.forbidden)
                found[depth] = candidates(
                    ranks, per_node, *asked, count, splits, sharded=sharded, free_limit=free_limit
                )
        found = {depth: meshes for depth, meshes in found.items() if meshes}
        if not found:
            if wishes.depth is None and not wishes.schedule_is_open:
                raise infeasible.no_stages(wishes.wanted(2), wishes.fixed, blocks, devices)
            fixed = {**wishes.fixed, "pp": wishes.depth} if wishes.depth not in {None, 1} else wishes.fixed
            if sharded and prod(fixed.values()) == devices:
                raise infeasible.nothing_to_shard_over(wishes.zero, fixed, devices)
            raise infeasible.degrees(fixed, wishes.forbidden, devices)
        return found

    def _require_blocks(self, depth: int, wishes: Wishes) -> None:
        """Raise where stages that are asked for are more than there are blocks.

        Raises:
            InfeasibleError: they are.
        """
        if depth == 1:
            return
        interleave, found = wishes.wanted(depth).interleave, units(self.program.graph)
        if len(found) < depth * interleave:
            raise too_many_stages(depth * interleave, found, interleave)

    def _without_time(self, outer: Outer, trials: Sequence[Trial], wishes: Wishes) -> Solved | None:
        """Return data parallelism, a small search, if the whole one ran out of time, or else the likeliest that fits.

        `None` if time was not what ended the search.

        Raises:
            InfeasibleError: it was, and none of these fits.
        """
        stopped = sum(one.solution.status == "time_limit" for one in outer.standing.solved)
        if not stopped:
            return None
        for trial in trials[:1]:
            plain = self._plain(trial, wishes)
            outer.standing.solved.append(plain)
            if plain.outcome is not None:
                return plain
            if plain.solution.status == "interrupted":
                raise KeyboardInterrupt
        found = outer.first_that_fits()
        if found is not None:
            return found
        raise infeasible.no_time(self.options.time_limit, stopped, len(outer.standing.solved))

    def _plainer(self, best: Solved, outer: Outer, wishes: Wishes) -> Solved:
        """Return a plan with fewer moving parts, if that is as fast as predictions can tell.

        A program without stages and micro-batches in place of one with; on the same mesh, one that gathers nothing.
        """
        allowed = best.step_s * (1.0 + _INDISTINCT)
        if best.trial.depth > 1 or best.trial.microbatches > 1:
            plain = [each for each in outer.standing.solved if each.trial.depth == 1 and each.trial.microbatches == 1]
            chosen = min(plain, key=lambda each: each.step_s, default=None)
            if chosen is not None and chosen.step_s <= allowed:
                best.why_not = "as fast within what predictions can tell, and has more parts"
                best = chosen
        wanted = wishes.zero is not None or "dp_shard" in wishes.fixed
        if best.outcome is None or wanted or not best.outcome.gathers:
            return best
        less = replace(wishes, zero=0)
        bounded = self._solving.bound(best.trial, less, outer.standing.left_s)
        if isinstance(bounded, Solved) or bounded.bound_s > allowed:
            return best
        ways = [best.pipeline.wanted] if best.pipeline is not None else []
        found = self._solving.solve(bounded, less, ways, allowed / (1.0 - self.options.gap), outer.standing.left_s)
        if found.outcome is None or found.step_s > allowed:
            return best
        # What was proven of the mesh is the bound of the search that had all choices.
        found.solution = replace(found.solution, bound_s=best.solution.bound_s)
        best.why_not = "as fast within what predictions can tell, and gathers parameters"
        outer.standing.solved.append(found)
        return found

    def _plain(self, trial: Trial, wishes: Wishes) -> Solved:
        """Return data parallelism on a trial's open axes: a small search, for when the whole one ran out of time."""
        roles: list[Role] = [role for role in ("dp_shard", "dp_replicate") if role not in wishes.forbidden]
        if not roles or trial.depth > 1:
            return Solved(trial, Solution("time_limit", (), inf, 0.0))
        mesh = tuple(replace(axis, role=roles[0]) if axis.role == "free" else axis for axis in trial.mesh)
        self.progress.phase("time is over without a plan: data parallelism")
        return self._solve_one(replace(trial, mesh=mesh), wishes)

    def _finish(self, best: Solved, outer: Outer, seconds: float) -> Plan:
        outcome, solved = best.outcome, outer.standing.solved
        if outcome is None:
            raise RuntimeError("a plan without an outcome cannot be finished")
        graph, options = self.program.graph, self.options
        mesh, degrees = name_axes(outcome, best.trial.mesh, options.fix)
        found = described(self._solving, best, mesh, degrees)
        if options.keep_outputs and not found.fits:
            raise infeasible.outputs(outcome, found.estimates)
        batch = graph.batch_size
        repeats = repeating(outcome, mesh)
        replicas, idle = _splits_of_batch(batch // outcome.microbatches, mesh, repeats)
        pairs = outcome.pairing is not None
        bounds = [proven_s(outer.standing, one, pairs=pairs) for one in solved if one.solution.status != "infeasible"]
        solver = _solver(best, solved, seconds, options, max(found.floor_s, min(bounds, default=inf)))
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
                settings=self.program.settings,
            ),
            cluster=self.cluster.to_dict(),
            decisions=found.decisions,
            estimates=found.estimates,
            solver=replace(solver, status="interrupted") if outer.interrupted else solver,
            constraints=options.constraints,
            alternatives=alternatives(best, solved, options.top_k, options.fix),
            warnings=(*self._warnings(idle, repeats), *found.warnings),
            autopar_version=__version__,
        )

    def _warnings(self, idle: Sequence[Axis], repeats: Sequence[Axis]) -> list[Warned]:
        found = [
            Warned(
                code="no-rule",
                text=f"{op.target} has no sharding rule; it runs whole on every rank (--strict makes this an error)",
                location=", ".join(part for part in (op.module, op.source) if part),
            )
            for op in self._solving.unknown.values()
        ]
        if idle:
            sizes = " x ".join(f"{axis.name}={axis.size}" for axis in idle)
            text = (
                f"the batch of {self.program.graph.batch_size} does not divide by {sizes}, whose ranks repeat one "
                "another's work; a batch that is a multiple of it gives each a part"
            )
            found.append(Warned(code="indivisible-batch", text=text))
        elif repeats:
            sizes = " x ".join(f"{axis.name}={axis.size}" for axis in repeats)
            text = (
                f"the ranks of {sizes} repeat one another's work: over the links between them, splitting it takes "
                "longer than it saves; a cluster of one of them is as fast"
            )
            found.append(Warned(code="repeated-work", text=text))
        return found


def _role_of(axis: Axis) -> Role:
    """Return what an axis of a plan is for; data-parallel ones may keep parameters sharded."""
    roles: tuple[Role, ...] = ("cp", "ep", "tp")
    return next((role for role in roles if axis.name.startswith(role)), "dp_shard")


def _splits_of_batch(samples: int, mesh: Mesh, repeats: Sequence[Axis]) -> tuple[int, list[Axis]]:
    """Return in how many parts the data-parallel axes split so many samples, and those that cannot.

    Axes that repeat the work of one rank split nothing.
    """
    parts, idle = 1, []
    for axis in mesh.axes:
        if axis.name.startswith(DATA) and axis.size > 1:
            if samples % (parts * axis.size):
                idle.append(axis)
            elif axis not in repeats:
                parts *= axis.size
    return parts, idle


def _solver(
    best: Solved,
    solved: Sequence[Solved],
    seconds: float,
    options: PlanOptions,
    proven_s: float,
) -> Solver:
    """Return the proof: no candidate can be faster than `proven_s`."""
    bound = min(best.step_s, proven_s)
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
