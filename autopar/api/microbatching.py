"""Programs that need the whole batch at once, and batches that do not divide."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.search.meshes import DATA, Candidate
from autopar.search.trials import settled
from autopar.strategies.in_time import of_inputs_alone

_COUNTED_FIRST = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
"""Operators whose own sum over the batch is of inputs alone: it is made before the first micro-batch runs."""

_NEW = ("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.new_")
_SAME_ELEMENTS = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze")
"""Operators that fill something new, and those that only give it another shape: by themselves they need no sample."""


def nothing_divides(meshes: Sequence[Candidate], microbatch: int | None, batch: int, depth: int | None) -> UsageError:
    """Return the error about a batch that no candidate mesh divides into the micro-batches asked for."""
    parts = sorted({prod(axis.size for axis in each if axis.role in DATA) for mesh in meshes for each in settled(mesh)})
    if microbatch is None:
        return UsageError(f"a batch of {batch} divides by none of the data-parallel degrees that pp={depth} leaves")
    return UsageError(
        f"--fix microbatch={microbatch}: a batch of {batch} does not divide into micro-batches of "
        f"{microbatch} samples on each of {' or '.join(map(str, parts))} data-parallel ranks; choose a divisor of "
        f"{batch // parts[0]}"
    )


def nothing_pairs(batch: int, microbatch: int | None) -> UsageError:
    """Return the error about a batch that is no even number of micro-batches, which are to run two at a time."""
    of = "micro-batches" if microbatch is None else f"micro-batches of {microbatch} samples a data-parallel rank"
    return UsageError(
        f"--fix batch_overlap=2 runs two micro-batches at once, and a batch of {batch} is no even number of {of} on "
        "any mesh asked for; take a larger batch, smaller micro-batches or fewer data-parallel ranks"
    )


def require_splittable(
    graph: Graph, options: Mapping[str, Sequence[MeshStrategy]], unknown: Collection[Op] = ()
) -> None:
    """Check that micro-batches can run one after another: none needs what only all of them together give.

    `options` are strategies whose first axis is that of the micro-batches; `unknown` are operators without a rule.

    Raises:
        InfeasibleError: an operator does, with what it is.
    """
    along = {name: found[0].axes[0] for name, found in options.items()}
    counted = of_inputs_alone(graph)
    ruleless = {op.target for op in unknown}
    for op in _kinds(graph):
        mine = along[graph.representative(op.name)]
        if mine.inner and not op.target.startswith(_COUNTED_FIRST):
            raise _needs_all(graph, op)
        if mine.inner and any(ref.op not in counted for ref in op.refs[1:]):
            raise _counts_what_is_made(op)
        for slot, ref in enumerate(op.refs):
            source = along[graph.representative(ref.op)]
            if _crosses(graph, op, slot, mine, source, counted):
                state = _state_alone(graph, op)
                if op.target in ruleless:
                    raise _has_no_rule(op)
                raise _updated_by_all(state, op) if state else _needs_all(graph, op)
    for output in graph.outputs:
        if output.ref is None:
            continue
        made = along[graph.representative(output.ref.op)].outputs[output.ref.index]
        changed, maker = graph.by_name.get(output.name), graph.by_name[output.ref.op]
        summed = made == Partial() and graph.meta(output.ref).is_floating
        summed |= isinstance(made, Partial) and made.reduce in {"max", "min"}
        if changed is not None and output.kind == "mutation" and not isinstance(made, Replicate) and not summed:
            raise _updated_by_all(changed, maker)
        if changed is not None and changed.kind == "parameter" and isinstance(made, Shard):
            raise _row_a_sample(graph, changed.target, maker)


@once_per_graph
def _kinds(graph: Graph) -> tuple[Op, ...]:
    """Return the operators, of those that share their decisions and read from such one only."""
    counted = of_inputs_alone(graph)
    found: dict[object, Op] = {}
    for op in graph.ops:
        reads = tuple((graph.representative(ref.op), ref.index, ref.op in counted) for ref in op.refs)
        found.setdefault((graph.representative(op.name), reads), op)
    return tuple(found.values())


def _crosses(graph: Graph, op: Op, slot: int, mine: Strategy, source: Strategy, counted: frozenset[str]) -> bool:
    """Return whether an operator reads what is spread over several micro-batches."""
    ref = op.refs[slot]
    have, need = source.outputs[ref.index], mine.inputs[slot]
    if graph.by_name[ref.op].kind == "input":
        if isinstance(need, Shard) and need.dim == 0:
            return False  # each micro-batch brings its part
        if graph.meta(ref).shape[:1] == (graph.batch_size,):
            return True  # and of what has a row for each sample, no more
    if have == need or isinstance(have, Replicate):
        return False  # a part of what is the same for all; whether it is that, the rewriter checks
    return not (isinstance(have, Partial) and isinstance(need, Replicate) and ref.op in counted)


def _state_alone(graph: Graph, op: Op) -> Op | None:
    """Return the buffer or parameter whose new value is all that comes of an operator; `None` if anything else does."""
    reached = {op.name}
    for each in graph.ops:
        if any(ref.op in reached for ref in each.refs):
            reached.add(each.name)
    made = [output for output in graph.outputs if output.ref is not None and output.ref.op in reached]
    changed = graph.by_name.get(made[0].name) if made else None
    return changed if all(each.kind == "mutation" for each in made) else None


def _updated_by_all(state: Op, op: Op) -> InfeasibleError:
    if state.kind == "input":
        return InfeasibleError(
            f"the batch cannot be cut into micro-batches: forward writes into its argument {state.target} "
            f"({op.where}), of which each micro-batch has a part of its own; write into {state.target}.clone(), or "
            "leave microbatch and pp out"
        )
    return InfeasibleError(
        f"the batch cannot be cut into micro-batches: the new value of {state.kind} {state.target} comes of all "
        f"samples of a step ({op.where}); leave microbatch and pp out, or update it outside forward"
    )


def _row_a_sample(graph: Graph, parameter: str, op: Op) -> InfeasibleError:
    return InfeasibleError(
        f"the batch cannot be cut into micro-batches: parameter {parameter} has a row for each sample of a step, as "
        f"many as the {graph.batch_size} rows of forward's inputs ({op.where}); look rows up by numbers that are "
        "inputs of forward, or leave microbatch and pp out"
    )


def _counts_what_is_made(op: Op) -> InfeasibleError:
    return InfeasibleError(
        f"the batch cannot be cut into micro-batches: {op.where} is the mean over targets that the model makes itself, "
        "and how many count is known only after all samples; pass the targets into the model, sum the loss "
        '(reduction="sum") and divide it by a number, or leave microbatch and pp out'
    )


def _has_no_rule(op: Op) -> InfeasibleError:
    return InfeasibleError(
        f"the batch cannot be cut into micro-batches: {op.where} has no sharding rule, so that it is taken to need all "
        "samples of a step at once; if each sample is computed by itself, say so with "
        "torch.distributed.tensor.experimental.register_sharding, or leave microbatch and pp out"
    )


def _needs_all(graph: Graph, op: Op) -> InfeasibleError:
    op = _filled_by(graph, op)
    way_out = "leave microbatch and pp out"
    if "batch_norm" in op.target:
        way_out += ", replace BatchNorm by GroupNorm or LayerNorm, or freeze it (its own .eval()), as fine-tuning does"
    if op.target.startswith("aten.index"):
        way_out += (
            "; if samples lie one behind the other and each one's places are its own, write them as "
            "(places % rows) + begins with begins = (torch.arange(samples) * rows)[:, None], which shows that"
        )
    return InfeasibleError(
        f"the batch cannot be cut into micro-batches: {op.where} needs all samples of a step at once, the "
        f"{graph.batch_size} rows of forward's inputs; {way_out}"
    )


def _filled_by(graph: Graph, op: Op) -> Op:
    """Return the operator that something new is made for, which by itself needs nothing; any other itself."""
    at = op
    while at.target.startswith(_NEW if at is op else _SAME_ELEMENTS):
        readers = graph.users[at.name]
        if len(readers) != 1:
            return op
        at = graph.by_name[readers[0]]
    return at
