"""One device's step on its streams: when each task runs, what computation waits for, and what is held.

Computations run one after another; a collective begins when it is issued in their order, what it reads is there and
those before it on its stream are done. Collectives of several streams on one link level share its bandwidth evenly.
What reads a collective's result waits for it; that wait, and what issuing takes, is its exposed time.

What a collective takes from computation while it is under way is taken when it is issued; its link is busy for all of
its seconds nevertheless, so what queues behind it does not begin earlier.

Not modelled: latency, which two collectives at once need not share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.tasks import Task


@dataclass(frozen=True)
class Replay:
    """One step in one order of tasks."""

    tasks: Sequence[Task] = field(repr=False)
    order: tuple[int, ...] = field(repr=False)
    start_s: tuple[float, ...]
    """Of each computation, when it begins; of a collective, when its issue does."""

    end_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    """Of each collective, the seconds that computation gave for it: to issue it and to wait for it."""

    waits: tuple[tuple[int, float, float], ...]
    """When computation stands still for which collective: task, from, to."""

    step_s: float

    @cached_property
    def peak_bytes(self) -> int:
        """Return the most bytes held at once; of orders that are slower nobody asks."""
        return peak_bytes(self.tasks, self.order)


@dataclass
class _Link:
    """The collectives under way on one link level; the first of each stream progress, evenly."""

    ends: list[float]
    now: float = 0.0
    queues: dict[str, deque[list[float]]] = field(default_factory=dict)

    def issue(self, task: int, stream: str, at_s: float, seconds: float) -> None:
        self.advance(at_s)
        self.queues.setdefault(stream, deque()).append([task, seconds])

    def advance(self, until_s: float) -> None:
        """Let time go on until then."""
        while self.queues and self.now < until_s:
            self._progress(until_s)
        self.now = max(self.now, until_s)

    def finish(self, task: int) -> float:
        """Let time go on until a task is done, and return that moment."""
        while self.ends[task] < 0:
            self._progress(float("inf"))
        return self.ends[task]

    def _progress(self, until_s: float) -> None:
        sharing = len(self.queues)
        least = min(queue[0][1] for queue in self.queues.values())
        if self.now + least * sharing > until_s:
            for queue in self.queues.values():
                queue[0][1] -= (until_s - self.now) / sharing
            self.now = until_s
            return
        self.now += least * sharing
        for stream, queue in list(self.queues.items()):
            queue[0][1] -= least
            if queue[0][1] <= 0.0:
                self.ends[int(queue.popleft()[0])] = self.now
                if not queue:
                    del self.queues[stream]


def replay(tasks: Sequence[Task], order: Sequence[int]) -> Replay:
    """Return the step in which tasks are issued in this order, each after what it reads."""
    start, end = [0.0] * len(tasks), [-1.0] * len(tasks)
    exposed = [0.0] * len(tasks)
    links: dict[str, _Link] = {}
    waits: list[tuple[int, float, float]] = []
    now = 0.0

    def wait(index: int) -> None:
        nonlocal now
        done = end[index] if end[index] >= 0 else links[tasks[index].link].finish(index)
        if done > now:
            exposed[index] += done - now
            waits.append((index, now, done))
            now = done

    for index in order:
        task = tasks[index]
        for read in task.reads:
            if tasks[read].communicates:
                wait(read)
        if task.communicates:
            start[index] = now
            begun = now + task.issue_s - task.within_s
            now += task.issue_s
            exposed[index] += task.issue_s
            links.setdefault(task.link, _Link(end)).issue(index, task.stream, begun, task.seconds)
        else:
            start[index] = now
            now += task.seconds
            end[index] = now
    for index in order:
        if tasks[index].communicates:
            wait(index)
    return Replay(tasks, tuple(order), tuple(start), tuple(end), tuple(exposed), tuple(waits), now)


def peak_bytes(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """Return the most bytes held at once: results from their making to their last reader, and what is beside them."""
    return max(held_bytes(tasks, order), default=0)


def held_bytes(tasks: Sequence[Task], order: Sequence[int]) -> list[int]:
    """Return the bytes held while each task of the order runs."""
    owner = list(range(len(tasks)))
    for index in sorted(range(len(tasks))):
        base = tasks[index].memory_of
        if base is not None:
            owner[index] = owner[base]
    place = {index: at for at, index in enumerate(order)}
    last = [place[index] for index in range(len(tasks))]
    for index, task in enumerate(tasks):
        for read in (*task.reads, index):
            last[owner[read]] = max(last[owner[read]], place[index])
        if task.kept:
            last[owner[index]] = len(order)
    change = [0] * (len(order) + 2)
    for index, task in enumerate(tasks):
        if task.makes_bytes and owner[index] == index:
            change[place[index]] += task.makes_bytes
            change[min(last[index], len(order)) + 1] -= task.makes_bytes
    held, curve = 0, []
    latest, beside = -1, tasks[order[0]].beside_bytes if order else 0
    for at, index in enumerate(order):
        held += change[at]
        task = tasks[index]
        if index > latest and not task.communicates:
            latest, beside = index, task.beside_bytes
        # What was deferred past others has what is beside these: not what was there where it came from.
        curve.append(held + min(beside, task.beside_bytes))
    return curve
