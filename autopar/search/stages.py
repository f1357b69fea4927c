"""What every run of units is as one stage of a pipeline, and what a cut of all units into stages is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.errors import UsageError
from autopar.ir.schedule import COMPUTE, Kind, PipelineSchedule
from autopar.ir.table import Floats, Ints
from autopar.search.closed_forms import Seconds, parts

_RESOLUTION_BITS = 46
"""Seconds are rounded to the sum of all of them / 2**46: sums are exact then, and equal stages cost the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What stays in one stage, such as a layer: one micro-batch on one device; its collectives are in the seconds."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    forward_waiting_s: float = 0.0
    """Of the seconds above, waiting for the unit's collectives, which takes no core."""

    input_gradient_waiting_s: float = 0.0
    weight_gradient_waiting_s: float = 0.0

    static_bytes: int = 0
    """Parameters, gradients, optimizer state: there from start to end."""

    activation_bytes: int = 0
    """Made by the unit and saved for backward, of one micro-batch; what it only reads counts where it was made."""

    kept_bytes: int | None = None
    """Of these, what waits for the weight gradient where that comes later; None: all of them."""

    temporary_bytes: int = 0
    """The most that the unit holds beyond its activations while it runs; its backward lets go of these one by one."""

    temporary_apart_bytes: int | None = None
    """The same where weight gradients come later, until when backward keeps what they read; None: no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """All values that are alive between a unit and the next, those included that only units further on read."""

    forward_s: float
    """Of one micro-batch's transfer, where a stage ends here and the next is on another rank."""

    backward_s: float
    """Of their gradients' transfer."""

    host_s: float = 0.0
    """Of either transfer, on either side: what it takes from the core that computes, not counted in the others."""

    value_bytes: int = 0
    """What the later stage holds of them, as long as its own activations."""

    allowed: bool = True
    """Whether a stage may end here."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """Units and boundaries as the ranks of one pipeline find them, whose devices and links may differ.

    Bytes are the same on all devices: only seconds differ.
    """

    units: tuple[Sequence[Unit], ...]
    """By kind of device."""

    boundaries: tuple[Sequence[Boundary], ...]
    """By kind of link; all allow the same places."""

    device_of: tuple[int, ...]
    """The kind of each rank's devices."""

    link_of: tuple[int, ...]
    """The kind of link over which each stage receives; of the first, any."""

    less_bytes: tuple[int, ...]
    """Of each rank, by how much its devices hold less than the budget, which is that of those that hold most."""

    @classmethod
    def alike(cls, units: Sequence[Unit], boundaries: Sequence[Boundary], schedule: PipelineSchedule) -> Assigned:
        """Return equal devices, all joined by equal links."""
        zeros = (0,) * schedule.ranks
        return cls((units,), (boundaries,), zeros, (0,) * schedule.stages, zeros)


class Scores(NamedTuple):
    """What cuts are worth, an entry or a row a cut."""

    step_s: Floats
    """By the closed form: stages of a rank make up for one another."""

    paced_s: Floats
    """The same if they did not: all ranks wait for the slowest of the first stages, then of the second ones."""

    rank_bytes: Floats
    """What a rank's devices have less than the budget counts as held."""

    imbalance: Floats
    """Sum of squares of the stages' keys; decides between cuts that are else alike."""


