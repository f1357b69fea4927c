"""One micro-batch's step, and two of them at once, as tasks: what `rewrite.batch_overlap` makes of programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costs.issued import is_shared, of_inputs
from autopar.costs.outcome import Outcome
from autopar.costs.segments import Segments
from autopar.costs.timing import Beyond
from autopar.ir.roles import gradient_values
from autopar.ir.tasks import Task


@dataclass(frozen=True)
class Pair:
    """Tasks of two micro-batches that run at once, in the order in which programs run them."""

    tasks: tuple[Task, ...]
    order: tuple[int, ...]


def chains(outcome: Outcome, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return a micro-batch's tasks with the time of those collectives that its own computation does not hide.

    The search has hidden all others, or they run once a step.
    """
    links = outcome.links
    kinds = {outcome.place(each): each for each in outcome.messages()}
    found = []
    for task in tasks:
        if task.communicates:
            issued = kinds[task.kind]
            if issued.overlapped or issued.times == 1:
                task = replace(task, seconds=0.0, issue_s=0.0, within_s=0.0)
            else:
                taken, hidden = links.message_s(issued.message), links.hidable_s(issued.message)
                task = replace(task, issue_s=taken - hidden, within_s=max(0.0, task.seconds - hidden))
        found.append(task)
    return tuple(found)


def paired(outcome: Outcome, tasks: Sequence[Task]) -> Pair:
    """Return the tasks of two micro-batches at once, those of one given in the order in which it runs them."""
    own, joined = _own(outcome, tasks)
    second = {index: len(tasks) + place for place, index in enumerate(sorted(own))}

    def again(index: int) -> int:
        return second.get(index, index)

    made = list(tasks)
    ends = {ref.op for ref in gradient_values(outcome.graph)}
    met = {read for index in joined for read in tasks[index].reads}
    for index in sorted(own):
        task = tasks[index]
        added = task.name in ends and index not in met  # to the first one's gradient, where it is made
        made.append(
            replace(
                task,
                name=f"{task.name}__second",
                reads=tuple(sorted(map(again, task.reads))),
                makes_bytes=0 if added else task.makes_bytes,
                memory_of=None if task.memory_of is None else again(task.memory_of),
                kept=False,
            )
        )
    for index in joined:
        reads = tasks[index].reads
        made[index] = replace(tasks[index], reads=tuple(sorted({*reads, *map(again, reads)})))
    order: list[int] = []
    for segment in _segments(tasks, own):
        order += [index for index in segment if index not in joined]
        order += [again(index) for index in segment if index in own or index in joined]
    return Pair(tuple(made), tuple(order))


def _own(outcome: Outcome, tasks: Sequence[Task]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tasks that each micro-batch has its own of, and those that reduce what both give, or follow that."""
    ops = of_inputs(outcome.graph)
    kinds = {outcome.place(each): each for each in outcome.messages()}
    own: set[int] = set()
    joined: set[int] = set()
    for index, task in enumerate(tasks):
        if any(read in joined for read in task.reads):
            joined.add(index)
            continue
        if task.communicates and is_shared(outcome.graph, kinds[task.kind]):
            joined.update([index] if any(read in own for read in task.reads) else [])
            continue
        moved = kinds[task.kind].source if task.communicates else None
        mine = task.name in ops or (moved is not None and moved.op in ops)
        if mine or any(read in own for read in task.reads):
            own.add(index)
    return frozenset(own), frozenset(joined)


def _segments(tasks: Sequence[Task], own: Collection[int]) -> Iterator[list[int]]:
    """Yield tasks in runs, each of which begins with a wait that the other micro-batch can compute behind."""
    run: list[int] = []
    waited: set[int] = set()
    computes = False
    phase = tasks[0].phase if tasks else ""
    for index, task in enumerate(tasks):
        waits = {read for read in task.reads if tasks[read].communicates and read in own} - waited
        if task.phase != phase or (index in own and waits and computes):
            yield run
            run, computes, phase = [], False, task.phase
        waited |= waits
        run.append(index)
        computes |= index in own and not task.communicates and task.memory_of is None
    yield run


def seconds_moved(outcome: Outcome, saved_s: Sequence[float], pairs: float) -> Beyond:
    """Return what a step of so many pairs takes beyond one by one, by segment; negative where that is less.

    `saved_s` is what a pair computes behind its own collectives, in forward and in backward. These are then under way
    beside others of their link; what both micro-batches share (gathers of parameters, reductions of gradients) happens
    once for both.
    """
    links, segments = outcome.links, Segments.of(outcome.graph)
    found = Beyond(np.zeros(segments.total), np.zeros(segments.total))
    chained, busy = np.zeros(segments.total), np.zeros(segments.total)
    apart = [each for each in outcome.messages() if each.times > 1]
    levels = {links.level(each.message.axis) for each in apart if each.overlapped}
    for each in apart:
        at, hidable = segments.of_op[each.at], links.hidable_s(each.message)
        if is_shared(outcome.graph, each):
            hidden = hidable if each.overlapped else 0.0
            found.hidden_s[at] -= pairs * hidden
            found.shown_s[at] -= pairs * (links.message_s(each.message) - hidden)
        elif not each.overlapped:
            chained[at] += 2.0 * hidable
            busy[at] += 2.0 * hidable if links.level(each.message.axis) in levels else 0.0
    for part, saved in zip((slice(0, segments.forward), slice(segments.forward, None)), saved_s, strict=True):
        whole = float(chained[part].sum())
        if whole:
            share = min(1.0, max(0.0, saved) / whole)
            found.shown_s[part] -= pairs * share * chained[part]
            found.hidden_s[part] += pairs * share * busy[part]
    return found
