"""The user's wishes, applied to the choices of a candidate mesh before it is solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from autopar.api.admitted import require_split_attention
from autopar.api.pipelining import Wanted
from autopar.api.tokens import by_tokens
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Placement, Shard
from autopar.ir.plan import Gather, ParameterDecision, Reduce
from autopar.ir.strategy import MeshStrategy
from autopar.options import Constraint, PlanOptions, Setting
from autopar.search.meshes import Candidate
from autopar.search.meshes import Role as Purpose
from autopar.simulate.generators import named
from autopar.strategies.compose import AxisSpec, Role
from autopar.suggest import did_you_mean

Options = Mapping[str, tuple[MeshStrategy, ...]]

_ROLES: Mapping[Purpose, Role] = {
    "microbatch": "time",
    "dp_replicate": "batch",
    "dp_shard": "batch",
    "cp": "sequence",
    "ep": "expert",
    "tp": "tensor",
    "free": "free",
}
"""What strategies are to offer along an axis, by what it is for."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed, in the terms of the search."""

    fixed: Mapping[str, int]
    """Degrees by role."""

    forbidden: tuple[str, ...]
    zero: int | None
    constraints: tuple[Constraint, ...]
    microbatch: int | None = None
    """Samples that each data-parallel rank computes at a time; `None`: all it has."""

    depth: int | None = None
    """Pipeline ranks; 1: no stages; `None`: open."""

    schedule: str | None = None
    """Of the pipeline; `None`: open."""

    interleave: int | None = None
    """Stages of each pipeline rank; `None`: open."""

    never: tuple[str, ...] = ()
    """What the plan must do without, of all that can be forbidden."""

    sequence_parallel: bool | None = None
    """Whether activations are split by tokens along `tp` where it splits no matrix; `None`: as is cheapest."""

    moves_activations: bool = True
    """Whether data parallelism may move activations to parameters and gradients that outweigh them."""

    any_dim: bool = False
    """Whether data-parallel ranks may shard a parameter in each dimension that divides.

    In the first of these alone, rows are first split among them, and tensor parallelism cannot split rows whole.
    """

    batch_overlap: int | None = None
    """Micro-batches that run at once, 1 or 2; `None`: open."""

    resting: Mapping[str, ParameterDecision] = field(default_factory=dict)
    """Where parameters are already and stay, by name; empty where that is open."""

    def wanted(self, depth: int) -> Wanted:
        """Return the pipeline of so many ranks: as wished, else 1F1B with one stage a rank."""
        schedule = self.schedule or ("interleaved_1f1b" if (self.interleave or 1) > 1 else "1f1b")
        return Wanted(depth, schedule, self.interleave or named(schedule).interleave or 2)

    @property
    def schedule_is_open(self) -> bool:
        """Return whether the search may choose the schedule, if perhaps only of those with one stage a rank."""
        return self.schedule is None and (self.interleave or 1) == 1

    @property
    def gathers(self) -> frozenset[Gather]:
        """Return how parameters sharded at rest may be gathered: ZeRO 1 and 2 once a step, 3 in each phase."""
        if self.zero in {1, 2}:
            return frozenset({"once"})
        return frozenset({"per_phase"}) if self.zero == 3 else frozenset({"per_phase", "once"})

    @property
    def reductions(self) -> frozenset[Reduce]:
        """Return when gradients of sharded parameters may be reduced: ZeRO 1 once a step, 2 in each micro-batch."""
        known: dict[int | None, Reduce] = {1: "step", 2: "microbatch"}
        return frozenset({known[self.zero]}) if self.zero in known else frozenset({"step", "microbatch"})

    @property
    def _shards(self) -> frozenset[Purpose]:
        """Return along which axes parameters are to be sharded at rest where they can be.

        A ZeRO stage that is asked for holds among all ranks that would have copies: those of a sequence and those with
        other experts too, as FSDP's mesh is `dp_shard` x `cp` and holds `ep`.
        """
        if self.zero in {1, 2, 3}:
            return frozenset({"dp_shard", "cp", "ep"})
        return frozenset({"dp_shard"}) if "dp_shard" in self.fixed else frozenset()

    def axes(self, candidate: Candidate) -> tuple[AxisSpec, ...]:
        """Return what the strategies are to offer along each axis of a candidate."""
        whole = {"microbatch", "dp_replicate"} | ({"dp_shard", "cp", "ep", "free"} if self.zero == 0 else set())
        return tuple(
            AxisSpec(
                axis.size,
                role=_ROLES[axis.role],
                shard_parameters=axis.role not in whole,
                any_dim=self.any_dim or bool(self.resting),
                moves_activations=self.moves_activations,
                beside_experts=axis.role != "ep" and any(each.role == "ep" for each in candidate),
            )
            for axis in candidate
        )

    def apply(self, graph: Graph, candidate: Candidate, options: Options) -> Options:
        """Return the options that honour the wishes.

        Raises:
            InfeasibleError: a constraint leaves a parameter without a placement, no matrix divides by a fixed `tp`, or
                no attention by a fixed `cp`.
        """
        require_split_attention(graph, candidate, options)
        left = dict(options)
        matrices = split = 0
        for op in graph.ops:
            if op.kind != "parameter" or graph.representative(op.name) != op.name:
                continue
            if op.target in self.resting:
                at = self.resting[op.target].placements
                left[op.name] = tuple(s for s in left[op.name] if s.outputs[0] == at)
                if not left[op.name]:
                    raise InfeasibleError(f"{op.target} rests as {', '.join(map(str, at))}, which no axis offers here")
                continue
            for place, axis in enumerate(candidate):
                wants_shard = axis.role in self._shards
                wants_split = axis.role == "tp" and _is_matrix(op)
                if wants_shard or wants_split:
                    sharded = tuple(s for s in left[op.name] if isinstance(s.axes[place].outputs[0], Shard))
                    matrices += wants_split
                    split += wants_split and bool(sharded)
                    left[op.name] = sharded or left[op.name]
            for constraint in self.constraints:
                if _concerns(constraint, graph, op):
                    left[op.name] = _constrained(constraint, op, candidate, left[op.name])
        if self.sequence_parallel is not None:
            left = by_tokens(graph, candidate, left, wanted=self.sequence_parallel)
        if matrices and not split:
            raise nothing_to_split(next(a.size for a in candidate if a.role == "tp"), asked="tp" in self.fixed)
        return left


