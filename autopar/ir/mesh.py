"""The logical device mesh: named axes, major axis first, rank = row-major index.

Micro-batches are an axis in time: every rank runs its coordinates on it one after another. It comes first, decides
layouts like any other (the batch is split along it) and counts no ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXIS_NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""The field's names of parallel degrees, outermost first."""


TIME = "time"
"""Level of the axis of micro-batches."""

MICROBATCH = "microbatch"


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis: the parallel degree it realises, its size, the outermost link level it crosses."""

    name: str
    size: int
    level: str = ""

    @property
    def in_time(self) -> bool:
        """Return whether its coordinates are one after another on every rank, not on different ranks."""
        return self.level == TIME


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes, major first: the last axis joins neighbouring ranks."""

    axes: tuple[Axis, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each axis."""
        return tuple(axis.name for axis in self.axes)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(axis.size for axis in self.axes if not axis.in_time)

    @property
    def time_axes(self) -> int:
        """Return how many leading axes are in time: 1 where there are micro-batches, else 0."""
        return sum(axis.in_time for axis in self.axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the index of `rank` along each axis; 0 along one in time, as all micro-batches run one program."""
        index: list[int] = []
        for axis in reversed(self.axes):
            rank, at = (rank, 0) if axis.in_time else divmod(rank, axis.size)
            index.append(at)
        return tuple(reversed(index))

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes)
