"""Every collective of a solved program, instance by instance, as the rewriter will issue them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.costs.issued import Copy, Issued
from autopar.costs.links import TRAVELS, Message
from autopar.costs.moves import copy_read, moved_before, readers, roots_of, settled_by
from autopar.costs.packing import memory_order
from autopar.costs.regathers import passes
from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.ir.roles import gradient_values, parameter_like

if TYPE_CHECKING:
    from autopar.costs.outcome import Outcome


def issued(outcome: Outcome) -> Iterator[Issued]:
    """Yield the collectives of one step in the order in which operators ask for them, then those of outputs."""
    done: set[Copy] = set()
    yield from _issued_for_operators(outcome, done)
    yield from _issued_for_outputs(outcome, done)


def _issued_for_operators(outcome: Outcome, done: set[Copy]) -> Iterator[Issued]:
    graph, links = outcome.graph, outcome.links
    starts, ends = parameter_like(graph), gradient_values(graph)
    roots = roots_of(graph)
    again, settled = moved_before(outcome, roots), settled_by(outcome)
    for op in graph.ops:
        rep = graph.representative(op.name)
        strategy = outcome.strategy(rep)
        for ref, need in zip(op.refs, strategy.inputs, strict=True):
            source = graph.representative(ref.op)
            key = copy_read(outcome, roots, op, ref, need)
            if key is None or key in done:
                continue
            done.add(key)
            have = outcome.layout(source, ref.index)
            behind = ref.op in starts or ref in ends
            moved = graph.by_name[ref.op].moved
            summed = links.sums_whole and ref in ends and outcome.microbatches > 1
            one = ref.op in roots and outcome.keeps_gather(roots[ref.op]) and outcome.microbatches > 1
            times = 1 if summed or one else outcome.microbatches
            messages = links.route_messages(
                have,
                need,
                graph.meta(ref),
                flat=behind and bool(links.flat_bytes),
                order=memory_order(graph, graph.by_name[source]),
            )
            whole = len(messages) == 1 and messages[0].op == "all_gather" and ref.op in starts and ref.op not in again
            # A gradient that is cast once it is reduced; with micro-batches, its sum is what is reduced.
            last = outcome.microbatches == 1 and op.name in settled
            whole = whole or (last and len(messages) == 1 and messages[0].op in TRAVELS["reduction"])
            backward = bool(messages) and op.phase == "backward"
            read_by = readers(outcome, ref, need, key[3] or None) if backward else ()
            for message in messages:
                yield Issued(
                    message, op.phase, source, behind and not summed and not one, op.name, times, summed,
                    mergeable=whole, tensor=moved, behind=behind and _travels(messages, ref.op in starts),
                    source=ref, copy=key, readers=read_by,
                )  # fmt: skip
            if not behind:
                yield from _issued_again(outcome, ref, need, key)
        metas = tuple(graph.meta(ref) for ref in op.refs)
        for message in links.inner_messages(op, metas, strategy):
            yield Issued(
                message, op.phase, rep, False, op.name, outcome.microbatches, tensor=op.moved, readers=(op.name,)
            )


def _travels(messages: Sequence[Message], of_parameter: bool) -> bool:
    """Return whether the only collective that moves a parameter, or a gradient, may travel with others."""
    return len(messages) == 1 and messages[0].op in TRAVELS["prefetch" if of_parameter else "reduction"]


def _issued_again(outcome: Outcome, ref: Ref, need: Layout, copy: Copy) -> Iterator[Issued]:
    """Yield the gathers by which those who read a value in a layout later have it again, where it is not kept."""
    graph = outcome.graph
    source = graph.representative(ref.op)
    order = memory_order(graph, graph.by_name[source])
    messages = outcome.links.messages_again(outcome.layout(source, ref.index), need, graph.meta(ref), order)
    moved, times = graph.by_name[ref.op].moved, outcome.microbatches
    for late in passes(graph, ref, readers(outcome, ref, need, None))[1:] if messages else ():
        at, by = late.computing[0], late.computing
        for each in messages:
            yield Issued(each, "backward", source, False, at, times, tensor=moved, source=ref, copy=copy, readers=by)


def _issued_for_outputs(outcome: Outcome, done: set[Copy]) -> Iterator[Issued]:
    graph, links, ends = outcome.graph, outcome.links, gradient_values(outcome.graph)
    for output in graph.outputs:
        if output.ref is None:
            continue
        source = graph.representative(output.ref.op)
        have = outcome.layout(source, output.ref.index)
        need = (
            outcome.output_layout(output.name)
            if output.kind == "output"
            else outcome.layout(graph.representative(output.name))
        )
        phase = graph.by_name[output.ref.op].phase
        key = (output.ref.op, output.ref.index, need, "")
        if have == need or key in done:
            continue
        done.add(key)
        flat = output.kind == "gradient" and bool(links.flat_bytes)
        order = memory_order(graph, graph.by_name[source])
        messages = links.route_messages(have, need, graph.meta(output.ref), flat=flat, order=order)
        summed = output.kind == "gradient" and len(messages) == 1 and messages[0].op in TRAVELS["reduction"]
        of_parameter = output.kind == "gradient"
        early = of_parameter and outcome.reduces_early(graph.representative(output.name))
        reduced = of_parameter and not early
        times = 1 if reduced else outcome.microbatches
        behind = of_parameter or output.ref in ends
        overlapped = behind and not (reduced and outcome.microbatches > 1)
        named = graph.by_name[output.name] if of_parameter else graph.by_name[output.ref.op]
        for message in messages:
            yield Issued(
                message, phase, source, overlapped, output.ref.op, times, reduced,
                mergeable=summed and not early and output.ref in ends, tensor=named.moved,
                behind=behind and _travels(messages, False), source=output.ref, copy=key,
                readers=(output.ref.op,) if early else (),
            )  # fmt: skip
