"""How a row of layers repeats: a pattern over and over, with layers before and behind it that are not of it.

        dense dense dense | moe moe moe ... moe                  before 3, period 1
        (local local local local local global) x 10 | local local     period 6, behind 2

A few repetitions of the pattern stand for all: one at each border, and one between them, whose neighbours are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

FEW = 3
"""Repetitions that stand for more: one at each border, and one between them."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Repetition:
    """A row of layers: some of their own, `times` repetitions of `period` layers, and some of their own again."""

    times: int
    period: int = 1
    before: int = 0
    behind: int = 0

    @property
    def layers(self) -> int:
        """Return the layers of the whole row."""
        return self.before + self.times * self.period + self.behind

    @property
    def few(self) -> int:
        """Return the layers of the shortest row that stands for this one."""
        return self.layers - self.more * self.period

    @property
    def more(self) -> int:
        """Return the repetitions that the shortest row lacks."""
        return self.times - FEW

    def kept(self, row: Sequence[_T]) -> list[_T]:
        """Return what the shortest row has of a whole one."""
        return [*row[: self.before + FEW * self.period], *row[len(row) - self.behind :]]

    def stand_in(self, number: int) -> int:
        """Return which layer of the shortest row stands for a layer of the whole one."""
        if number < self.before + self.period:
            return number
        if number >= self.layers - self.behind - self.period:
            return number - self.layers + self.few
        return self.before + self.period + (number - self.before) % self.period

    def with_margins(self) -> Repetition:
        """Return the row with one repetition at each border counted as no part of the pattern.

        At a border a repetition may compute something else: the last one begins a sum of gradients, say.
        """
        return replace(self, times=self.times - 2, before=self.before + self.period, behind=self.behind + self.period)


def repetition_of(kinds: Sequence[Hashable]) -> Repetition | None:
    """Return how a row of layers repeats, by what each layer is, so that the fewest stand for all.

    `None` where no pattern comes more than three times, so that nothing is saved.
    """
    best: Repetition | None = None
    for period in range(1, len(kinds) // (FEW + 1) + 1):
        start = 0
        for at in range(len(kinds)):
            if at + period < len(kinds) and kinds[at] == kinds[at + period]:
                continue
            times = (at - start + period) // period
            found = Repetition(times, period, start, len(kinds) - start - times * period)
            if found.more > 0 and (best is None or found.few < best.few):
                best = found
            start = at + 1
    return best
