"""Actions of all ranks in an order in which they can happen, without running them; what blocks, if something does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.schedule import COMPUTE, Action, Kind, PipelineSchedule

Key = tuple[int, str, int]
"""What an action leaves behind: (stage, kind, micro-batch); a full backward leaves the input gradient, `I`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on."""

    rank: int
    action: Action
    missing: Action
    """What it waits for; an input gradient may also come from a full backward."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole schedule, as far as it goes."""

    order: tuple[int, ...]
    """The rank that does its next action, producers before consumers."""

    waits: tuple[Wait, ...]
    """Ranks left waiting; empty where the schedule runs to its end."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Which stages feed which."""

    sources: tuple[tuple[int, ...], ...]
    """Of each stage, the stages whose values it reads."""

    targets: tuple[tuple[int, ...], ...]
    """Of each stage, the stages that read its values and send gradients back."""


def neighbours(stages: int, skips: Iterable[tuple[int, int]] = ()) -> Neighbours:
    """Return the stages before and after each: its neighbours in the chain, and the other ends of `skips`."""
    pairs = sorted({*((stage, stage + 1) for stage in range(stages - 1)), *skips})
    return Neighbours(
        tuple(tuple(source for source, target in pairs if target == stage) for stage in range(stages)),
        tuple(tuple(target for source, target in pairs if source == stage) for stage in range(stages)),
    )


def replay(schedule: PipelineSchedule, skips: Sequence[tuple[int, int]] = (), *, rendezvous: bool = False) -> Replay:
    """Return the actions in an order in which they can happen, and the ranks that get stuck.

    Where the schedule has sends and receives, a computation waits for its receives and a receive for its send; else
    for the computation on the other stage. A send waits for nothing but its value, or with `rendezvous` also for the
    next stage's rank to arrive at the receive, as on one NCCL communicator; skip connections are always buffered.
    """
    needs = _Needs(schedule, neighbours(schedule.stages, skips), rendezvous)
    position = [0] * schedule.ranks
    done: set[Key] = set()
    waiting: dict[Key, list[int]] = {}
    blocked: dict[int, Key] = {}
    order: list[int] = []
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.actions[rank]
        blocked.pop(rank, None)
        while position[rank] < len(row):
            action = row[position[rank]]
            if rendezvous and action.kind not in COMPUTE:
                arrival = (action.stage, _ARRIVED + action.kind, action.microbatch)
                done.add(arrival)
                ready.extend(waiting.pop(arrival, ()))
            wanted = needs.of(action)
            if not done.issuperset(wanted):
                missing = next(need for need in wanted if need not in done)
                waiting.setdefault(missing, []).append(rank)
                blocked[rank] = missing
                break
            order.append(rank)
            position[rank] += 1
            stage, kind, microbatch = action
            left = (stage, "I" if kind == "B" else kind, microbatch)
            done.add(left)
            if left in waiting:
                ready.extend(waiting.pop(left))
    waits = (Wait(rank, schedule.actions[rank][position[rank]], _as_action(blocked[rank])) for rank in sorted(blocked))
    return Replay(tuple(order), tuple(waits))


def in_order(schedule: PipelineSchedule, replayed: Replay) -> Iterator[tuple[int, Action]]:
    """Yield rank and action in the replayed order, producers before consumers."""
    rows = [iter(row) for row in schedule.actions]
    return ((rank, next(rows[rank])) for rank in replayed.order)


_ARRIVED = "at "


class _Needs:
    """What has to have happened before an action."""

    def __init__(self, schedule: PipelineSchedule, near: Neighbours, rendezvous: bool) -> None:
        self._near = near
        self._rank_of = schedule.rank_of
        self._transfers = schedule.has_transfers
        self._rendezvous = rendezvous

    def of(self, action: Action) -> Sequence[Key]:
        """Return the keys that have to be there before an action."""
        stage, kind, microbatch = action
        if kind == "F":
            return self._inputs(stage, "F", microbatch)
        if kind in ("B", "I"):
            return [(stage, "F", microbatch), *self._inputs(stage, "I", microbatch)]
        if kind == "W":
            return [(stage, "I", microbatch)]
        return self._transfer(stage, kind, microbatch)

    def _inputs(self, stage: int, kind: Kind, microbatch: int) -> list[Key]:
        """Return the values (`F`) or gradients (`I`) of other stages that a stage reads."""
        others = (self._near.sources if kind == "F" else self._near.targets)[stage]
        if not self._transfers:
            return [(other, kind, microbatch) for other in others]
        here = self._rank_of[stage]
        received = "RECV_F" if kind == "F" else "RECV_B"
        return [
            (other, kind, microbatch) if self._rank_of[other] == here else (stage, received, microbatch)
            for other in others
        ]

    def _transfer(self, stage: int, kind: Kind, microbatch: int) -> list[Key]:
        forward = kind.endswith("F")
        partner = "RECV_F" if forward else "RECV_B"
        if kind.startswith("SEND"):
            value: Key = (stage, "F" if forward else "I", microbatch)
            beside = stage + 1 if forward else stage - 1
            meets = self._rendezvous and 0 <= beside < len(self._rank_of)
            return [value, (beside, _ARRIVED + partner, microbatch)] if meets else [value]
        others = (self._near.sources if forward else self._near.targets)[stage]
        send = "SEND_F" if forward else "SEND_B"
        return [(other, send, microbatch) for other in others if self._rank_of[other] != self._rank_of[stage]]


def _as_action(key: Key) -> Action:
    stage, kind, microbatch = key
    return Action.parse(f"{stage}{kind.removeprefix(_ARRIVED)}{microbatch}")
