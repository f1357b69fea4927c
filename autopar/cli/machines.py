"""How the machines of one run end together: each tells the others, through the store they met by, how its ranks ended.

torchrun's own barrier knows nothing of failures: a machine whose ranks have ended waits 300 s for one that failed, deaf
to signals, and then ends with 0; one whose ranks hang for a lost peer goes on until its library's timeout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT_S = 1.0
"""Between two signs of life."""

SILENT_S = 60.0
"""Without a sign of life after which a machine counts as lost."""

GRACE_S = 10.0
"""For ranks to find by themselves what they miss of a machine that failed: they name the collective."""

TOLD_S = 3.0
"""For another machine to tell why it failed, where ranks of this one only lost its ranks."""


@dataclass(frozen=True, slots=True)
class End:
    """How the ranks of one machine ended.

    `lost` says that they only lost others, which failed before; `asked`, that somebody asked the machine to end.
    """

    node: int
    status: int
    text: str = ""
    lost: bool = False
    asked: bool = False

    def __str__(self) -> str:
        return f"on machine {self.node} (--node-rank {self.node}), {self.text}"


class MachineFailedError(Exception):
    """Another machine of the run failed; `ours` says what became of the ranks of this one."""

    def __init__(self, end: End, ours: str) -> None:
        super().__init__(f"{end}; those of this machine {ours}")
        self.end = end


@dataclass
class Machines:
    """What one of `count` machines, number `node`, tells the others and hears of them."""

    store: Store
    node: int
    count: int
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    _beaten: float = field(default=float("-inf"), init=False)
    _failed: tuple[float, End] | None = field(default=None, init=False)
    _heard: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Leave a machine that was not heard of yet as much time as one that was."""
        self._heard = dict.fromkeys(self._others(), (0, self.clock()))

    def go_on(self) -> None:
        """Give a sign of life, and look whether the others still work; called while the ranks of this machine run.

        Raises:
            MachineFailedError: another machine failed, and the ranks of this one have had time to find out.
        """
        now = self.clock()
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        failed = self._look()
        if failed is not None:
            since, _ = self._failed = self._failed or (now, failed)
            if failed.asked or now - since >= GRACE_S:
                self.leave()
                raise MachineFailedError(failed, "were stopped")

    def succeed(self) -> None:
        """Tell that the ranks of this machine have ended well, and wait for those of all others.

        Raises:
            MachineFailedError: those of another machine failed, or it is not heard of any more.
        """
        self._tell(End(self.node, 0))
        while True:
            failed = self._look()
            if failed is not None:
                self.leave()
                raise MachineFailedError(failed, "had ended with 0")
            if all(self._end(other) for other in self._others()):
                return self.leave()
            self.pause(0.1)

    def fail(self, end: End) -> End:
        """Tell how the ranks of this machine failed; return how those did that failed first, here or elsewhere."""
        self._tell(end)
        first = end
        if end.lost:
            until = self.clock() + TOLD_S
            while first.lost and self.clock() < until:
                first = next((each for each in self._ends() if each.status and not each.lost), first)
                self.pause(0.1)
        self.leave()
        return first

    def leave(self) -> None:
        """Part from the others; the first machine, whose process keeps the store, waits until they have heard."""
        try:
            self.store.set(f"left/{self.node}", "")
            until = self.clock() + GRACE_S + 2 * BEAT_S
            while self.node == 0 and self.clock() < until:
                if self.store.check([f"left/{other}" for other in self._others()]):
                    return
                self.pause(0.1)
        except RuntimeError:  # the first machine is gone, and the store with it
            return

    def _others(self) -> list[int]:
        return [each for each in range(self.count) if each != self.node]

    def _tell(self, end: End) -> None:
        try:
            self.store.set(f"end/{self.node}", json.dumps(asdict(end)))
        except RuntimeError:  # the first machine is gone, and the store with it
            return

    def _end(self, node: int) -> End | None:
        key = f"end/{node}"
        return End(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _ends(self) -> list[End]:
        try:
            return [end for other in self._others() if (end := self._end(other))]
        except RuntimeError:
            return []

    def _look(self) -> End | None:
        """Return how another machine failed, if one did: first one whose own ranks are the cause."""
        now = self.clock()
        try:
            self.store.add(f"beat/{self.node}", 1)
            ends = {other: self._end(other) for other in self._others()}
            for other, (beats, _) in self._heard.items():
                if (found := self.store.add(f"beat/{other}", 0)) != beats:
                    self._heard[other] = (found, now)
        except RuntimeError:
            return End(0, 1, "torchrun has ended or cannot be reached")
        failed = [end for end in ends.values() if end is not None and end.status]
        if failed:
            return min(failed, key=lambda end: (end.lost, end.node))
        silent = [other for other, end in ends.items() if end is None and now - self._heard[other][1] > SILENT_S]
        return End(silent[0], 1, f"torchrun has not been heard of for {SILENT_S:.0f} s") if silent else None