class Stages:
    """All runs of units as stages of one schedule; units that no stage may part are taken as one.

    A cut is a row of first units, one a stage, with the number of units behind it. Arrays over runs are [k, j]: the k
    units before unit j. `fill` and `key` have the kind of stage before that, see `closed_forms`.
    """

    def __init__(self, assigned: Assigned, schedule: PipelineSchedule, *, blocking: bool) -> None:
        """Raise `UsageError` where the schedule has no closed form, or there are fewer units than stages."""
        units, boundaries = assigned.units[0], assigned.boundaries[0]
        if len(boundaries) != len(units) - 1:
            raise UsageError(f"{len(units)} units have {len(units) - 1} boundaries between them, not {len(boundaries)}")
        self.ranks, self.stages = schedule.ranks, schedule.stages
        self.firsts = (0, *(at + 1 for at, each in enumerate(boundaries) if each.allowed))
        """First of the caller's units in each of ours."""

        self.units = len(self.firsts)
        if self.units < self.stages:
            raise _too_few(len(units), self.units, schedule)
        self.longest = self.units - self.stages + 1
        """Units of a stage at most: every other has one at least."""

        start = np.arange(self.units + 1)[None, :] - np.arange(self.longest + 1)[:, None]
        self.exists = (start >= 0) & (np.arange(self.longest + 1) > 0)[:, None]
        self._start = np.maximum(start, 0)
        self._ends = np.array([*self.firsts, len(units)])

        self.rank_of = np.array(schedule.rank_of)
        self._kinds, self.kind_of = _kinds(assigned, schedule)
        found = parts(schedule.name, self._seconds(assigned, schedule, blocking))
        self.fill: Floats = np.where(self.exists, found.fill, np.inf)
        self.key: Floats = np.where(self.exists, found.key, np.inf)
        self._work, self._halved = found.work, found.halved
        self.group_of = np.arange(self.stages) if found.by_stage else self.rank_of
        """What adds up its keys: the rank of a stage, or each stage for itself."""

        self.by_stage = found.by_stage
        self._in_group = (self.group_of[:, None] == np.arange(self.group_of.max() + 1)).astype(np.float64)
        self.unit_work: Floats = found.work[:, 1, 1:].min(axis=0)
        """Part of the key of each unit that no cut changes, where its device is the fastest for it."""

        self.slots = [(rank, schedule.rank_of[:stage].count(rank)) for stage, rank in enumerate(schedule.rank_of)]
        """Of each stage its rank, and which of that rank's stages it is."""

        self.stages_of = np.argsort(self.rank_of, kind="stable").reshape(self.ranks, -1)
        self.held: Floats = _all_held(schedule)
        """[rank, moment, slot, 2]: micro-batches whose activations, and kept parts, a rank holds at a moment."""

        self.static = self._sums([unit.static_bytes for unit in units])
        self.activation = self._sums([unit.activation_bytes for unit in units])
        self.kept = self._sums([kept_bytes(unit) for unit in units])
        received = np.array([0, *(each.value_bytes for each in boundaries), 0], dtype=np.float64)
        self.received: Floats = received[self._ends][self._start]
        self.temporary = self._largest([temporary_bytes(unit, schedule) for unit in units])
        self.less_bytes = np.array(assigned.less_bytes, dtype=np.float64)

    def first_units(self, cut: Ints) -> tuple[int, ...]:
        """Return the first of the caller's units in each stage."""
        return tuple(self.firsts[each] for each in cut[:-1])

    def score(self, cuts: Ints) -> Scores:
        """Return what cuts are worth, a row a cut."""
        length, stop, kind = np.diff(cuts, axis=1), cuts[:, 1:], self.kind_of[None, :]
        key = self.key[kind, length, stop]
        fill_s = self.fill[kind, length, stop].sum(axis=1)
        slowest_s = (key @ self._in_group).max(axis=1)
        paced_s = slowest_s if self.by_stage else key[:, self.stages_of].max(axis=1).sum(axis=1)
        return Scores(fill_s + slowest_s, fill_s + paced_s, self._rank_bytes(length, stop), np.square(key).sum(axis=1))

    def saved(self, kind: int) -> Floats:
        """Return [2, k, j]: activations of one micro-batch, and of them what waits for weight gradients."""
        received = self.received if self._kinds[kind].receives else np.zeros_like(self.received)
        both: Floats = np.stack([self.activation + received, self.kept + received])
        return both

    def waiting_s(self, cut: Ints) -> float:
        """Return what transfers add to the step at most, by the key of any stage of a cut."""
        at = (self.kind_of, np.diff(cut), cut[1:])
        return float((self.key[at] - np.broadcast_to(self._work, self.key.shape)[at]).max())

    def halving(self) -> Stages | None:
        """Return the same stages by the other closed form, which halves boundaries; `None` where there is no other."""
        if self._halved is None:
            return None
        other = copy(self)
        other.key = np.where(self.exists, self._halved, np.inf)
        other._halved = None
        return other

    def stage_bytes(self, stage: int) -> Floats:
        """Return what a rank holds that has this stage and no other, as [k, j]."""
        rank, slot = self.slots[stage]
        moments = np.unique(self.held[rank, :, slot], axis=0)
        most = np.tensordot(moments, self.saved(int(self.kind_of[stage])), axes=1).max(axis=0)
        return np.where(self.exists, self.static + most + self.temporary + self.less_bytes[rank], np.inf)

    def _rank_bytes(self, length: Ints, stop: Ints) -> Floats:
        """Return [cut, rank]."""
        receives = np.array([kind.receives for kind in self._kinds])[self.kind_of]
        received = np.where(receives, self.received[length, stop], 0.0)
        saved = np.stack([self.activation[length, stop] + received, self.kept[length, stop] + received], axis=-1)
        by_rank = saved[:, self.stages_of].reshape(len(length), self.ranks, -1).swapaxes(0, 1)  # [rank, cut, slot * 2]
        held = self.held.reshape(self.ranks, self.held.shape[1], -1).swapaxes(1, 2)  # [rank, slot * 2, moment]
        most = np.matmul(by_rank, held).max(axis=2).T
        static, temporary = self.static[length, stop], self.temporary[length, stop]
        rank_bytes: Floats = most + static[:, self.stages_of].sum(axis=2) + temporary[:, self.stages_of].max(axis=2)
        return rank_bytes + self.less_bytes

    def _sums(self, values: Sequence[float] | Floats) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])[self._ends]
        sums: Floats = total[None, :] - total[self._start]
        return sums

    def _largest(self, values: Sequence[float]) -> Floats:
        single = np.maximum.reduceat(np.asarray(values, dtype=np.float64), self.firsts)
        largest = np.zeros(self._start.shape)
        for k in range(1, self.longest + 1):
            largest[k] = np.maximum(largest[k - 1], single[np.minimum(self._start[k], self.units - 1)])
        return largest

    def _seconds(self, assigned: Assigned, schedule: PipelineSchedule, blocking: bool) -> Seconds:
        none = (0.0, 0.0)
        own, crossing = _rounded(
            np.array(
                [[(u.forward_s, u.input_gradient_s, u.weight_gradient_s) for u in each] for each in assigned.units]
            ),
            np.array([[none, *((b.forward_s, b.backward_s) for b in each), none] for each in assigned.boundaries]),
        )
        crossing = crossing[:, self._ends]
        # Of equal devices, one array stands for all kinds of stages.
        devices = [kind.device for kind in self._kinds] if len(own) > 1 else [0]
        ahead = crossing[[kind.ahead for kind in self._kinds]][:, self._start]
        behind = crossing[[kind.behind for kind in self._kinds]]
        receives = np.array([kind.receives for kind in self._kinds], dtype=np.float64)[:, None, None]
        sends = np.array([kind.sends for kind in self._kinds], dtype=np.float64)[:, None, None]
        forward, input_gradient, weight_gradient = (
            np.stack([self._sums(own[device, :, part]) for device in devices]) for part in range(3)
        )
        return Seconds(
            ranks=self.ranks,
            interleave=self.stages // self.ranks,
            microbatches=schedule.microbatches,
            blocking=blocking,
            forward=forward,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            received_forward=receives * ahead[..., 0],
            received_backward=receives * ahead[..., 1],
            sent_forward=sends * behind[:, None, :, 0],
            awaited_backward=sends * behind[:, None, :, 1],
            fills=np.array([kind.fills for kind in self._kinds], dtype=np.float64)[:, None, None],
        )