def read_wishes(options: PlanOptions) -> Wishes:
    """Return the wishes of the options.

    Raises:
        UsageError: wishes contradict each other.
    """
    fix = options.fix
    roles = ("dp_replicate", "dp_shard", "cp", "ep", "tp")
    zero = fix.get("zero")
    found = Wishes(
        fixed={key: int(fix[key]) for key in roles if key in fix},
        forbidden=tuple(key for key in options.forbid if key in roles),
        zero=0 if "zero" in options.forbid else int(zero) if zero is not None else None,
        constraints=options.constraint,
        microbatch=_count(fix, "microbatch"),
        depth=_depth(fix, options.forbid),
        schedule=str(fix["schedule"]) if fix.get("schedule", "none") != "none" else None,
        interleave=_count(fix, "interleave"),
        never=(*options.forbid, "interleave") if fix.get("interleave") == 1 else options.forbid,
        batch_overlap=1 if "batch_overlap" in options.forbid else _count(fix, "batch_overlap"),
        sequence_parallel=False if "sequence_parallel" in options.forbid else _switch(fix.get("sequence_parallel")),
    )
    if found.depth != 1:
        found.wanted(found.depth or 2).schedule_for(2)  # what is wrong with the numbers is said now
    return found


def _count(fix: Mapping[str, Setting], key: str) -> int | None:
    return int(fix[key]) if key in fix else None


def _switch(value: object) -> bool | None:
    return None if value is None else bool(value)


