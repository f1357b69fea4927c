"""What a pipeline does when: events in seconds since the step began, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.schedule import Action

COMPUTE_STREAM = "compute"


class Event(NamedTuple):
    """One action of one rank on one of its streams."""

    rank: int
    stream: str
    """`compute`, or `to RANK` for what it sends there; sends in both directions of a pair have their own stream."""

    action: Action
    start_s: float
    end_s: float


class MemoryPoint(NamedTuple):
    """From this moment to the next point, the rank holds these bytes."""

    at_s: float
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank's step. Compute, exposed transfers and bubble add up to the makespan."""

    events: tuple[Event, ...]
    """Computations in order."""

    sends: tuple[Event, ...]
    """Transfers to other ranks in the order of their start on each stream."""

    compute_s: float
    exposed_transfer_s: float
    """Waiting while the awaited message was on its way, and, where sends block, sending.

    What a late message delays on other ranks is bubble there.
    """

    bubble_s: float
    peak_bytes: int
    memory: tuple[MemoryPoint, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a pipeline."""

    ranks: tuple[RankTimeline, ...]

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the start to the end of the last computation."""
        return max((event.end_s for rank in self.ranks for event in rank.events[-1:]), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Return the share of all ranks' time that is bubble."""
        total = self.makespan_s * len(self.ranks)
        return sum(rank.bubble_s for rank in self.ranks) / total if total else 0.0

    @property
    def peak_bytes(self) -> int:
        """Return the largest of the ranks' peaks."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)
