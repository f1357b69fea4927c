"""Seconds of one step of a pipeline with uneven stages, in a form that a search over cuts can add up.

    step = sum of fill over stages + max over ranks of (sum of key over the rank's stages)

Symbols, of one micro-batch:
    p        ranks of the pipeline
    m        micro-batches of one step
    v        stages a rank
    f, i, w  forward, input gradient, weight gradient of a stage, s; t = f + i + w
    x        transfers over the boundary ahead of a stage, forward and backward together, s
    y        half of x, and half of the same over the boundary behind a stage, s
    z        what a stage sends, s: activations over the boundary behind it, gradients over the one ahead of it
    g        max(f, i, f + i - w): what a stage of zb_h1 idles for each stage beside it
    e        transfer seconds of a stage that nothing hides once the pipeline is full

    schedule            fill of a stage               key of a stage                  e, transfers beside computation
    gpipe               t + x                         (m - 1)*(t + e)                 sends longer than f, than i + w
    1f1b                t + x                         (m - 1)*(t + e)                 x*(p - 1)/p
    interleaved_1f1b    t/v + x                       (m - 1/v)*t + (m - 1)*e         max(0, x - t)/2
      where m < p       t + x                         (m - 1)*(t + e), of each stage  max(0, x - t)/2
    zb_h1               g + 2*x                       m*t - g + (m - 1)*e             max(0, x - w)*(p - 1)/p
    zbv                 x, and f of stages 0 to p-2   m*t + (m - 1)*e                 max(0, x - t)/2

Where sends block, e is z and zb_h1's fill is g + x. Stages of one rank hand over for nothing.

Sources. Sum and (m - 1) times the slowest: Zheng et al., "Alpa", OSDI 2022, equation 2, for GPipe and 1F1B alike. On
equal ranks without transfers all are the forms of `cost_models.pipeline`, which names their sources (Narayanan et al.
2021, Qi et al. 2024). What transfers add is ours, fitted to `autopar.simulate` on equal stages: k neighbouring ranks
have k micro-batches in flight under 1F1B and k - 1 boundaries inside, so a micro-batch waits for (k - 1)/k of a
boundary; zb_h1's weight gradients run meanwhile; interleaved stages have twice as many in flight.

Where boundaries differ, which stage is to make up for a slow one matters: the table's e is all on the stage behind it.
`halved` is the other form of 1f1b and zb_h1: a window of k stages takes (sum of t + sum of the x inside) / k for each
micro-batch at least, and no window takes longer than the slowest of its stages with y; zb_h1's t is then without w. So
e is y, and max(0, y - w); it makes both stages beside a slow boundary small. It counts too much where few micro-batches
or few units leave nothing to balance: neither form finds the better cut everywhere.

No bound on the simulated step: 1F1B hides part of what uneven stages wait for, or adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import UsageError
from autopar.ir.table import Floats
from autopar.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Every run of units as a stage, one micro-batch; arrays over runs, after an axis over kinds of stages."""

    ranks: int
    interleave: int
    microbatches: int
    blocking: bool
    """Whether a rank computes nothing while it sends."""

    forward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    received_forward: Floats
    """Transfer of the activations that a stage reads; 0 where their maker is on the same rank."""

    received_backward: Floats
    """Transfer of their gradients back."""

    sent_forward: Floats
    """Transfer of the activations that a stage makes; 0 where the same rank reads them."""

    awaited_backward: Floats
    """Transfer of their gradients back."""

    fills: Floats
    """1 for kinds whose forward another rank's first forward waits for, under zbv; else 0."""

    @property
    def total(self) -> Floats:
        """Return forward and both gradients."""
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def crossing(self) -> Floats:
        """Return the transfers over the boundary ahead of a stage."""
        return self.received_forward + self.received_backward

    @property
    def halves(self) -> Floats:
        """Return half of the transfers over both boundaries of a stage."""
        return (self.crossing + self.sent_forward + self.awaited_backward) / 2

    def exposed(self, otherwise: Floats) -> Floats:
        """Return all that a stage sends where sends block, else what is given."""
        return self.sent_forward + self.received_backward if self.blocking else otherwise


