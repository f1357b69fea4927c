"""Strategies of every operator on the whole mesh: the product of what each axis admits.

Only operators that stand for others (`Graph.representative`) are enumerated, and
operators of equal signature share one enumeration, so the work grows with the
number of *different* operators.

An axis has a role. A *free* axis admits everything; a *batch* axis only what
data parallelism does, the batch split followed through the program, which keeps
products small where there are several axes; a *tensor* axis
everything but that. The *time* axis, of micro-batches, is a batch axis whose
coordinates run one after another: small tables of the batch are made for each.
An *expert* axis is a batch axis that splits experts' parameters by experts and is
free around their products; a *sequence* axis follows the split of tokens instead of
the batch's and is free where the tokens of a sequence meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph, Op, Ref, once_per_graph
from autopar.ir.placement import Layout, Replicate, Shard, is_valid, nest
from autopar.ir.roles import CASTS, gradient_like, outweighs, parameter_like, passes
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta
from autopar.ir.thinned import thinned
from autopar.strategies.experts import by_experts, experts
from autopar.strategies.factories import RULES as BLANK
from autopar.strategies.following import follow_batch, follow_tokens
from autopar.strategies.in_time import follow_in_time
from autopar.strategies.nesting import fits_mesh
from autopar.strategies.own_rows import runs_kept
from autopar.strategies.own_samples import on_own_samples, on_ranks_of_experts
from autopar.strategies.padding import may_be_padded, with_padding
from autopar.strategies.regions import region
from autopar.strategies.wanted import Strided, calls_of, signature, wanted_shards

Role = Literal["free", "batch", "tensor", "time", "expert", "sequence"]
Hints = tuple[frozenset[Shard], ...]
Enumerated = dict[tuple[int, Hints, Hints], tuple[tuple[Strategy, ...], bool]]
"""Strategies of calls by their number, the shards that they can have and those that are wanted of them."""

Enumerate = Callable[[Op, tuple[TensorMeta, ...], int, Hints, Hints], tuple[tuple[Strategy, ...], bool]]
"""`axis_strategies`: strategies of an operator on one axis, replicated first, and whether a rule exists."""


_SMALL_BYTES = 1 << 20
"""Values up to this size that depend on nothing trained are computed whole on every rank."""


@dataclass(frozen=True, slots=True)
class AxisSpec:
    """What the search wants of one mesh axis."""

    size: int
    role: Role = "free"
    shard_parameters: bool = True
    """Whether parameters may be sharded at rest along it."""

    beside_experts: bool = False
    """Whether another axis splits experts, so that a batch axis is to shard their parameters in another dimension."""

    any_dim: bool = False
    """Whether a batch axis may shard a parameter in each dimension that divides, not in the first of these alone."""

    moves_activations: bool = True
    """Whether a batch axis may bring what an operator computes with to a parameter or gradient that outweighs it."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The strategies of every representative operator, and the operators that no rule covers."""

    of: Mapping[str, tuple[MeshStrategy, ...]]
    unknown: tuple[Op, ...]


@dataclass
class AxisChoices:
    """What each axis admits of programs that were composed before."""

    of: dict[tuple[int, AxisSpec], tuple[Graph, Mapping[str, tuple[Strategy, ...]], Mapping[str, Op]]] = field(
        init=False, default_factory=dict
    )
    """By the program's identity, of representatives, and what no rule covers."""

    _strategies: dict[int, Enumerated] = field(init=False, default_factory=dict)
    """By the size of the axis, of calls and what they may read and make: those of several programs are alike."""

    _numbers: dict[object, int] = field(init=False, default_factory=dict)
    _numbered: dict[int, tuple[Graph, Mapping[str, int]]] = field(init=False, default_factory=dict)

    def strategies(self, size: int) -> Enumerated:
        """Return what was enumerated for axes of a size, to be read and filled."""
        return self._strategies.setdefault(size, {})

    def numbers(self, graph: Graph) -> Mapping[str, int]:
        """Return, of each representative call, a number that equal calls of all programs share."""
        if id(graph) not in self._numbered:
            calls = {rep: op for rep, (op, *_) in graph.instances.items() if op.kind == "call"}
            known = self._numbers
            found = {rep: known.setdefault(signature(graph, op), len(known)) for rep, op in calls.items()}
            self._numbered[id(graph)] = graph, found
        return self._numbered[id(graph)][1]


