"""Cuts that differ from one by a unit: to climb where no exact search is, and to find what is nearly as good."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from autopar.ir.table import Bools, Floats, Ints
from autopar.search.stages import Scores, Stages

Goal = Callable[[Scores], Floats]
"""Seconds that are to be few, of each cut."""


def step(scores: Scores) -> Floats:
    """Return the predicted step."""
    return scores.step_s


def neighbours(stages: Stages, cut: Ints) -> Ints:
    """Return the cuts in which one stage gives a unit to another and those between move by one, a row each.

    To the next stage any gives; farther only those of the rank with the largest key, or with most bytes.
    """
    length, kinds = np.diff(cut), stages.kind_of
    key = np.bincount(stages.group_of, stages.key[kinds, length, cut[1:]])
    heavy = stages.score(cut[None]).rank_bytes[0].argmax()
    return moved(cut, (stages.group_of == key.argmax()) | (stages.rank_of == heavy))


def moved(cut: Ints, gives: Bools) -> Ints:
    """Return the cuts in which one stage gives a unit to another: any to the next, those that `gives` has farther."""
    length, stages = np.diff(cut), len(cut) - 1
    giver, taker = np.divmod(np.arange(stages**2), stages)
    moves = (giver != taker) & (gives[giver] | (abs(giver - taker) == 1)) & (length[giver] > 1)
    giver, taker, at = giver[moves, None], taker[moves, None], np.arange(stages + 1)[None, :]
    up, down = (taker < at) & (at <= giver), (giver < at) & (at <= taker)
    found: Ints = cut[None, :] + up - down
    return found


def climb(stages: Stages, cut: Ints, budget_bytes: float, goal: Goal = step) -> Ints:
    """Return a cut that no neighbour beats: fewer bytes above the budget, then fewer seconds, then more even stages."""
    rank = _ranks(stages, cut[None], budget_bytes, goal)[0]
    while True:
        around = neighbours(stages, cut)
        if not len(around):
            return cut
        ranks = _ranks(stages, around, budget_bytes, goal)
        best = int(np.lexsort(ranks.T[::-1])[0])
        if tuple(ranks[best]) >= tuple(rank):
            return cut
        rank, cut = ranks[best], around[best]


def nearby(stages: Stages, cut: Ints, budget_bytes: float, keep: int, goal: Goal = step) -> list[Ints]:
    """Return the cut and the next best that keep to the budget, reached from it through one another."""
    found: list[Ints] = []
    heap = [((0.0,) * 3, tuple(cut.tolist()))]
    seen = {heap[0][1]}
    while heap and len(found) < keep:
        cut = np.array(heapq.heappop(heap)[1])
        found.append(cut)
        around = neighbours(stages, cut)
        if not len(around):
            continue
        for rank, each in zip(_ranks(stages, around, budget_bytes, goal), around, strict=True):
            key = tuple(each.tolist())
            if rank[0] == 0 and key not in seen:
                seen.add(key)
                heapq.heappush(heap, (tuple(rank.tolist()), key))
    return found


def _ranks(stages: Stages, cuts: Ints, budget_bytes: float, goal: Goal) -> Floats:
    """Return [cut, 3]: bytes above the budget, seconds, imbalance."""
    scores = stages.score(cuts)
    over = np.maximum(0.0, scores.rank_bytes - budget_bytes).sum(axis=1)
    return np.stack([over, goal(scores), scores.imbalance], axis=1)
