"""Seconds below which no pipeline of some blocks can be: blocks are a fluid, and recomputation comes in drops.

    minimise T    over how much of each kind of block each stage has, and how it is recomputed
    such that     every rank has time for its work, for what is ahead of it, and behind it
                  every rank has room for what its schedule has in flight

Whatever cut into stages, and recomputation block by block, the search could find is one point of this linear program,
so its optimum bounds them all. It knows memory and bubbles, which bounds of work alone do not: recomputing less takes
memory, more stages take less of it for parameters, and more micro-batches in flight hide bubbles and take more.

Of a rank r whose stages are S, the first of them a, and m micro-batches; F, I, W as in `closed_forms`, recomputation
in I:

    its work, between the first micro-batch's way to it and the last one's way back
        T >= sum over stages ahead of a (F + I + W) + m * sum over S (F + I + W)     W ahead only where I holds it
    where weight gradients come later, which can fill the way back
        T >= sum over stages ahead of a F + m * sum over S (F + I + W),  and the line above without any W
    the first micro-batch's way down and back, if r has one stage, and at most f micro-batches in flight: the first
    backward starts behind F of all stages and the backward of those behind r, and m - f forwards come after it
        T >= sum over other stages (F + I) + F + m * I + (m - f) * F
    and of any boundary between ranks that m values cross one after another, the last of them down and back after that
        T >= sum over all stages (F + I) + (m - 1) * one transfer

    any chain of computations that wait for one another, which passes stage s so many times: those that are longest for
    what the program finds, until none is longer than T
        T >= sum over all stages of (passes of F) F + (passes of I) I + (passes of W) W

    blocks stay whole: of the R (j - 1) + 1 that take longest, R ranks, one has j
        T >= m * sum over the j of these that take least (F + I + W)     for every j

To each but the last is added what transfers take on the ways that it counts, there and back. Where n boundaries are
between the same two ranks, in turn, m * n transfers take no more than T either.

Narayanan et al. 2021 and Qi et al. 2024 have these times for even stages (sources in `cost_models.pipeline`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.ir.schedule import PipelineSchedule
from autopar.ir.table import Floats, Ints
from autopar.search import moved as moving
from autopar.search.minimised import Program
from autopar.search.moved import Moved
from autopar.search.stages import in_flight

_MOST = 6000
"""Variables at most: larger programs bound nothing here, in place of taking seconds each."""

_CHAINS = 40
"""Chains of computations that a program is told of at most."""

_SHORTER = 1.001
"""Times as long as T that a chain has to be to be told of."""

ROUNDING = 1e-6
"""Share that the solver's tolerance may take of a bound."""


@dataclass(frozen=True)
class Fluid:
    """Kinds of blocks, in the order they run; all seconds and bytes are the least there are, of one micro-batch.

    The first and the last kind are one block each, which are on the first and the last stage.
    """

    counts: Ints
    """[kind]: blocks."""

    forward_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats
    """[kind] each."""

    again_s: Floats
    """[kind, way]: what recomputation adds to the input gradient."""

    saved_bytes: Floats
    """[kind, way]: what forward leaves for backward."""

    late_bytes: Floats
    """[kind]: what waits for weight gradients that come later, however blocks are recomputed."""

    static_bytes: Floats
    """[kind]: there from start to end."""

    elsewhere_s: float = 0.0
    """What all blocks together take beyond that; nobody knows in which."""

    moved: Moved | None = None
    """What of parameters and gradients is moved; `None` where nobody knows, or nothing is."""


@dataclass(frozen=True)
class Handing:
    """What handing a value of one micro-batch, or its gradient, from rank to rank takes at least."""

    least_s: float = 0.0
    """From any rank to any other."""

    most_s: float = 0.0
    """From one of the ranks to one that not all can be near to."""

    path_s: float = 0.0
    """From rank to rank until all were passed."""

    host_s: float = 0.0
    """Of the core that computes, on either side, beside that."""


_NOTHING = Handing()


class Chain(Protocol):
    """Computations that wait for one another."""

    @property
    def passes(self) -> Ints:
        """Return [3, stage]: how often it passes a stage's forward, input gradient, weight gradient."""

    @property
    def handed(self) -> int:
        """Return how often it goes from rank to rank."""