def compose(
    graph: Graph, axes: Sequence[AxisSpec], enumerate_axis: Enumerate, known: AxisChoices | None = None
) -> Choices:
    """Return the strategies of each representative operator on a mesh of `axes`, without duplicates.

    `known` is filled with what each axis admits, and read for axes that other meshes had.

    Raises:
        InfeasibleError: what the axes admit of an operator, each by itself, does not divide on all of them together.
    """
    reps = graph.representatives
    per_axis: list[Mapping[str, tuple[Strategy, ...]]] = []
    unknown: dict[str, Op] = {}
    shared = known if known is not None else AxisChoices()
    for axis in axes:
        if (id(graph), axis) not in shared.of:
            short = thinned(graph)
            shared.of[id(graph), axis] = (graph, *_on_axis(short, short.representatives, axis, enumerate_axis, shared))
        _, found, missing = shared.of[id(graph), axis]
        unknown.update(missing)
        per_axis.append(found)
    settled, numbers = _small_tables(graph), shared.numbers(graph)
    products: dict[tuple[object, ...], tuple[MeshStrategy, ...]] = {}
    of: dict[str, tuple[MeshStrategy, ...]] = {}
    for op in reps:
        metas, number = tuple(graph.meta(ref) for ref in op.refs), numbers.get(op.name, -1)
        options = tuple(
            found[op.name][:1] if op.name in settled and axis.role != "time" else found[op.name]
            for axis, found in zip(axes, per_axis, strict=True)
        )
        may_pad = may_be_padded(graph, op)
        # Whatever is no call has neither arguments nor inputs.
        key = (number, op.outputs, options, may_pad) if number >= 0 else (op.target, op.outputs, options, may_pad)
        if key not in products:
            products[key] = _product(op, options, metas, axes, may_pad)
            if not products[key]:
                raise _nothing_divides(op, axes)
        of[op.name] = products[key]
    return Choices(of, tuple(unknown.values()))


@once_per_graph
def _small_tables(graph: Graph) -> frozenset[str]:
    """Return operators that make small tables of positions, masks and the like from no trained or floating value.

    They run whole on every rank: that costs nothing worth deciding, and a slice of them nothing at all.
    """
    found: set[str] = set()
    for op in graph.ops:
        small = all(meta is None or meta.nbytes <= _SMALL_BYTES for meta in op.outputs)
        inert = op.kind in {"constant", "buffer"} or (op.kind == "input" and not _is_floating(op))
        settled = op.kind == "call" and small and all(ref.op in found for ref in op.refs)
        if inert or settled:
            found.add(op.name)
    return frozenset(name for name in found if graph.by_name[name].kind == "call")


def _is_floating(op: Op) -> bool:
    return any(meta is not None and meta.is_floating for meta in op.outputs)


def _on_axis(
    graph: Graph, reps: Sequence[Op], axis: AxisSpec, enumerate_axis: Enumerate, shared: AxisChoices
) -> tuple[dict[str, tuple[Strategy, ...]], dict[str, Op]]:
    strided: dict[int, Strided] = {}
    wanted: dict[tuple[str, int], frozenset[Shard]] = {}
    while True:
        found, unknown = _forward(graph, axis, enumerate_axis, shared, wanted)
        more = wanted_shards(graph, reps, found, strided)
        grown = wanted | {key: wanted.get(key, frozenset()) | shards for key, shards in more.items()}
        if grown == wanted:
            break
        wanted = grown
    own = on_own_samples(graph, axis.size, found) if axis.role in {"batch", "free"} else {}
    sent = on_ranks_of_experts(graph, axis.size, found) if axis.role in {"expert", "free"} else {}
    found |= {rep: each if axis.role == "batch" else (*found[rep], *each) for rep, each in own.items()}
    if axis.role == "sequence":
        found = _by_tokens(graph, reps, axis, found)
    elif axis.role == "expert":
        kept = _following_batch(graph, reps, axis, found)
        by_rank = _following_batch(graph, reps, axis, found | sent) if sent else {}
        found = by_experts(graph, found, _joined(kept, by_rank))
        found = _joined(found, sent)
    elif axis.role in {"batch", "time"}:
        follow = (follow_in_time if axis.role == "time" else follow_batch)(graph, axis.size, found)
        found = _followed(graph, reps, axis, found, follow)
    elif axis.role == "tensor":
        found = _without_batch(graph, reps, axis, found)
    else:
        found = _joined(found, sent)
    if axis.shard_parameters and axis.role != "tensor":
        found = with_padding(graph, reps, axis.size, found, beside_experts=axis.beside_experts)
    return found, unknown