def _depth(fix: Mapping[str, object], forbid: Sequence[str]) -> int | None:
    """Return the pipeline ranks that are asked for; `None` if their number is open.

    Raises:
        UsageError: a schedule without stages, or one that cannot have so many stages a rank.
    """
    schedule = fix.get("schedule")
    alone = "pp" in forbid or schedule == "none" or fix.get("batch_overlap") == 2
    depth = int(str(fix["pp"])) if "pp" in fix else 1 if alone else None
    if schedule == "none" and depth != 1:
        raise UsageError(f"--fix schedule=none and --fix pp={depth} contradict each other: stages need a schedule")
    if depth == 1 and schedule not in {None, "none"}:
        raise UsageError(f"--fix schedule={schedule} needs pipeline stages: add --fix pp=N")
    return depth


def unfold_if_split(graph: Graph, wishes: Wishes) -> Graph:
    """Return the graph with its equal layers apart, if a constraint tells them apart."""
    concerned: dict[str, set[object]] = {}
    for op in graph.ops:
        if op.kind == "parameter":
            if op.target in wishes.resting:
                concerned.setdefault(graph.representative(op.name), set()).add(wishes.resting[op.target].placements)
            for number, constraint in enumerate(wishes.constraints):
                key = f"{number} {graph.representative(op.name)}"
                concerned.setdefault(key, set()).add(_concerns(constraint, graph, op))
    return replace(graph, fold={}) if any(len(found) > 1 for found in concerned.values()) else graph


def check_names(graph: Graph, wishes: Wishes) -> None:
    """Check that every constraint names a parameter.

    Raises:
        UsageError: one names none, with the closest name.
    """
    names = [name for op in graph.ops if op.kind == "parameter" for name in _names(graph, op)]
    for constraint in wishes.constraints:
        if not any(fnmatchcase(name, constraint.name) for name in names):
            raise UsageError(
                f"--constraint '{constraint}': the model has no parameter {constraint.name!r}"
                f"{did_you_mean(constraint.name, names)}; it has {len(names)} parameters"
            )


def _names(graph: Graph, op: Op) -> tuple[str, ...]:
    return graph.aliases.get(op.target, (op.target,))


def _concerns(constraint: Constraint, graph: Graph, op: Op) -> bool:
    return any(fnmatchcase(name, constraint.name) for name in _names(graph, op))


def _is_matrix(op: Op) -> bool:
    meta = op.outputs[0]
    return meta is not None and len(meta.shape) >= 2


def _constrained(
    constraint: Constraint, op: Op, candidate: Candidate, options: tuple[MeshStrategy, ...]
) -> tuple[MeshStrategy, ...]:
    places = [p for p, axis in enumerate(candidate) if axis.role in {constraint.axis, "free"}]
    if not places:
        if not isinstance(constraint.placement, Shard):
            return options
        raise InfeasibleError(f"--constraint '{constraint}' needs an axis {constraint.axis}, which this mesh has not")
    kept = tuple(s for s in options if s.axes[places[-1]].outputs[0] == constraint.placement)
    if not kept:
        offered = {s.axes[places[-1]].outputs[0] for s in options}
        raise constraint_impossible(constraint, op, candidate[places[-1]].size, offered)
    return kept


def constraint_impossible(constraint: Constraint, op: Op, size: int, offered: set[Placement | None]) -> InfeasibleError:
    """Return the error about a placement that a parameter cannot have."""
    shape = list(op.outputs[0].shape) if op.outputs[0] is not None else []
    return InfeasibleError(
        f"--constraint '{constraint}' cannot be met: {op.target} has shape {shape} and the axis {constraint.axis} has "
        f"{size} ranks; possible there: {', '.join(sorted(map(str, offered)))}"
    )


def nothing_to_split(size: int, *, asked: bool) -> InfeasibleError:
    """Return the error about a tensor-parallel degree, asked for or all that is left, that no parameter divides by."""
    way_out = "; choose a degree that divides the model's heads and hidden sizes" if asked else ""
    return InfeasibleError(
        f"{'--fix ' if asked else ''}tp={size}: no matrix among the parameters has a dimension that divides by {size}"
        f"{way_out}"
    )
