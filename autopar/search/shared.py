"""Seconds below which no pipeline on unlike devices can be: blocks are a fluid that ranks of several kinds share.

    minimise T    over how much of each block the ranks of each kind have, and how it is recomputed
    such that     m * the work of what the ranks of a kind have     <= T * how many they are
                  forward and input gradients of all blocks         <= T
                  what ranks hold of one micro-batch in flight      <= their memory, together
                  m * the work of blocks that one rank has whole    <= T    as in `fluid`, each on its fastest device

Which ranks come first, where the program is cut and by what schedule it runs is left open, and so are messages and all
of bubbles but the way of one micro-batch: every rank computes all micro-batches of its blocks, and holds all that one
of them saves in these when it has been through its last stage and not yet back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.search.fluid import ROUNDING, Fluid, least_of_each_s, least_of_one_s, worth_recomputing
from autopar.search.minimised import minimised


@dataclass(frozen=True)
class Ranks:
    """The pipeline ranks on one kind of device."""

    blocks: Fluid
    """What blocks take there; all kinds have the same blocks in the same order."""

    count: int
    budget_bytes: float
    """Of each rank."""


def least_shared_s(kinds: Sequence[Ranks], microbatches: int) -> float:
    """Return seconds that no cut of the blocks over these ranks beats; infinite if none fits their memory."""
    counts = kinds[0].blocks.counts
    blocks = len(counts)
    parts, work, path, held = [], [], [], []
    for each in kinds:
        own = each.blocks
        block, way = worth_recomputing(own).nonzero()
        way_s = own.forward_s[block] + own.input_gradient_s[block] + own.again_s[block, way]
        parts.append(block)
        path.append(way_s)
        work.append(microbatches * (way_s + own.weight_gradient_s[block]) / each.count)
        held.append((own.saved_bytes[block, way] + own.static_bytes[block]) / (each.count * each.budget_bytes))
    block, ends = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
    columns, scale_s = len(block) + 1, max(float(each.max()) for each in work) or 1.0
    rows = np.zeros((blocks + 2 * len(kinds) + 1, columns))
    rows[block, np.arange(len(block))] = 1.0
    rows[-1] = np.append(np.concatenate(path) / scale_s, -1.0)
    for kind, (spent, room) in enumerate(zip(work, held, strict=True)):
        own_columns = slice(ends[kind], ends[kind + 1])
        rows[blocks + kind, own_columns], rows[blocks + kind, -1] = spent / scale_s, -1.0
        rows[blocks + len(kinds) + kind, own_columns] = room
    lower = np.concatenate([counts, np.full(2 * len(kinds) + 1, -highspy.kHighsInf)])
    upper = np.concatenate([counts, np.zeros(len(kinds)), np.ones(len(kinds)), [0.0]])
    least_s = minimised(rows, lower, upper, np.full(columns, highspy.kHighsInf)) * scale_s * (1.0 - ROUNDING)
    fastest_s = np.minimum.reduce([least_of_each_s(each.blocks) for each in kinds])
    ranks = sum(each.count for each in kinds)
    return max(least_s, microbatches * least_of_one_s(np.repeat(fastest_s, counts), ranks))