def _forward(
    graph: Graph,
    axis: AxisSpec,
    enumerate_axis: Enumerate,
    shared: AxisChoices,
    wanted: Mapping[tuple[str, int], frozenset[Shard]],
) -> tuple[dict[str, tuple[Strategy, ...]], dict[str, Op]]:
    """Return the strategies of each representative, every operator told which shards of its inputs can be had."""
    made: dict[tuple[str, int], frozenset[Shard]] = {}
    found: dict[str, tuple[Strategy, ...]] = {}
    unknown: dict[str, Op] = {}
    calls, nothing = calls_of(graph), frozenset[Shard]()
    numbers, cache = shared.numbers(graph), shared.strategies(axis.size)
    for rep, (op, *_) in graph.instances.items():
        if op.kind == "call":
            metas, read = calls[rep]
            hints = tuple(made.get(each, nothing) for each in read)
            welcome = tuple(wanted.get((rep, index), nothing) for index in range(len(op.outputs)))
            key = (numbers[rep], hints, welcome)
            if key not in cache:
                cache[key] = enumerate_axis(op, metas, axis.size, hints, welcome)
            strategies, known = cache[key]
            if not known:
                unknown.setdefault(op.target, op)
        else:
            strategies = _start(graph, op, axis)
        found[rep] = strategies
        for index in range(len(op.outputs)):
            placed = {each.outputs[index] for each in strategies}
            made[rep, index] = frozenset(p for p in placed if isinstance(p, Shard))
        if axis.role == "time" and op.kind == "call":
            made[rep, 0] |= runs_kept(op, metas, hints)
    return found, unknown


def _start(graph: Graph, op: Op, axis: AxisSpec) -> tuple[Strategy, ...]:
    """Return where something the program starts from may live along one axis.

    Inputs and buffers are whole on every rank (a slice of them costs nothing);
    a parameter may be sharded at rest in any dimension that divides; a tangent
    comes in the layout of its output.
    """
    whole = Strategy((), tuple(Replicate() if meta else None for meta in op.outputs))
    meta = op.outputs[0] if op.outputs else None
    if meta is None or op.kind in {"input", "buffer", "constant"}:
        return (whole,)
    if op.kind == "parameter" and not axis.shard_parameters and axis.role != "expert":
        return (whole,)
    dims = [d for d in range(len(meta.shape)) if is_valid(meta.shape, (Shard(d),), (axis.size,))]
    if op.kind == "parameter" and axis.role not in {"free", "tensor"} and not axis.any_dim:
        apart = axis.beside_experts and op.name in experts(graph).parameters
        dims = [d for d in dims if d > 0 or not apart][:1]
    return (whole, *(Strategy((), (Shard(d),)) for d in dims))