def _rounded(own: Floats, crossing: Floats) -> tuple[Floats, Floats]:
    """Return seconds of units and transfers, by kind, rounded such that their sums are exact."""
    whole = own.sum(axis=(1, 2)).max() + crossing.sum(axis=(1, 2)).max()
    if whole <= 0:
        return own, crossing
    quantum = 2.0 ** (np.ceil(np.log2(whole)) - _RESOLUTION_BITS)
    return np.rint(own / quantum) * quantum, np.rint(crossing / quantum) * quantum


def kept_bytes(unit: Unit) -> int:
    """Return what of a unit's activations waits for its weight gradient."""
    return unit.activation_bytes if unit.kept_bytes is None else unit.kept_bytes


def temporary_bytes(unit: Unit, schedule: PipelineSchedule) -> int:
    """Return the most that a unit holds beyond its activations while it runs under a schedule."""
    apart = unit.temporary_apart_bytes
    return unit.temporary_bytes if apart is None or not schedule.splits_backward else apart


class _Kind(NamedTuple):
    """What tells stages apart that are made of the same units."""

    receives: bool
    """Whether the stage before is on another rank; so, too, of the first stage, which receives nothing."""

    sends: bool
    fills: bool
    """Whether it is ahead of the last rank's first stage, where ranks have several."""

    device: int
    ahead: int
    """The link that it receives over; 0 where it receives nothing."""

    behind: int
    """The link that it sends over; 0 where it sends nothing."""


