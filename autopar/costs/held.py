"""What one device holds while a solved program runs: at the peak by what it is, and what travelling together adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from autopar.costs.issued import Issued
from autopar.costs.links import Links
from autopar.costs.liveness import gradients_of, is_term, local_bytes, settled_at, settled_behind
from autopar.costs.moves import readers
from autopar.costs.optimizer import state_bytes
from autopar.costs.regathers import passes
from autopar.costs.timing import pairs
from autopar.ir.graph import Graph, Ref
from autopar.ir.placement import Layout, Shard, local_outer
from autopar.ir.plan import Memory
from autopar.ir.reshard import PACKED_BYTES, SUMMED_BYTES, route
from autopar.ir.roles import base_of, is_view
from autopar.ir.table import Floats
from autopar.ir.tensor import TensorMeta

if TYPE_CHECKING:
    from autopar.costs.outcome import Outcome


def held_memory(outcome: Outcome) -> Memory:
    """Return the bytes held at the peak, by what they are."""
    graph, sizes, pricing = outcome.graph, outcome.links.sizes, outcome.pricing
    curve, needed = outcome.memory_curve, outcome.needed_until
    at = int(np.argmax(curve))
    parameters = optimizer = gradients = activations = 0.0
    for op in graph.ops:
        if op.kind in {"parameter", "buffer"} and op.outputs[0] is not None:
            layout = outcome.layout(graph.representative(op.name))
            parameters += local_bytes(op.outputs[0], layout, sizes)
            if op.kind == "parameter" and op.requires_grad:
                optimizer += state_bytes(op, layout, sizes, outcome.optimizer)
    returned = gradients_of(graph)
    reduced = _reduced_shares(outcome)
    for life in pricing.holdings.own_lives:
        rep = graph.representative(life.op)
        made_in = outcome.strategy(rep).outputs[life.index]
        last = min(life.last, needed.get((life.op, life.index), life.last))
        if not life.first <= at <= last or (life.if_whole and is_term(made_in)):
            continue
        meta = graph.by_name[life.op].outputs[life.index]
        if life.first == 0 and (life.op, life.index) in reduced:
            held = meta.nbytes * reduced[life.op, life.index] if meta is not None else 0.0
        else:
            held = life.share * local_bytes(meta, made_in, sizes) if meta is not None else 0.0
        if (life.op, life.index) in returned:
            gradients += held
        else:
            activations += held
    reserved = float(outcome.links.cluster.device.reserved_bytes)
    rest = float(curve[at]) - parameters - optimizer - gradients - activations - reserved
    return Memory(
        parameters=round(parameters),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(activations),
        temporary=max(0, round(rest)),
        reserved=round(reserved),
    )


def _reduced_shares(outcome: Outcome) -> dict[tuple[str, int], float]:
    """Return which share of them one device holds of sums over micro-batches of gradients that each of them reduces.

    By the values that the gradients are views of, which may be of other dimensions than the parameters.
    """
    graph, base = outcome.graph, base_of(outcome.graph)
    found = {}
    for each in graph.outputs:
        if each.ref is None or each.kind != "gradient":
            continue
        rep = graph.representative(each.name)
        if outcome.reduces_early(rep):
            meta = graph.meta(each.ref)
            share = local_bytes(meta, outcome.layout(rep), outcome.links.sizes) / max(meta.nbytes, 1)
            found[base[each.ref.op, each.ref.index]] = share
    return found


def held_curve(outcome: Outcome) -> Floats:
    """Return the bytes held at each position, what is freed early taken into account."""
    copies = [pairs(group, outcome.options) for group in outcome.pricing.table.groups]
    held = outcome.pricing.table.memory_curve(outcome.options, copies)
    return np.asarray(held - freed_bytes(outcome), dtype=np.float64)


def output_bytes(outcome: Outcome) -> dict[str, int]:
    """Return what each output takes that is put together from the rows of all micro-batches, on a rank that makes it.

    Scalars and what is added up over micro-batches are left out, and everything where there is one micro-batch.
    """
    if outcome.microbatches == 1:
        return {}
    found = {}
    for each in outcome.graph.outputs:
        if each.kind != "output" or each.ref is None:
            continue
        meta, layout = outcome.graph.meta(each.ref), outcome.output_layout(each.name)
        if meta.shape and isinstance(layout[0], Shard):
            found[each.name] = round(outcome.microbatches * local_bytes(meta, layout, outcome.links.sizes))
    return found


def needed_until(outcome: Outcome) -> dict[tuple[str, int], int]:
    """Return, of each value that is read in other layouts than its own, the last position where its own memory is.

    From then on there are only copies. The search, whose layouts are open, counts a value up to its last reader.
    """
    graph, base, end = outcome.graph, base_of(outcome.graph), len(outcome.graph.ops)
    returned = gradients_of(graph)
    kept = {base[each.ref.op, each.ref.index] for each in graph.outputs if each.ref is not None}
    # What views a copy has the memory of the copy.
    viewed: set[tuple[str, int]] = set()
    own: dict[tuple[str, int], int] = {}
    moved: set[tuple[str, int]] = set()
    made: set[tuple[str, int, Layout]] = set()
    for position, op in enumerate(graph.ops):
        needs = outcome.strategy(graph.representative(op.name)).inputs
        for slot, (ref, need) in enumerate(zip(op.refs, needs, strict=True)):
            value = ref.op, ref.index
            owner, of_copy = base[value], value in viewed
            have = outcome.layout(graph.representative(ref.op), ref.index)
            apart = have != need and _has_own_memory(outcome.links, have, need, graph.meta(ref))
            if slot == 0 and (apart or of_copy) and is_view(op):
                viewed.update((op.name, index) for index in range(len(op.outputs)))
            if not apart:
                if not of_copy:
                    own[owner] = max(position, own.get(owner, 0))
                continue
            moved.add(owner)
            copy = (*value, need)
            if not of_copy and copy not in made:
                own[owner] = max(position, own.get(owner, 0), _gathered_last(outcome, ref, need))
            made.add(copy)
    found = {value: at for value, at in own.items() if value in moved}
    return {value: end if value in kept or value in returned else at for value, at in found.items()}


def _gathered_last(outcome: Outcome, ref: Ref, need: Layout) -> int:
    """Return where a value is gathered for the last time for those who read it in a layout; 0: only once."""
    graph, rep = outcome.graph, outcome.graph.representative(ref.op)
    if not outcome.links.messages_again(outcome.layout(rep, ref.index), need, graph.meta(ref)):
        return 0
    return passes(graph, ref, readers(outcome, ref, need, None))[-1].first


def _has_own_memory(links: Links, have: Layout, need: Layout, meta: TensorMeta) -> bool:
    """Return whether a redistributed copy is more than a view of the first rows of what it is made of."""
    for step in route(have, need, meta.shape, links.sizes, links.time_axes):
        to = step.after[step.axis]
        rows = step.kind == "slice" and isinstance(to, Shard) and to.dim == 0
        if step.axis >= links.time_axes and not (rows and local_outer(step.after, step.axis, links.sizes) == 1):
            return True
    return False


def freed_bytes(outcome: Outcome) -> Floats:
    """Return what is held at each position less than with every value up to its last reader."""
    graph, needed = outcome.graph, outcome.needed_until
    steps = np.zeros(len(graph.ops) + 2)
    for life in outcome.pricing.holdings.own_lives:
        meta = graph.by_name[life.op].outputs[life.index]
        until = max(life.first, needed.get((life.op, life.index), life.last))
        held_throughout = graph.by_name[life.op].kind != "call"
        if until < life.last and meta is not None and not held_throughout:
            made_in = outcome.strategy(graph.representative(life.op)).outputs[life.index]
            size = life.share * local_bytes(meta, made_in, outcome.links.sizes)
            steps[until + 1] += size
            steps[life.last + 1] -= size
    return np.cumsum(steps)[: len(graph.ops) + 1]


def merging_bytes(graph: Graph, runs: Sequence[Sequence[Issued]], links: Links, microbatches: int) -> Floats:
    """Return what collectives that travel together hold at each position, less what each by itself would.

    What is small of reductions on a CPU is copied into one buffer. Terms of sums that are scattered together wait for
    the last of them; on a CPU those of the other ranks are received beside them.
    """
    on_cpu = links.cluster.device.kind == "cpu"
    end = len(graph.ops)
    steps = np.zeros(end + 2)

    def hold(first: int, last: int, size: float) -> None:
        if last >= first:
            steps[first] += size
            steps[last + 1] -= size

    until, base, returned = settled_at(graph), base_of(graph), gradients_of(graph)
    last = 0.0
    # A run is issued behind the operator that makes the last of what it reads.
    ready = [max(made_at(graph, each) for each in run) for run in runs]
    for run, at in zip(runs, ready, strict=True):
        op, axis = run[0].message.op, run[0].message.axis
        whole, parts = float(sum(each.message.bytes for each in run)), links.sizes[axis]
        later = sorted(
            (other_at, float(sum(each.message.bytes for each in other)))
            for other, other_at in zip(runs, ready, strict=True)
            if (other[0].message.op, other[0].message.axis) == (op, axis) and other_at > at
        )
        then = min((other_at for other_at, _ in later), default=end)
        if op == "all_gather":
            first = read_at(graph, run[0])
            small = sum(each.message.bytes for each in run if each.message.bytes < parts * PACKED_BYTES)
            hold(first, first, on_cpu * (1.0 + 1.0 / parts) * small)
            for each in run:
                hold(first, read_at(graph, each) - 1, float(each.message.bytes))
        elif op == "all_reduce":
            copied = float(on_cpu * sum(each.message.bytes for each in run if each.message.bytes < SUMMED_BYTES))
            if microbatches == 1:
                hold(at + 1, then, copied)
            else:
                last = max(last, copied)
        else:
            then = settled_behind([(at, whole), *later], end)[at]
            for each in run:
                made, size = made_at(graph, each), float(each.message.bytes)
                alone = until.get(base[each.copy[0], each.copy[1]][0], made) if each.copy is not None else made
                final = each.copy is not None and base[each.copy[0], each.copy[1]] in returned
                # What the curve of each by itself has, taken out; then those of the run as one.
                hold(made, alone, -size - (size if on_cpu else size / parts))
                hold(made, at if on_cpu else then, size)
                hold(at + 1, then, 2 * size if on_cpu else size / parts)
                # Of what is cast once it is reduced, the cast is what stays.
                hold(alone + 1, end, -final * size / parts)
                hold(then + 1, end, final * size / parts)
    hold(end, end, last)
    return np.cumsum(steps)[: end + 1]


def made_at(graph: Graph, issued: Issued) -> int:
    """Return the position of the operator that makes what a collective reads."""
    return graph.position[issued.source.op if issued.source is not None else issued.at]


def read_at(graph: Graph, issued: Issued) -> int:
    """Return the position of the operator that first reads what a collective makes."""
    return graph.position[issued.at]
