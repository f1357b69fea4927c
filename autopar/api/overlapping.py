"""When collectives run beside computation: the plan's step as tasks on streams, scheduled, and what is predicted of it.

What is decided goes into the plan; the rewriter follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.costs.outcome import Outcome
from autopar.costs.tasks import tasks_of
from autopar.figures import format_bytes
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Ahead, Decisions, Estimates, Span, Warned
from autopar.ir.tasks import (
    COMPUTE,
    GRADIENTS,
    PARAMETERS,
    Task,
    axis_of,
    block_of,
    issuing,
    stream_name,
    waiting,
)
from autopar.ir.timeline import Timeline
from autopar.search.overlap import END, Scheduled, schedule
from autopar.simulate.streams import Replay, held_bytes, peak_bytes, replay


@dataclass(frozen=True)
class Overlapped:
    """A plan's decisions with what they say of overlap, and what is predicted of the step."""

    decisions: Decisions
    estimates: Estimates
    warnings: tuple[Warned, ...] = ()


def overlapped(
    outcome: Outcome,
    mesh: Mesh,
    degrees: Mapping[str, int],
    estimates: Estimates,
    *,
    on: bool = True,
    staged: bool = False,
) -> Overlapped:
    """Return the decisions of a solved program, overlap included: what travels together, when, on which stream.

    Unless it is `on`, collectives go one by one, each where its input is made or its result is read, on one stream an
    axis. Steps of several micro-batches or stages are scheduled by their pipeline instead, or not at all.
    """
    if staged or outcome.microbatches > 1:
        return Overlapped(outcome.merging(merges=on).decisions(mesh, degrees), estimates)
    plain = outcome.merging(merges=False)
    if not on:
        return _described(plain, mesh, degrees, estimates, tasks_as_held(plain, mesh), None)
    for merging in (outcome, plain):
        left_bytes = estimates.memory_budget_bytes - merging.memory().total
        if left_bytes >= 0:
            break
    tasks = tasks_as_held(merging, mesh)
    found = schedule(tasks, replay, held_bytes, peak_bytes(tasks, range(len(tasks))) + max(0, left_bytes))
    return _described(merging, mesh, degrees, estimates, tasks, found)


def _described(
    outcome: Outcome,
    mesh: Mesh,
    degrees: Mapping[str, int],
    estimates: Estimates,
    tasks: tuple[Task, ...],
    found: Scheduled | None,
) -> Overlapped:
    """Return the decisions that a schedule of tasks stands for, and what is predicted of the step that follows it."""
    decisions = outcome.decisions(mesh, degrees)
    order = range(len(tasks)) if found is None else found.order
    streams = {} if found is None else own_streams(tasks, order)
    tasks = tuple(on_streams(tasks, streams))
    step = replay(tasks, order)
    exposed_s: dict[int, float] = {}
    stream_of: dict[int, str] = {}
    for task, seconds in zip(tasks, step.exposed_s, strict=True):
        exposed_s[task.kind] = exposed_s.get(task.kind, 0.0) + seconds
        stream_of[task.kind] = task.stream
    decisions = replace(
        decisions,
        collectives=tuple(
            replace(each, exposed_s=exposed_s.get(kind, 0.0), stream=stream_of.get(kind, each.stream))
            for kind, each in enumerate(decisions.collectives)
        ),
        streams=streams,
    )
    warnings: tuple[Warned, ...] = ()
    if found is not None:
        decisions = replace(
            decisions,
            ahead=tuple(_ahead(tasks[index], tasks[place]) for index, place in found.ahead.items()),
            deferred={
                tasks[index].name: "" if place == END else tasks[place].name for index, place in found.deferred.items()
            },
        )
        if found.hindered and not found.ahead:
            warnings = (_no_prefetch(found.hindered, estimates),)
    more_bytes = max(0, step.peak_bytes - peak_bytes(tasks, range(len(tasks))))
    held = outcome.memory()
    memory = replace(held, temporary=held.temporary + more_bytes)
    estimates = replace(estimates, memory=memory, peak_memory_bytes=memory.total, timeline=spans(tasks, order, step))
    return Overlapped(decisions, estimates, warnings)


def tasks_as_held(outcome: Outcome, mesh: Mesh) -> tuple[Task, ...]:
    """Return the step as tasks that hold, in the order given, what the outcome's curve of memory has.

    Of several micro-batches they are those of one, with what runs once a step. Other orders differ from that curve by
    the results that they keep longer or make earlier. Of a collective the curve has no place of its own; what is beside
    it is the least of the operators around it.
    """
    tasks = tasks_of(outcome, mesh)
    curve, position = outcome.memory_curve, outcome.graph.position
    held = held_bytes(tasks, range(len(tasks)))
    beside = [
        None if task.communicates else round(float(curve[position[task.name]])) - own
        for task, own in zip(tasks, held, strict=True)
    ]
    before, behind = [*accumulate(beside, _latest)], [*accumulate(reversed(beside), _latest)][::-1]
    around = [min((each for each in both if each is not None), default=0) for both in zip(before, behind, strict=True)]
    return tuple(replace(task, beside_bytes=size) for task, size in zip(tasks, around, strict=True))