class Chains(Protocol):
    """Those of a schedule."""

    def longest(self, seconds: Floats, handed_s: float = 0.0) -> Chain:
        """Return the one that takes longest; `seconds` are [3, stage]."""


@dataclass(frozen=True)
class Tight:
    """What a bound is tightened by."""

    chains: Chains
    """Of the whole schedule."""

    enough_s: float
    """No need to bound by more."""


@dataclass(frozen=True)
class Flow:
    """What of a schedule counts here."""

    rank_of: Ints
    """[stage]."""

    splits_backward: bool
    handed: Ints
    """[stage]: how often a value changed ranks on its way there."""

    remote: Ints
    """[stage]: neighbours on other ranks."""

    between_two: int
    """Boundaries between the same two ranks, at most."""

    moments: Sequence[Floats]
    """Of each rank [moment, own stage, 2], see `in_flight`."""

    @classmethod
    def of(cls, schedule: PipelineSchedule) -> Flow:
        """Return a schedule's."""
        ranks = range(schedule.ranks)
        moments = [in_flight(schedule, rank) for rank in ranks]
        rank_of = np.array(schedule.rank_of)
        changes = (rank_of[1:] != rank_of[:-1]).astype(np.int64)
        remote = np.append(changes, 0) + np.append(0, changes)
        ways = Counter((one, other) for one, other in pairwise(schedule.rank_of) if one != other)
        between_two = max(ways.values(), default=0)
        return cls(rank_of, schedule.splits_backward, np.append(0, changes.cumsum()), remote, between_two, moments)

    def path_s(self, handing: Handing) -> float:
        """Return what a value's way through all stages takes: every rank is passed once at least."""
        return handing.path_s + max(0, int(self.handed[-1]) - len(self.moments) + 1) * handing.least_s


def least_step_s(
    blocks: Fluid,
    flow: Flow,
    microbatches: int,
    budget_bytes: float,
    *,
    share: float = 1.0,
    handing: Handing = _NOTHING,
    tight: Tight | None = None,
) -> float:
    """Return seconds that no cut of the blocks, run by this schedule, beats; infinite if none fits the budget.

    `flow` may be of fewer micro-batches than there are: it tells how many are in flight. `share`: what a rank has of a
    core while all compute, as seconds of blocks are; who computes alone is faster by that, all together are not. 0
    where there are too many kinds of blocks and stages to tell.
    """
    kept = worth_recomputing(blocks)
    kinds, ways = kept.nonzero()
    stages, rank_of = len(flow.rank_of), flow.rank_of
    if len(kinds) * stages > _MOST:
        return 0.0
    kind, way = np.tile(kinds, stages), np.tile(ways, stages)
    stage = np.repeat(np.arange(stages), len(kinds))
    forward, weight = blocks.forward_s[kind], blocks.weight_gradient_s[kind]
    inputs = blocks.input_gradient_s[kind] + blocks.again_s[kind, way]
    both, back = forward + inputs + weight, inputs if flow.splits_backward else inputs + weight
    many, ranks = microbatches, np.arange(len(flow.moments))
    path_s, host_s = flow.path_s(handing), handing.host_s * flow.remote
    mine = rank_of[stage] == ranks[:, None]
    first = np.array([int(np.flatnonzero(rank_of == rank)[0]) for rank in ranks])
    ahead = stage < first[:, None]
    there_s = flow.handed[first] * handing.least_s + np.append(0.0, host_s.cumsum())[first]
    own_s = np.bincount(rank_of, weights=host_s, minlength=len(ranks))
    # Rows of seconds that T is no less than, and transfers of each: what is before a rank's first work, and all of it.
    work = mine * many * both
    less = [ahead * (forward if flow.splits_backward else both) + work]
    beside = [(1.0 if flow.splits_backward else 2.0) * there_s + 2.0 * many * own_s]
    busy = (less[0] if share == 1.0 else work).sum(axis=0)[None]
    beside_all_s = float(beside[0].sum())
    if flow.splits_backward:
        less.append(ahead * (forward + inputs) + mine * many * (forward + inputs))
        beside.append(2.0 * there_s + 2.0 * many * own_s)
    alone = np.bincount(rank_of) == 1
    if alone.any():  # whoever has one stage goes back as often as there are micro-batches, ahead by what it holds
        held = np.array([max(1.0, float(moments[:, 0, 0].max())) for moments in flow.moments])
        late = np.maximum(0.0, many - held)
        less.append(np.where(mine, forward + many * back + late[:, None] * forward, forward + back)[alone])
        beside.append((2.0 * (path_s + float(host_s.sum())) + (many - 1 + late) * own_s)[alone])
    less.append((forward + inputs)[None])
    beside.append(np.array([2.0 * (path_s + float(host_s.sum())) + (many - 1) * handing.most_s]))
    room = _held_bytes(blocks, flow, kind, way, stage)
    # Where cores are shared, others compute while one waits.
    every_s = many * blocks.elsewhere_s + beside_all_s if share == 1.0 else 0.0
    seconds = (share * np.vstack(less), np.concatenate(beside))
    parts = np.stack([forward, inputs, weight])
    told = None if tight is None else _Told(tight, share * parts, stage, handing.least_s)
    bounded = _Bounded(kind, stage, *seconds, busy, np.array([every_s]), room / budget_bytes)
    if blocks.moved is not None and share == 1.0:
        has = moving.Columns(kind, stage, rank_of, many * both, many)
        # While a rank waits for its first value, something may be gathered already.
        more_s = many * (blocks.elsewhere_s + 2.0 * float(own_s.sum()))
        bounded = _with_moves(bounded, blocks.moved, has, flow, budget_bytes, more_s)
    least_s = _solved(blocks, bounded, len(flow.moments), told)
    whole_s = share * many * least_of_one_s(np.repeat(least_of_each_s(blocks), blocks.counts), len(flow.moments))
    return max(least_s, whole_s, many * flow.between_two * handing.least_s) if least_s else 0.0


