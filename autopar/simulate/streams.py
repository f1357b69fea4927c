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

import numpy as np

from autopar.ir.table import Bools, Ints
from autopar.ir.tasks import COMPUTE, Task


@dataclass(frozen=True)
class _Laid:
    """What every order of some tasks is asked of them."""

    awaited: list[tuple[int, ...]]
    """Of each task, the collectives whose results it reads."""

    communicates: Bools
    owner: Ints
    """Of each task, the one whose memory its result is."""

    reader: Ints
    read: Ints
    """Of each task and what it reads, itself among it: who reads, and whose memory."""

    kept: Ints
    """Whose memory outlives the step."""

    makes: Ints
    """Who makes memory."""

    makes_bytes: Ints
    beside_bytes: Ints

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> _Laid:
        communicates = [task.communicates for task in tasks]
        owner = list(range(len(tasks)))
        for index, task in enumerate(tasks):
            if task.memory_of is not None:
                owner[index] = owner[task.memory_of]
        reads = [(index, owner[read]) for index, task in enumerate(tasks) for read in (*task.reads, index)]
        pairs = np.array(reads, dtype=np.int64).reshape(len(reads), 2)
        makes = [index for index, task in enumerate(tasks) if task.makes_bytes and owner[index] == index]
        return cls(
            [tuple(read for read in task.reads if communicates[read]) for task in tasks],
            np.array(communicates, dtype=np.bool_),
            np.array(owner, dtype=np.int64),
            pairs[:, 0],
            pairs[:, 1],
            np.array([owner[index] for index, task in enumerate(tasks) if task.kept], dtype=np.int64),
            np.array(makes, dtype=np.int64),
            np.array([tasks[index].makes_bytes for index in makes], dtype=np.int64),
            np.array([task.beside_bytes for task in tasks], dtype=np.int64),
        )


_last: list[tuple[Sequence[Task], _Laid]] = []
"""The tasks that were asked about last: a schedule is found by asking about one order after another of the same."""


def _laid(tasks: Sequence[Task]) -> _Laid:
    known = _last[0] if _last else None
    if known is not None and known[0] is tasks:
        return known[1]
    found = _Laid.of(tasks)
    if isinstance(tasks, tuple):  # what may change is not remembered
        _last[:] = [(tasks, found)]
    return found


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

    awaited = _laid(tasks).awaited
    for index in order:
        for read in awaited[index]:
            wait(read)
        task = tasks[index]
        start[index] = now
        if task.stream != COMPUTE:
            begun = now + task.issue_s - task.within_s
            now += task.issue_s
            exposed[index] += task.issue_s
            links.setdefault(task.link, _Link(end)).issue(index, task.stream, begun, task.seconds)
        else:
            now += task.seconds
            end[index] = now
    for index in order:
        if tasks[index].stream != COMPUTE:
            wait(index)
    return Replay(tasks, tuple(order), tuple(start), tuple(end), tuple(exposed), tuple(waits), now)


def peak_bytes(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """Return the most bytes held at once: results from their making to their last reader, and what is beside them."""
    return max(held_bytes(tasks, order), default=0)


def held_bytes(tasks: Sequence[Task], order: Sequence[int]) -> list[int]:
    """Return the bytes held while each task of the order runs."""
    if not tasks:
        return []
    laid, count = _laid(tasks), len(tasks)
    places = np.array(order, dtype=np.int64)
    place = np.empty(count, dtype=np.int64)
    place[places] = np.arange(count)
    last = place.copy()
    np.maximum.at(last, laid.read, place[laid.reader])
    last[laid.kept] = count
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, place[laid.makes], laid.makes_bytes)
    np.subtract.at(change, last[laid.makes] + 1, laid.makes_bytes)
    # What was deferred past others has what is beside these: not what was there where it came from.
    latest = np.maximum.accumulate(np.where(laid.communicates[places], -1, places))
    beside = laid.beside_bytes[np.where(latest >= 0, latest, places[0])]
    curve: list[int] = (change.cumsum()[:count] + np.minimum(beside, laid.beside_bytes[places])).tolist()
    return curve