@dataclass(frozen=True, slots=True)
class Parts:
    """The two parts of a predicted step, arrays as of `Seconds`."""

    fill: Floats
    key: Floats
    work: Floats
    """The key less what transfers add: exactly the sum over units, but for zb_h1."""

    halved: Floats | None = None
    """The key of the other form, which halves boundaries; None where the schedule has no other."""

    by_stage: bool = False
    """Whether the largest key is that of a stage, rather than a rank's sum."""


def parts(schedule: str, seconds: Seconds) -> Parts:
    """Return fill and key of every run of units under the named schedule.

    Raises `UsageError` for a schedule without a closed form.
    """
    if schedule not in _FORMS:
        raise UsageError(
            f"no closed form for schedule {schedule!r}{did_you_mean(schedule, _FORMS)}, so no search over cuts; known: "
            f"{', '.join(_FORMS)}"
        )
    return _FORMS[schedule](seconds)


def idle_share(schedule: str, *, ranks: int, interleave: int, microbatches: int) -> float:
    """Return how many micro-batches' seconds on one rank a step is longer by, for each rank but one, than the work.

    Of even stages without transfers, whose forward and both gradients take as long each: 1 for 1f1b.
    """
    if ranks == 1:
        return 0.0
    stages = ranks * interleave
    third, nothing = np.full(stages, 1 / (3 * interleave)), np.zeros(stages)
    found = parts(
        schedule,
        Seconds(
            ranks=ranks, interleave=interleave, microbatches=microbatches, blocking=False,
            forward=third, input_gradient=third, weight_gradient=third,
            received_forward=nothing, received_backward=nothing, sent_forward=nothing, awaited_backward=nothing,
            fills=np.where(np.arange(stages) < ranks - 1, 1.0, 0.0),
        ),
    )  # fmt: skip
    key = float(found.key.max() if found.by_stage else found.key[:interleave].sum())
    return (float(found.fill.sum()) + key - microbatches) / (ranks - 1)


def _all_in_turn(each: Seconds, exposed: Floats, *, by_stage: bool = False) -> Parts:
    """Return the first micro-batch through all stages, and every other one behind it through the slowest."""
    work = (each.microbatches - 1) * each.total
    return Parts(each.total + each.crossing, work + (each.microbatches - 1) * exposed, work, by_stage=by_stage)


def _gpipe(each: Seconds) -> Parts:
    over_forward = np.maximum(0.0, each.sent_forward - each.forward)
    over_backward = np.maximum(0.0, each.received_backward - each.input_gradient - each.weight_gradient)
    return _all_in_turn(each, each.exposed(over_forward + over_backward))


def _one_f_one_b(each: Seconds) -> Parts:
    found = _all_in_turn(each, each.exposed(each.crossing * (each.ranks - 1) / each.ranks))
    return found if each.blocking else replace(found, halved=found.work + (each.microbatches - 1) * each.halves)


def _interleaved(each: Seconds) -> Parts:
    m, v = each.microbatches, each.interleave
    exposed = each.exposed(np.maximum(0.0, each.crossing - each.total) / 2)
    if m < each.ranks:
        return _all_in_turn(each, exposed, by_stage=True)
    work = (m - 1 / v) * each.total
    return Parts(each.total / v + each.crossing, work + (m - 1) * exposed, work)


def _zb_h1(each: Seconds) -> Parts:
    m, p = each.microbatches, each.ranks
    gradients = each.forward + each.input_gradient - each.weight_gradient
    idle = np.maximum(np.maximum(each.forward, each.input_gradient), gradients)
    exposed = each.exposed(np.maximum(0.0, each.crossing - each.weight_gradient) * (p - 1) / p)
    crossings = 1 if each.blocking else 2
    work = m * each.total - idle
    halved = None if each.blocking else work + (m - 1) * np.maximum(0.0, each.halves - each.weight_gradient)
    return Parts(idle + crossings * each.crossing, work + (m - 1) * exposed, work, halved)


def _zbv(each: Seconds) -> Parts:
    m = each.microbatches
    exposed = each.exposed(np.maximum(0.0, each.crossing - each.total) / 2)
    work = m * each.total
    return Parts(each.fills * each.forward + each.crossing, work + (m - 1) * exposed, work)


_FORMS: Mapping[str, Callable[[Seconds], Parts]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _interleaved,
    "zb_h1": _zb_h1,
    "zbv": _zbv,
}
