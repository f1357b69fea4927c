"""The logical device mesh: named axes, major axis first, rank = row-major index."""

from __future__ import annotations

import math
from dataclasses import dataclass

AXIS_NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""The field's names of parallel degrees, outermost first."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis: the parallel degree it realises, its size, the outermost link level it crosses."""

    name: str
    size: int
    level: str = ""


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
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the index of `rank` along each axis."""
        index: list[int] = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            index.append(at)
        return tuple(reversed(index))

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes)
