"""The cut with the least sum of fills plus largest key, where every stage is a group of its own: exact.

For a limit on the largest key, the best sum is a shortest path: from unit to unit, a stage a step. It falls as the
limit rises, and only the keys that runs of units have need be tried as limits (the enumeration of t_max in Zheng et
al., "Alpa", OSDI 2022, section 5.2). Between two limits that have been solved, no step is shorter than the upper one's
sum plus the next key above the lower one; intervals are halved, the most promising first, until none promises more than
the best step in hand. So few limits are solved and nothing is rounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.table import Floats, Ints

Bools = npt.NDArray[np.bool_]

_GROWTH = 1.2
"""Factor by which the limit grows until some cut keeps to it: limits near the least are cheap to solve."""


def shifted(values: Floats, longest: int) -> Floats:
    """Return [k, j]: the value at unit j - k, infinite ahead of the first."""
    padded = np.concatenate([np.full(longest, np.inf), values])
    windows: Floats = np.lib.stride_tricks.sliding_window_view(padded, len(values))[::-1]
    return windows


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in a row, and which runs of units each may be."""

    fill: Sequence[Floats]
    """[k, j] of each stage; infinite where there is no such run. Stages alike share one array."""

    key: Sequence[Floats]
    banned: Sequence[Bools | None]
    """Runs that are too large for the stage's memory; None: no run is."""

    def least_sum(self, limit: float) -> float:
        """Return the least sum of fills with no key above the limit; infinite where there is none."""
        return float(self._sums(limit)[-1][-1])

    def best(self, limit: float) -> Ints:
        """Return the cut of the least sum with no key above the limit; of several, that of the most even keys."""
        costs, band = self._limited(limit)
        sums = self._sums(limit)
        units = len(sums[-1]) - 1
        uneven = np.where(np.arange(units + 1) == 0, 0.0, np.inf)
        steps = []
        for stage, cost in enumerate(costs):
            total = shifted(sums[stage], band) + cost
            square = np.square(self.key[stage][: band + 1])
            tied = np.where(total == sums[stage + 1], shifted(uneven, band) + square, np.inf)
            steps.append(tied.argmin(axis=0))
            uneven = tied.min(axis=0)
        return traced(steps, units)

    def _sums(self, limit: float) -> list[Floats]:
        """Return for each number of stages the least sum of fills up to each unit."""
        costs, band = self._limited(limit)
        sums = [np.where(np.arange(self.fill[0].shape[1]) == 0, 0.0, np.inf)]
        for cost in costs:
            sums.append((shifted(sums[-1], band) + cost).min(axis=0))
        return sums

    def _limited(self, limit: float) -> tuple[list[Floats], int]:
        """Return the fills with those of longer keys infinite, and the most units that a run then has."""
        made: dict[tuple[int, int], Floats] = {}
        band = 0
        for fill, key in zip(self.fill, self.key, strict=True):
            if (id(fill), id(key)) not in made:
                cost = np.where(key <= limit, fill, np.inf)
                made[id(fill), id(key)] = cost
                band = max(band, int(np.flatnonzero(np.isfinite(cost).any(axis=1)).max(initial=0)))
        shared = [made[id(fill), id(key)][: band + 1] for fill, key in zip(self.fill, self.key, strict=True)]
        return [
            cost if banned is None else np.where(banned[: band + 1], np.inf, cost)
            for cost, banned in zip(shared, self.banned, strict=True)
        ], band


def traced(steps: Sequence[Ints], units: int) -> Ints:
    """Return the cut that steps lead to: the number of units of each stage, for every unit that it may end before."""
    cut = [units]
    for step in reversed(steps):
        cut.append(cut[-1] - int(step[cut[-1]]))
    return np.array(cut[::-1])


def least_step(chain: Chain) -> Ints | None:
    """Return the cut of the least sum of fills plus largest key; None where no cut keeps to memory."""
    keys = _keys(chain)
    lowest = _lowest(chain, keys)
    if lowest is None:
        return None
    at, highest = lowest, len(keys) - 1
    sums = {at: chain.least_sum(keys[at]), highest: chain.least_sum(keys[highest])}
    best_s, best_at = min((sums[each] + keys[each], each) for each in sums)
    heap = [(sums[highest] + keys[min(at + 1, highest)], at, highest)]
    while heap and heap[0][0] < best_s:
        _, low, high = heapq.heappop(heap)
        if high - low < 2 or sums[low] == sums[high]:
            continue
        # Of the limits between, those from `best_s` less the least sum on are no better.
        useful = int(np.searchsorted(keys, best_s - sums[high]))
        middle = (low + min(high, max(useful, low + 2))) // 2
        sums[middle] = chain.least_sum(keys[middle])
        if sums[middle] + keys[middle] < best_s:
            best_s, best_at = sums[middle] + keys[middle], middle
        for lower, upper in ((low, middle), (middle, high)):
            if upper - lower > 1:
                heapq.heappush(heap, (sums[upper] + keys[lower + 1], lower, upper))
    return chain.best(keys[best_at])


def _keys(chain: Chain) -> Floats:
    """Return the keys of all runs, rising; no cut's largest is below the first."""
    distinct = {id(key): key for key in chain.key}.values()
    return np.unique(np.concatenate([key[np.isfinite(key)] for key in distinct]))


def _lowest(chain: Chain, keys: Floats) -> int | None:
    """Return the place of the lowest limit that some cut keeps to; the search starts from the mean key of a stage."""
    alone = chain.key[0][1]
    mean = float(alone[np.isfinite(alone)].sum()) / len(chain.key)
    at, failed, stride = min(int(np.searchsorted(keys, mean)), len(keys) - 1), -1, 1
    while chain.least_sum(keys[at]) == np.inf:
        if at == len(keys) - 1:
            return None
        failed, at = at, min(len(keys) - 1, max(at + stride, int(np.searchsorted(keys, _GROWTH * keys[at]))))
        stride *= 2
    while at - failed > 1:
        middle = (failed + at) // 2
        if chain.least_sum(keys[middle]) == np.inf:
            failed = middle
        else:
            at = middle
    return at


def shortest(costs: Sequence[Floats]) -> tuple[float, Ints]:
    """Return the least sum of one cost a stage, and its cut; costs are [k, j], not all infinite."""
    longest, units = costs[0].shape[0] - 1, costs[0].shape[1] - 1
    sums, steps = np.where(np.arange(units + 1) == 0, 0.0, np.inf), []
    for cost in costs:
        total = shifted(sums, longest) + cost
        steps.append(total.argmin(axis=0))
        sums = total.min(axis=0)
    return float(sums[-1]), traced(steps, units)


def least_largest(costs: Iterable[Floats]) -> tuple[float, Ints]:
    """Return the least largest of one cost a stage, and a cut that has it."""
    largest, steps = None, []
    for cost in costs:
        if largest is None:
            largest = np.where(np.arange(cost.shape[1]) == 0, 0.0, np.inf)
        total = np.maximum(shifted(largest, len(cost) - 1), cost)
        steps.append(total.argmin(axis=0))
        largest = total.min(axis=0)
    if largest is None:
        raise ValueError("a pipeline has at least one stage")
    return float(largest[-1]), traced(steps, len(largest) - 1)