def _latest(before: int | None, own: int | None) -> int | None:
    return before if own is None else own


def _ahead(task: Task, before: Task) -> Ahead:
    return Ahead(axis=axis_of(task.stream), phase=task.phase, tensor=task.gathers, before=before.name)


def _no_prefetch(gathers: int, estimates: Estimates) -> Warned:
    spare = max(0, estimates.memory_budget_bytes - estimates.memory.total)
    return Warned(
        code="no-prefetch",
        text=(
            f"{gathers} gathers of parameters are issued only where they are read: the plan leaves "
            f"{format_bytes(spare)} of {format_bytes(estimates.memory_budget_bytes)} for copies held ahead of use; a "
            "smaller --memory-margin or recomputation (--fix recompute=full) makes room"
        ),
    )


def own_streams(tasks: Sequence[Task], order: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return, by axis, the kinds of collectives that the step is faster with on a stream of their own."""
    found: dict[str, tuple[str, ...]] = {}
    best_s = replay(tasks, order).step_s
    for axis in dict.fromkeys(task.stream for task in tasks if task.communicates):
        for kind in (PARAMETERS, GRADIENTS):
            tried = {**found, axis: (*found.get(axis, ()), kind)}
            made = tuple(on_streams(tasks, tried))
            if made == tuple(tasks):
                continue
            step_s = replay(made, order).step_s
            if step_s < best_s * (1.0 - _WORTH):
                found, best_s = tried, step_s
    return found


_WORTH = 1e-3
"""Share of the step that a process group of its own has to save: each takes memory and threads of the library."""


def on_streams(tasks: Sequence[Task], streams: Mapping[str, Sequence[str]]) -> Iterator[Task]:
    """Yield the tasks with the streams that the plan gives their collectives."""
    for task in tasks:
        kind = PARAMETERS if task.gathers else GRADIENTS if task.reduces else ""
        if task.communicates and kind in streams.get(task.stream, ()):
            yield replace(task, stream=stream_name(task.stream, kind))
        else:
            yield task


def spans(tasks: Sequence[Task], order: Sequence[int], found: Replay) -> tuple[Span, ...]:
    """Return what one device does, by time; computations of one module that follow each other at once are one span."""
    made: list[Span] = []
    for index in order:
        task, start_s, end_s = tasks[index], found.start_s[index], found.end_s[index]
        if task.communicates:
            exposed_s = found.exposed_s[index]
            made.append(
                Span(
                    name=task.name,
                    stream=task.stream,
                    start_s=start_s,
                    end_s=end_s,
                    exposed_s=exposed_s,
                    kind=task.kind,
                )
            )
            if task.issue_s:
                issued_s = start_s + task.issue_s
                made.append(Span(name=issuing(task.name), stream=COMPUTE, start_s=start_s, end_s=issued_s))
        elif task.seconds:
            name = f"{task.phase} {block_of(task.module) or task.name}"
            made.append(Span(name=name, stream=COMPUTE, start_s=start_s, end_s=end_s))
    made += [
        Span(name=waiting(tasks[index].name), stream=COMPUTE, start_s=start_s, end_s=end_s)
        for index, start_s, end_s in found.waits
    ]
    made.sort(key=lambda each: (each.stream, each.start_s, each.end_s))
    return tuple(sorted(_joined(made), key=lambda each: each.start_s))


def _joined(made: Sequence[Span]) -> Iterator[Span]:
    """Yield spans of one stream in order, computations of equal name that follow each other at once as one."""
    last: Span | None = None
    for each in made:
        alike = last is not None and each.name == last.name and each.stream == last.stream == COMPUTE
        if last is not None and alike and abs(each.start_s - last.end_s) < _INSTANT_S:
            last = replace(last, end_s=each.end_s)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


_INSTANT_S = 1e-12
"""Computations that are no further apart follow each other at once."""


def pipeline_spans(timeline: Timeline) -> tuple[Span, ...]:
    """Return what every rank of a pipeline does."""
    return tuple(
        Span(
            name=event.action.words,
            stream=event.stream,
            start_s=event.start_s,
            end_s=event.end_s,
            rank=number,
        )
        for number, rank in enumerate(timeline.ranks)
        for event in (*rank.events, *rank.sends)
    )