def _kinds(assigned: Assigned, schedule: PipelineSchedule) -> tuple[list[_Kind], Ints]:
    """Return the kinds that there are, and which each stage is: few, so that runs are priced for few."""
    rank_of, last = schedule.rank_of, schedule.stages - 1
    each = []
    for stage, rank in enumerate(rank_of):
        receives = stage > 0 and rank_of[stage - 1] != rank
        sends = stage < last and rank_of[stage + 1] != rank
        kind = _Kind(
            receives=receives or stage == 0,
            sends=sends or stage == last,
            fills=schedule.stages > schedule.ranks and stage < schedule.ranks - 1,
            device=assigned.device_of[rank],
            ahead=assigned.link_of[stage] if receives else 0,
            behind=assigned.link_of[stage + 1] if sends else 0,
        )
        each.append(kind)
    kinds = sorted(set(each))
    return kinds, np.array([kinds.index(kind) for kind in each])


def _all_held(schedule: PipelineSchedule) -> Floats:
    """Return what all ranks hold, see `in_flight`; moments that some ranks have fewer of hold nothing."""
    each = [in_flight(schedule, rank) for rank in range(schedule.ranks)]
    padded = np.zeros((len(each), max(map(len, each)), *each[0].shape[1:]))
    for rank, moments in enumerate(each):
        padded[rank, : len(moments)] = moments
    return padded


_ACTIVATIONS: Mapping[Kind, int] = {"F": 1, "B": -1, "I": -1, "W": 0}
_KEPT_PARTS: Mapping[Kind, int] = {"F": 0, "B": 0, "I": 1, "W": -1}


def in_flight(schedule: PipelineSchedule, rank: int) -> Floats:
    """Return [moment, own stage, 2]: micro-batches of which a rank holds activations, and kept parts, at a moment.

    Only moments at which no other holds as much of everything. Counted through the rank's actions, so that it is exact
    for every schedule: activations are held from the start of F to the end of B or I, kept parts from there to the end
    of W.
    """
    own = [stage for stage, owner in enumerate(schedule.rank_of) if owner == rank]
    slot = {stage: 2 * place for place, stage in enumerate(own)}
    now, seen = [0] * (2 * len(own)), set()
    for stage, kind, _ in schedule.actions[rank]:
        if kind not in COMPUTE:
            continue
        at = slot[stage]
        now[at] += _ACTIVATIONS[kind]
        now[at + 1] += _KEPT_PARTS[kind]
        if kind in "FI":
            seen.add(tuple(now))
    moments: list[Ints] = []
    states = np.array(sorted(seen, key=sum, reverse=True))  # covered by one of a larger sum, if at all
    while len(states):
        moments.append(states[0])
        states = states[~(states <= states[0]).all(axis=1)]
    return np.array(moments, dtype=np.float64).reshape(len(moments), len(own), 2)


def most_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return, of each stage, of how many micro-batches its rank holds what it saved, at most."""
    held = [in_flight(schedule, rank) for rank in range(schedule.ranks)]
    own = [[stage for stage, owner in enumerate(schedule.rank_of) if owner == rank] for rank in range(schedule.ranks)]
    most = {
        stage: int(max(1, held[rank][:, place, 0].max()))
        for rank, stages in enumerate(own)
        for place, stage in enumerate(stages)
    }
    return tuple(most[stage] for stage in range(schedule.stages))


def _too_few(units: int, apart: int, schedule: PipelineSchedule) -> UsageError:
    interleave = schedule.stages // schedule.ranks
    parted = f"{units} units" if apart == units else f"{units} units, to be parted at {apart - 1} places,"
    return UsageError(
        f"{parted} are too few for {schedule.stages} stages ({schedule.ranks} ranks with {interleave} each): at most "
        f"{apart // interleave} ranks of {interleave} stages, or fewer stages a rank (--fix pp=N, --fix interleave=N)"
    )
