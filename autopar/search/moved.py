"""What ranks that take other samples move of a stage's parameters and gradients, as part of `search.fluid`'s program.

Each rank needs a parameter whole where it multiplies its own samples with it, and makes its gradient whole. So every
step gathers each and reduces each, once at least; who does it no more often than that holds what is whole from one
micro-batch to the next (ADR 0009). Of a rank, whose blocks x are, of these y with parameters that each phase of each
micro-batch gathers anew and z with gradients that each micro-batch reduces:

    it computes, and gives what collectives take from computation, and what its optimizer takes
        T >= m * (F + I + W) x + once x + again y + each z
    its link is busy for all of a collective's seconds
        T >= link x + again_link y + each_link z
    what runs once a step hides behind no more than one micro-batch
        T >= (m - 1) * (F + I + W) x + link x - link (y + z)
    it holds what is whole
        whole (x - y) + sums (x - z)   beside what the fluid has anyway
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.table import Floats, Ints


@dataclass(frozen=True)
class Moved:
    """Of one block of each kind, in a step, at least; [kind] each."""

    optimizer_s: Floats
    """The optimizer's step, after all else."""

    shown_s: Floats
    """What computation gives for moving each parameter and gradient once."""

    link_s: Floats
    """How long that keeps the link busy along which parameters are sharded at rest."""

    across_s: Floats
    """The same of the link along which they are not."""

    whole_bytes: Floats
    """What a rank holds more where it gathers once a step, or never."""

    again_shown_s: Floats
    """What is added where each phase of each micro-batch gathers."""

    again_link_s: Floats

    sums_bytes: Floats
    """What a rank holds more where it sums whole gradients."""

    each_shown_s: Floats
    """What is added where each micro-batch reduces its gradients."""

    each_link_s: Floats

    def of(self, places: Ints) -> Moved:
        """Return that of the blocks at some places."""
        return Moved(*(each[places] for each in astuple(self)))

    @property
    def columns(self) -> Floats:
        """Return [block, what there is of it]."""
        return np.column_stack(astuple(self))


@dataclass(frozen=True)
class Columns:
    """What of a fluid's program its rows are made of, and who holds what at which moments."""

    kinds: Ints
    """Of each column: the kind of its block."""

    stages: Ints
    """Of each column: where its blocks are."""

    rank_of: Ints
    """[stage]."""

    work_s: Floats
    """[column]: what a block takes of its rank, all micro-batches together."""

    microbatches: int


@dataclass(frozen=True)
class Rows:
    """What moving adds to the program: columns y and z, one for each kind of block and stage."""

    seconds: Floats
    """[row, column and y and z]: none is more than T."""

    busy: Floats
    """[y and z]: what all ranks are busy for."""

    once: Floats
    """[column]: the same of what every block takes once."""

    no_more: Floats
    """[row, column and y and z]: none is more than 0: no more of a kind is in y, or z, than is in its stage."""


def rows(moved: Moved, has: Columns) -> Rows:
    """Return the rows of seconds, each for every rank."""
    ranks = np.arange(int(has.rank_of.max()) + 1)
    kinds, stages = places(has)
    mine, theirs = has.rank_of[has.stages] == ranks[:, None], has.rank_of[stages] == ranks[:, None]
    own = moved.of(has.kinds)
    once, more = own.optimizer_s + own.shown_s, moved.of(kinds)
    one_s = has.work_s / has.microbatches
    given = np.hstack([mine * (has.work_s + once), theirs * more.again_shown_s, theirs * more.each_shown_s])
    link = np.hstack([mine * (own.optimizer_s + own.link_s), theirs * more.again_link_s, theirs * more.each_link_s])
    across = np.hstack([mine * (own.optimizer_s + own.across_s), np.zeros((len(ranks), 2 * len(kinds)))])
    behind_one = own.optimizer_s + own.link_s + has.work_s - one_s
    less = -(theirs * more.link_s)
    late = np.hstack([mine * behind_one, less, less])
    same = (kinds[:, None] == has.kinds) & (stages[:, None] == has.stages)
    no_more = np.hstack([np.tile(-same.astype(np.float64), (2, 1)), np.eye(2 * len(kinds))])
    busy = np.concatenate([more.again_shown_s, more.each_shown_s])
    return Rows(np.vstack([given, link, across, late]), busy, once, no_more)


def places(has: Columns) -> tuple[Ints, Ints]:
    """Return the kind and the stage of each y, which are those of each z."""
    kinds, stages = np.arange(int(has.kinds.max()) + 1), np.arange(len(has.rank_of))
    return np.tile(kinds, len(stages)), np.repeat(stages, len(kinds))


def held_bytes(moved: Moved, has: Columns, flying: Floats, mine: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return [moment, column] what is held more for a block, and [moment, y and z] how much less.

    `flying` is [moment, stage]: micro-batches in flight; `mine` [moment, stage]: whether that rank has the stage. Where
    none is in flight, what was gathered for it may be gone.
    """
    kinds, stages = places(has)
    own, less = moved.of(has.kinds), moved.of(kinds)
    here, there, under_way = mine[:, has.stages], mine[:, stages], flying > 0
    more = here * (own.whole_bytes * under_way[:, has.stages] + own.sums_bytes)
    gone = np.hstack([there * less.whole_bytes * under_way[:, stages], there * less.sums_bytes])
    return more, -gone