def least_of_each_s(blocks: Fluid) -> Floats:
    """Return [kind] seconds that a block takes for one micro-batch, recomputed in the way that takes least."""
    least: Floats = blocks.forward_s + blocks.input_gradient_s + blocks.weight_gradient_s + blocks.again_s.min(axis=1)
    return least


def least_of_one_s(each_s: Floats, ranks: int) -> float:
    """Return seconds that the busiest of so many ranks has to do at least, of blocks that stay whole."""
    ahead = np.concatenate([[0.0], np.sort(each_s)[::-1].cumsum()])
    longest = np.arange(1, len(each_s) + 1, ranks)
    held = np.arange(1, len(longest) + 1)
    return float((ahead[longest] - ahead[longest - held]).max())


def _held_bytes(blocks: Fluid, flow: Flow, kind: Ints, way: Ints, stage: Ints) -> Floats:
    """Return [moments of all ranks, column] what a rank holds for a block of the column then."""
    flying, own = _in_flight(flow)
    waits = flying[:, stage, 0] * blocks.saved_bytes[kind, way] + flying[:, stage, 1] * blocks.late_bytes[kind]
    held: Floats = own[:, stage] * (waits + blocks.static_bytes[kind])
    return held


def _in_flight(flow: Flow) -> tuple[Floats, NDArray[np.bool_]]:
    """Return [moments of all ranks, stage, 2] what is in flight, and [the same, stage] whether it is the rank's."""
    counts = [len(moments) for moments in flow.moments]
    flying = np.zeros((sum(counts), len(flow.rank_of), 2))
    for rank, (moments, end) in enumerate(zip(flow.moments, np.cumsum(counts), strict=True)):
        flying[end - len(moments) : end, flow.rank_of == rank] = moments
    return flying, flow.rank_of == np.repeat(np.arange(len(counts)), counts)[:, None]


@dataclass(frozen=True)
class _Bounded:
    """The rows of a program but those of its blocks: their columns come first, then others that there may be."""

    kind: Ints
    stage: Ints
    """[block's column]."""

    less: Floats
    beside: Floats
    """[row, column] seconds none of which is more than T, and what transfers add to each."""

    busy: Floats
    busy_more_s: Floats
    """[row, column]: what all ranks are busy for together, and [row] how much longer they are."""

    room: Floats
    """[row, column]: none is more than 1."""

    no_more: Floats | None = None
    """[row, column]: none is more than 0."""


