"""In which order one device issues its step: gathers ahead of their use, operators beside collectives in flight.

A list scheduler that starts from an order in which the step can run and moves tasks one kind after another; what a
simulation of the step finds slower, or larger than the memory allows, is taken back. So the order found is never worse
than the one given, and it is one order for all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from autopar.ir.tasks import Task, breaks

REACH = 96
"""Operators looked at, backwards from the issue of a collective, for work to do while it is under way."""

END = -1
"""In place of a task: behind all of them."""

_WORTH = 1e-9
"""Share of the step below which a difference of two simulated steps is rounding."""


class Replayed(Protocol):
    """What a simulation says of an order (`autopar.simulate.streams.Replay`)."""

    @property
    def step_s(self) -> float:
        """Return the seconds of the step."""

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes held at once."""

    @property
    def start_s(self) -> Sequence[float]:
        """Return when each task begins; of a collective, its issue."""

    @property
    def end_s(self) -> Sequence[float]:
        """Return when each task is done."""

    @property
    def waits(self) -> Sequence[tuple[int, float, float]]:
        """Return when computation stands still for which collective."""


Simulate = Callable[[Sequence[Task], Sequence[int]], Replayed]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An order of tasks, and what it differs in from the one given."""

    order: tuple[int, ...]
    ahead: Mapping[int, int] = field(default_factory=dict)
    """Gathers that are issued early: before which task, in the order in which they are issued."""

    deferred: Mapping[int, int] = field(default_factory=dict)
    """Tasks that run later, with all that follows from them: before which task, or at the `END`."""

    hindered: int = 0
    """Gathers that would be issued earlier if there were memory."""


def schedule(
    tasks: Sequence[Task],
    simulate: Simulate,
    held_bytes: Callable[[Sequence[Task], Sequence[int]], Sequence[int]],
    limit_bytes: int,
) -> Scheduled:
    """Return an order of tasks, given in one in which they can run, that takes at most as long and fits.

    What tasks make may be held up to `limit_bytes`, or what the given order holds if that is more.
    """
    given = tuple(range(len(tasks)))
    before = simulate(tasks, given)
    limit = max(limit_bytes, before.peak_bytes)
    best, found = Scheduled(given), before
    moved, hindered = _ahead(tasks, held_bytes(tasks, given), limit)
    while moved:
        order = _inserted(tasks, moved)
        tried = simulate(tasks, order)
        if not breaks(tasks, order) and tried.peak_bytes <= limit and tried.step_s <= before.step_s:
            best, found = Scheduled(order, moved), tried
            break
        # What is held ahead of use is estimated per gather; together they may be too much: fewer, from the first on.
        moved = dict(list(moved.items())[: len(moved) // 2])
    best, found = _yielding(tasks, best, found, simulate, limit)
    best, found = _beside(tasks, best, found, simulate, limit)
    return Scheduled(best.order, best.ahead, best.deferred, hindered)


def _ahead(tasks: Sequence[Task], held: Sequence[int], limit: int) -> tuple[dict[int, int], int]:
    """Return before which task each gather is issued, and how many memory keeps from being issued as early as wanted.

    From the last use to the first: each gather is to be over when its first reader begins and the next one of its
    stream is to start. It is issued one gather's time before that, at the start of some operator.
    """
    first_reader = _first_readers(tasks)
    begin_s, clock = [], 0.0
    starts: dict[str, int] = {}
    for place, task in enumerate(tasks):
        if place and task.phase != tasks[place - 1].phase:
            clock = 0.0
        begin_s.append(clock)
        clock += 0.0 if task.communicates else task.seconds
        starts.setdefault(task.phase, place)
    made_by = {i: made for i in range(len(tasks)) if (made := _made_by(tasks, i)) is not None}
    moving = set().union(*made_by.values())
    anchors = _anchors(tasks, moving)
    busy: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for place, task in enumerate(tasks):
        if task.communicates and not task.gathers:
            begun = busy.setdefault((task.stream, task.phase), [])
            start_s = max(begin_s[place], begun[-1][1] if begun else 0.0)
            begun.append((start_s, start_s + task.seconds))
    extra = [0] * len(tasks)
    wanted: dict[int, int] = {}
    next_s: dict[tuple[str, str], float] = {}
    hindered = 0
    for index in reversed(made_by):
        task = tasks[index]
        key = (task.stream, task.phase)
        use = first_reader.get(index, index)
        latest_s = min(begin_s[use], next_s.get(key, begin_s[use])) - task.seconds
        next_s[key] = latest_s
        own = [a for a in anchors[: bisect_right(anchors, index)] if a >= starts[task.phase]]
        wished_s = latest_s - task.seconds
        for begun_s, until_s in reversed(busy.get(key, ())):
            if begun_s <= latest_s and until_s > wished_s:  # it would wait for that reduction: rather before it
                wished_s = min(wished_s, begun_s - task.seconds)
        target = next((a for a in reversed(own) if begin_s[a] <= wished_s), own[0] if own else index)
        place = index
        while place > target and held[place - 1] + extra[place - 1] + task.makes_bytes <= limit:
            place -= 1
        usable = [a for a in own if a >= place]
        hindered += place > target
        if usable and usable[0] < index:
            wanted[index] = usable[0]
            for at in range(usable[0], index):
                extra[at] += task.makes_bytes
    return _in_turn(tasks, wanted), hindered


def _anchors(tasks: Sequence[Task], moving: set[int]) -> list[int]:
    """Return the operators that a gather may be issued before: those that take time and do not move with one."""
    return [
        place for place, task in enumerate(tasks) if not task.communicates and task.seconds > 0 and place not in moving
    ]


def _in_turn(tasks: Sequence[Task], wanted: dict[int, int]) -> dict[int, int]:
    """Return where gathers are issued, none before an earlier one of its stream."""
    ordered = sorted(wanted)
    for earlier, later in pairwise(ordered):
        if tasks[earlier].stream == tasks[later].stream:
            wanted[later] = max(wanted[later], wanted[earlier])
    return {index: wanted[index] for index in ordered}


_TURNS = 4
"""Times that gathers make way for what computation waits for; each may be in the way of the next wait then."""


def _yielding(
    tasks: Sequence[Task], best: Scheduled, found: Replayed, simulate: Simulate, limit: int
) -> tuple[Scheduled, Replayed]:
    """Return the schedule with gathers that slow down what computation waits for issued behind that wait.

    They share a link, and the reduction of a layer's outputs is needed at once, a parameter many layers ahead is not.
    """
    first_reader = _first_readers(tasks)
    moving = set().union(*(_made_by(tasks, index) or () for index in best.ahead))
    anchors = _anchors(tasks, moving)
    for _ in range(_TURNS):
        later = dict(best.ahead)
        for waited, start_s, end_s in found.waits:
            reader = first_reader.get(waited)
            if tasks[waited].gathers or reader is None:
                continue
            at = bisect_right(anchors, reader)  # the wait is where the reader begins
            place = anchors[at] if at < len(anchors) else len(tasks)
            for index in best.ahead:
                under_way = found.start_s[index] < end_s and found.end_s[index] > start_s
                if under_way and tasks[index].link == tasks[waited].link and later[index] < place < index:
                    later[index] = place
        if later == best.ahead:
            break
        later = _in_turn(tasks, later)
        order = _inserted(tasks, later)
        tried = simulate(tasks, order)
        faster = tried.step_s < found.step_s * (1.0 - _WORTH)
        if not faster or tried.peak_bytes > limit or breaks(tasks, order):
            break
        best, found = Scheduled(order, later), tried
    return best, found


def _made_by(tasks: Sequence[Task], index: int) -> set[int] | None:
    """Return the views and casts of parameters that a gather of parameters reads; `None`: it cannot move."""
    if not (tasks[index].communicates and tasks[index].gathers):
        return None
    found: set[int] = set()
    todo = list(tasks[index].reads)
    while todo:
        each = todo.pop()
        if tasks[each].phase != tasks[index].phase or each in found:
            continue  # forward has ended where backward begins
        if tasks[each].communicates:
            return None
        found.add(each)
        todo += tasks[each].reads
    return found


def _first_readers(tasks: Sequence[Task]) -> dict[int, int]:
    found: dict[int, int] = {}
    for place, task in enumerate(tasks):
        for read in task.reads:
            found.setdefault(read, place)
    return found


def _inserted(tasks: Sequence[Task], moved: Mapping[int, int]) -> tuple[int, ...]:
    """Return the order in which gathers are issued before these places, with what they read."""
    before: dict[int, list[int]] = {}
    for index, place in moved.items():
        before.setdefault(place, []).extend([*sorted(_made_by(tasks, index) or ()), index])
    order: dict[int, None] = {}
    for index in range(len(tasks)):
        order.update(dict.fromkeys((*before.get(index, ()), index) if index not in moved else before.get(index, ())))
    return tuple(order)


def _beside(
    tasks: Sequence[Task], best: Scheduled, found: Replayed, simulate: Simulate, limit: int
) -> tuple[Scheduled, Replayed]:
    """Return the schedule with operators moved to where computation stood still, one kind of collective at a time."""
    stalls: dict[int, float] = {}
    for index, start_s, end_s in found.waits:
        stalls[tasks[index].kind] = stalls.get(tasks[index].kind, 0.0) + end_s - start_s
    readers, before = _readers(tasks), (best, found)
    for kind in sorted(stalls, key=lambda each: (-stalls[each], each)):
        waits = [(index, end_s - start_s) for index, start_s, end_s in found.waits if tasks[index].kind == kind]
        given = best
        for share in (1.0,) if all(readers[index] for index, _ in waits) else _AT_THE_END:
            line, deferred = _Line(tasks, readers, list(given.order)), dict(given.deferred)
            for index, stall_s in waits:
                deferred.update(_candidates(line, index, share * stall_s))
            if len(deferred) == len(given.deferred):
                continue
            tried = simulate(tasks, line.order)
            faster = tried.step_s < found.step_s * (1.0 - _WORTH)
            if faster and tried.peak_bytes <= limit:
                best, found = Scheduled(tuple(line.order), given.ahead, deferred), tried
    return before if breaks(tasks, best.order) else (best, found)


_AT_THE_END = (1.0, 0.5, 0.25, 0.125)
"""Shares of a wait at the end of the step that are filled, to see which is best: what fills it mostly makes gradients,
and those are to be reduced, too."""


@dataclass
class _Line:
    """An order that is being changed, and where in it each task is."""

    tasks: Sequence[Task]
    readers: Sequence[Sequence[int]]
    """Of each task, those that read its result."""

    order: list[int]
    place: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Find the places."""
        self.place = [0] * len(self.order)
        self._note(0, len(self.order))

    def following(self, first: int, end: int, most_s: float, never: int) -> set[int] | None:
        """Return a task and all before a place that depend on it; `None` if that takes longer, or `never` is of them.

        Few tasks follow from most, and most of the others are refused: looking at all between would take longer than
        everything else in planning a deep model.
        """
        found, todo, spent_s = {first}, [first], 0.0
        while todo:
            each = todo.pop()
            spent_s += 0.0 if self.tasks[each].communicates else self.tasks[each].seconds
            if each == never or spent_s > most_s:
                return None
            new = {one for one in self.readers[each] if self.place[one] < end and one not in found}
            found |= new
            todo += new
        return found

    def defer(self, some: set[int], begin: int, end: int) -> None:
        """Move tasks that are between two places behind the others there."""
        part = self.order[begin:end]
        self.order[begin:end] = [*(each for each in part if each not in some), *(each for each in part if each in some)]
        self._note(begin, end)

    def _note(self, begin: int, end: int) -> None:
        for at in range(begin, end):
            self.place[self.order[at]] = at


def _readers(tasks: Sequence[Task]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        for read in task.reads:
            found[read].append(place)
    return found


def _candidates(line: _Line, index: int, stall_s: float) -> Iterator[tuple[int, int]]:
    """Move operators from before a collective's issue to before its first reader, until they fill the wait.

    Yields each operator moved and that reader, `END` if nothing reads it: then operators move to the end of the step.
    What follows from an operator goes with it. `line` is edited.
    """
    tasks, order = line.tasks, line.order
    reader = min(line.readers[index], key=line.place.__getitem__, default=END)
    phase = tasks[index].phase
    if reader == END and phase != tasks[order[-1]].phase:
        return
    end = len(order) if reader == END else line.place[reader]
    at, looked = line.place[index] - 1, 0
    while at >= 0 and stall_s > 0 and looked < REACH and tasks[order[at]].phase == phase:
        candidate = order[at]
        at -= 1
        if tasks[candidate].communicates:
            continue
        looked += 1
        if not tasks[candidate].seconds:
            continue
        following = line.following(candidate, end, 2 * stall_s, index)
        if following is None:
            continue
        line.defer(following, at + 1, end)
        stall_s -= sum(tasks[each].seconds for each in sorted(following) if not tasks[each].communicates)
        yield candidate, reader