def _without_batch(
    graph: Graph, reps: Sequence[Op], axis: AxisSpec, found: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies that do not take part in the batch split, and read matrices of parameters in pieces.

    What gathers such a matrix first is sharded data parallelism without its point: every rank does all the work.
    """
    follow = follow_batch(graph, axis.size, found)
    starts = parameter_like(graph)
    kept: dict[str, tuple[Strategy, ...]] = {}
    for op in reps:
        kept[op.name] = found[op.name][:1] if op.kind == "tangent" else _not_as(follow[op.name], found[op.name])
    for op in reps:
        if op.kind == "call" and op.name not in starts:
            matrices = [i for i, ref in enumerate(op.refs) if ref.op in starts and len(graph.meta(ref).shape) > 1]
            pieces = tuple(s for s in kept[op.name] if all(isinstance(s.inputs[i], Shard) for i in matrices))
            kept[op.name] = pieces or kept[op.name]
    return kept


def _not_as(follow: Strategy, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Return the strategies that take no input split as one does that follows a split."""
    return tuple(
        s
        for s in options
        if not any(isinstance(q, Shard) and p == q for p, q in zip(s.inputs, follow.inputs, strict=True))
    )


def _by_tokens(
    graph: Graph, reps: Sequence[Op], axis: AxisSpec, found: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies that follow the split of tokens; where these meet, all that do not split the batch."""
    batch = follow_batch(graph, axis.size, found)
    open_to = dict(found)
    for op in reps:
        if op.kind == "call":
            open_to[op.name] = _not_as(batch[op.name], found[op.name]) or found[op.name][:1]
    follow, met = follow_tokens(graph, axis.size, open_to)
    kept = _followed(graph, reps, axis, open_to, follow)
    return kept | {name: tuple(dict.fromkeys((*kept[name], *open_to[name]))) for name in region(graph, met)}


def _joined(
    some: Mapping[str, tuple[Strategy, ...]], more: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    return {**some, **{rep: tuple(dict.fromkeys((*some[rep], *each))) for rep, each in more.items()}}


def _following_batch(
    graph: Graph, reps: Sequence[Op], axis: AxisSpec, found: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    return _followed(graph, reps, axis, found, follow_batch(graph, axis.size, found))


def _followed(
    graph: Graph,
    reps: Sequence[Op],
    axis: AxisSpec,
    found: Mapping[str, tuple[Strategy, ...]],
    follow: Mapping[str, Strategy],
) -> dict[str, tuple[Strategy, ...]]:
    """Return, for each operator, the one strategy that follows the split of the inputs.

    Parameters on their way in and gradients on their way out keep theirs: where they are
    gathered and reduced is the choice that data parallelism has. Where a table or a matrix is
    larger than what it is applied to, that may travel instead.
    """
    starts, ends = parameter_like(graph), gradient_like(graph)
    cast_up = axis.role != "time" and any(_is_cast_up(graph, graph.by_name[name]) for name in ends)
    moved = _with_moved_activations(graph, reps, axis, found, follow)
    kept: dict[str, tuple[Strategy, ...]] = {}
    for op in reps:
        more: tuple[Strategy, ...] = moved.get(op.name, ())
        if op.name in starts and axis.shard_parameters:
            kept[op.name] = found[op.name]
            continue
        if op.name in ends and axis.shard_parameters:
            more += tuple(s for s in found[op.name] if not any(p == Replicate() for p in s.inputs))
        if op.target in BLANK and axis.role != "time":
            more += found[op.name][:1]  # the followed split need not divide on several axes together
        if op.name in ends and passes(op) and cast_up:
            more += _on_whole_values(op, found[op.name])
        kept[op.name] = tuple(dict.fromkeys((follow[op.name], *more)))
    return kept


def _with_moved_activations(
    graph: Graph,
    reps: Sequence[Op],
    axis: AxisSpec,
    found: Mapping[str, tuple[Strategy, ...]],
    follow: Mapping[str, Strategy],
) -> dict[str, tuple[Strategy, ...]]:
    """Return, by operator, the strategies that leave a parameter, or the gradient it makes, where it is kept.

    Such operators are those whose parameters, or whose gradient, outweigh all else that they read and make: then fewer
    bytes move if every rank has the whole batch there. A table of a large vocabulary is looked up by few tokens. What
    passes such a gradient on is among them, and may find it whole, and so may what enlarges a value for them.
    """
    if axis.role not in {"batch", "expert"} or not axis.moves_activations:
        return {}
    starts, ends = parameter_like(graph), gradient_like(graph)
    moved: dict[str, tuple[Strategy, ...]] = {}
    for op in reps:
        if op.name in ends and any(graph.representative(ref.op) in moved for ref in op.refs):
            moved[op.name] = _on_whole_values(op, found[op.name])
        if op.kind != "call" or op.name in starts or not any(isinstance(p, Shard) for p in follow[op.name].inputs):
            continue
        makes = op.name in ends
        stay = frozenset(i for i, ref in enumerate(op.refs) if ref.op in starts and not makes)
        if not outweighs(graph, op) or (stay and not axis.shard_parameters):
            continue
        at_rest = (Shard, Replicate) if axis.shard_parameters else (Replicate,)
        moved[op.name] = tuple(
            s
            for s in found[op.name]
            if (makes and all(isinstance(p, at_rest) for p in s.outputs))
            or (stay and all(isinstance(s.inputs[i], Shard) for i in stay))
        )
    return _enlarged(graph, moved, found) | moved


def _enlarged(
    graph: Graph, moved: Mapping[str, tuple[Strategy, ...]], found: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return whole values for what enlarges a value that a moved operator reads, and for what lies between.

    Fewer bytes travel before it: the gradient of a mean over several rows of a table is the same for each of them.
    """
    made: dict[str, tuple[Strategy, ...]] = {}
    for name in moved:
        for ref in graph.by_name[name].refs:
            between = _from_smaller(graph, ref)
            made |= {each.name: _on_whole_values(each, found[each.name]) for each in between}
    return made


def _from_smaller(graph: Graph, ref: Ref) -> list[Op]:
    """Return the operators that make a value of a smaller one, each of one value alone; empty where none is smaller."""
    passed: list[Op] = []
    while True:
        maker = graph.by_name[graph.representative(ref.op)]
        if maker.kind != "call" or len(maker.refs) != 1:
            return []
        passed.append(maker)
        made_bytes, read_bytes = graph.meta(ref).nbytes, graph.meta(maker.refs[0]).nbytes
        if made_bytes != read_bytes:
            return passed if made_bytes > read_bytes else []
        ref = maker.refs[0]


def _on_whole_values(op: Op, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    return tuple(s for s in options if op.refs and all(p == Replicate() for p in s.inputs))


def _is_cast_up(graph: Graph, op: Op) -> bool:
    """Return whether an operator casts to a larger type: a gradient of 16 bits can be reduced before and after it."""
    made = op.outputs[0] if op.outputs else None
    return op.target in CASTS and made is not None and made.item_bytes > graph.meta(op.refs[0]).item_bytes


def _product(
    op: Op,
    options: tuple[tuple[Strategy, ...], ...],
    metas: tuple[TensorMeta, ...],
    axes: Sequence[AxisSpec],
    may_pad: bool,
) -> tuple[MeshStrategy, ...]:
    outputs, sizes = op.outputs, tuple(axis.size for axis in axes)
    divides = partial(is_valid, sizes=sizes, padded=may_pad, first=sum(axis.role == "time" for axis in axes))
    found: dict[tuple[object, ...], MeshStrategy] = {}
    for combination in itertools.product(*options):
        ins = tuple(nest(tuple(s.inputs[i] for s in combination), sizes) for i in range(len(metas)))
        outs = tuple(_output_layout(combination, i, sizes) for i in range(len(outputs)))
        pairs = zip(metas, ins, strict=True)
        valid = all(divides(meta.shape, layout) for meta, layout in pairs) and all(
            divides(meta.shape, layout)
            for meta, layout in zip(outputs, outs, strict=True)
            if meta is not None and layout is not None
        )
        made = MeshStrategy(combination, ins, outs)
        if valid and (op.kind != "call" or len(sizes) == 1 or fits_mesh(op, metas, made, sizes)):
            found.setdefault((ins, outs, tuple(s.lowering for s in combination)), made)
    return tuple(found.values())


def _nothing_divides(op: Op, axes: Sequence[AxisSpec]) -> InfeasibleError:
    """Return the error about an operator that each axis splits, and all of them together cannot."""
    shape = next((list(meta.shape) for meta in op.outputs if meta is not None), [])
    sizes = " x ".join(str(axis.size) for axis in axes)
    return InfeasibleError(
        f"{op.where}: {shape} does not divide by all axes of the mesh ({sizes}) together; take a batch that is a "
        "multiple of the data-parallel degrees, or smaller degrees"
    )


def _output_layout(combination: Sequence[Strategy], index: int, sizes: tuple[int, ...]) -> Layout | None:
    placements = [s.outputs[index] for s in combination]
    whole = tuple(p for p in placements if p is not None)
    return nest(whole, sizes) if len(whole) == len(placements) else None