def _with_moves(
    bounded: _Bounded, moved: Moved, has: moving.Columns, flow: Flow, budget_bytes: float, more_s: float
) -> _Bounded:
    """Return the rows with those of parameters and gradients that are moved; `more_s`: what all ranks do besides."""
    flying, own = _in_flight(flow)
    found, (more, gone) = moving.rows(moved, has), moving.held_bytes(moved, has, flying[:, :, 0], own)
    added = np.zeros((len(bounded.less), gone.shape[1]))
    work = np.append(has.work_s + found.once, found.busy)
    return _Bounded(
        bounded.kind,
        bounded.stage,
        np.vstack([np.hstack([bounded.less, added]), found.seconds]),
        np.append(bounded.beside, np.zeros(len(found.seconds))),
        np.vstack([np.hstack([bounded.busy, np.zeros((1, gone.shape[1]))]), work]),
        np.append(bounded.busy_more_s, more_s),
        np.hstack([bounded.room + more / budget_bytes, gone / budget_bytes]),
        found.no_more,
    )


@dataclass(frozen=True)
class _Told:
    """What says how long the chains of a schedule are."""

    tight: Tight
    parts: Floats
    """[3, column]: seconds of all that a column's kind of block has of forward, input gradient, weight gradient."""

    stage: Ints
    """[column]."""

    handed_s: float

    def longest(self, found: Floats) -> tuple[Floats, float]:
        """Return [column] what a block adds to the chain that is longest for what was found, and what comes to it."""
        stages = int(self.stage.max()) + 1
        seconds: Floats = np.stack([np.bincount(self.stage, part * found, stages) for part in self.parts])
        chain = self.tight.chains.longest(seconds, self.handed_s)
        row: Floats = (chain.passes[:, self.stage] * self.parts).sum(axis=0)
        return row, chain.handed * self.handed_s


def _solved(blocks: Fluid, bounded: _Bounded, ranks: int, told: _Told | None) -> float:
    """Return the least T."""
    kind, stage, less = bounded.kind, bounded.stage, bounded.less
    count, last, columns = len(blocks.counts), int(stage.max()), less.shape[1]
    scale_s = float(less.max()) or 1.0
    each = np.zeros((count, columns))
    each[:, : len(kind)] = kind[None, :] == np.arange(count)[:, None]
    no_more = np.zeros((0, columns)) if bounded.no_more is None else bounded.no_more
    rows = np.vstack([each, less / scale_s, bounded.busy / scale_s, bounded.room, no_more])
    slower = np.concatenate([
        np.zeros(count), -np.ones(len(less)), np.full(len(bounded.busy), -ranks),
        np.zeros(len(bounded.room) + len(no_more)),
    ])  # fmt: skip
    upper = np.concatenate([
        blocks.counts, -bounded.beside / scale_s, -bounded.busy_more_s / scale_s,
        np.ones(len(bounded.room)), np.zeros(len(no_more)),
    ])  # fmt: skip
    lower = np.concatenate([blocks.counts, np.full(len(upper) - count, -highspy.kHighsInf)])
    apart = ((kind == 0) & (stage > 0)) | ((kind == count - 1) & (stage < last))
    most = np.full(columns + 1, highspy.kHighsInf)
    most[: len(kind)][apart] = 0.0
    program = Program(np.hstack([rows, slower[:, None]]), lower, upper, most)
    least, found = program.solved()
    for _ in range(_CHAINS if told is not None else 0):
        if not len(found) or told is None or least * scale_s >= told.tight.enough_s:
            break
        chain, handed_s = told.longest(found[: len(kind)])
        if chain @ found[: len(kind)] + handed_s <= _SHORTER * least * scale_s:
            break
        row = np.concatenate([chain / scale_s, np.zeros(columns - len(kind)), [-1.0]])
        program.at_most(row, -handed_s / scale_s)
        more, found = program.solved()
        least = max(least, more)
    return least * scale_s * (1.0 - ROUNDING)


def worth_recomputing(blocks: Fluid) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return [kind, way]: false for ways that take as long as another and leave as much, or more of either."""
    seconds, saved = blocks.again_s, blocks.saved_bytes
    worth = np.ones(seconds.shape, dtype=bool)
    for way in range(seconds.shape[1]):
        for other in range(seconds.shape[1]):
            no_worse = (seconds[:, other] <= seconds[:, way]) & (saved[:, other] <= saved[:, way])
            same = (seconds[:, other] == seconds[:, way]) & (saved[:, other] == saved[:, way])
            worth[:, way] &= ~(no_worse & (~same | (other < way)) & (other != way))
    return worth
