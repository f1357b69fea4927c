"""Time of one step of a pipeline, and what it holds, where closed forms exist.

Symbols, used by every formula here:
    p      ranks of the pipeline
    m      micro-batches of one step
    v      stages a rank (virtual stages)
    f      forward of one micro-batch on all stages of a rank, s
    i, w   input gradient and weight gradient, likewise, s
    b      full backward, s: i + w
    rank   position of the rank, 0 first

All ranks take the same time and transfers none; `autopar.simulate` is for what is uneven, and its makespans equal these
forms (tests/simulate/test_makespan.py).

Sources: GPipe, 1F1B and its interleaved form: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC 2021, section 2.2, there for m a multiple of p; the interleaved form here is that of
rounds of any size. Zero bubble: Qi, Wan, Huang & Lin, ICLR 2024, table 2, there for w <= f and w <= i.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError, suggestion
from cost_models.formula import Formula, Number, registry

FloatArray = npt.NDArray[np.float64]

_P = ("p", "ranks of the pipeline")
_M = ("m", "micro-batches")
_V = ("v", "stages a rank")
_F = ("f", "forward of one micro-batch on one rank, s")
_B = ("b", "backward of one micro-batch on one rank, s")
_I = ("i", "input gradient of one micro-batch on one rank, s")
_W = ("w", "weight gradient of one micro-batch on one rank, s")
_RANK = ("rank", "position of the rank, 0 first")
_MEGATRON = "Narayanan et al. 2021, section 2.2"
_QI = "Qi et al. 2024, table 2"

MAKESPANS: Mapping[str, Formula] = registry(
    Formula("gpipe", "(m + p - 1)*(f + b)", (_P, _M, _F, _B), _MEGATRON),
    Formula("1f1b", "(m + p - 1)*(f + b)", (_P, _M, _F, _B), _MEGATRON),
    Formula(
        "interleaved_1f1b",
        "(Max(m, p) + (Min(m, p) - 1)/v)*(f + b)",
        (_P, _M, _V, _F, _B),
        f"{_MEGATRON}: m*(f + b) + (p - 1)*(f + b)/v where m >= p; of fewer, each round waits for the ranks",
    ),
    Formula(
        "zb_h1",
        "m*(f + i + w) + (p - 1)*Max(f, i, f + i - w)",
        (_P, _M, _F, _I, _W),
        f"{_QI}: ZB-H1's bubble (p - 1)*(f + i - w), extended to w > f or w > i; a lower bound where m < p",
    ),
    Formula(
        "zbv",
        "m*(f + i + w) + (p - 1)*f/2",
        (_P, _M, _F, _I, _W),
        "no bubble between the first and last action of any rank (Qi et al. 2024, section 6), the last rank's first "
        "waits for p - 1 half forwards; reached where f = i = w and m >= 2*p - 1, a lower bound elsewhere",
    ),
)
"""Seconds of one step, by the schedule's name."""

IN_FLIGHT: Mapping[str, Formula] = registry(
    Formula("gpipe", "m", (_P, _M, _V, _RANK), _MEGATRON),
    Formula("1f1b", "Min(m, p - rank)", (_P, _M, _V, _RANK), _MEGATRON),
    Formula(
        "interleaved_1f1b",
        "Min(m*v, (v - 1)*ceiling(m/Max(1, floor(m/p))) + Min(2, v)*(p - 1 - rank) + 1)",
        (_P, _M, _V, _RANK),
        f"{_MEGATRON}: forwards ahead of the first backward, a round of micro-batches on each stage but the last",
    ),
    Formula("zb_h1", "Min(m, p)", (_P, _M, _V, _RANK), f"{_QI}, counting what waits for its weight gradient"),
    Formula("zbv", "2*Min(m, p)", (_P, _M, _V, _RANK), f"{_QI}: an upper bound where m < 2*p - 1"),
)
"""Most micro-batches of one stage held at once on a rank, over all of its stages, by the schedule's name."""


def makespan_s(
    schedule: str,
    *,
    ranks: Number,
    microbatches: Number,
    forward_s: Number,
    input_gradient_s: Number,
    weight_gradient_s: Number,
    interleave: Number = 1,
) -> FloatArray:
    """Return the seconds of one step; times are of one micro-batch on one rank, all of its stages together.

    Raises `CostModelError` for a schedule without a closed form.
    """
    backward_s = np.asarray(input_gradient_s) + np.asarray(weight_gradient_s)
    known: Mapping[str, Number] = {
        "p": ranks,
        "m": microbatches,
        "v": interleave,
        "f": forward_s,
        "b": backward_s,
        "i": input_gradient_s,
        "w": weight_gradient_s,
    }
    formula = _formula(MAKESPANS, schedule)
    return formula.evaluate(**{name: known[name] for name in formula.symbol_names})


def bubble_fraction(
    schedule: str,
    *,
    ranks: Number,
    microbatches: Number,
    forward_s: Number,
    input_gradient_s: Number,
    weight_gradient_s: Number,
    interleave: Number = 1,
) -> FloatArray:
    """Return the share of the step in which a rank idles; arguments as of `makespan_s`."""
    total_s = makespan_s(
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        forward_s=forward_s,
        input_gradient_s=input_gradient_s,
        weight_gradient_s=weight_gradient_s,
        interleave=interleave,
    )
    busy_s = np.asarray(microbatches) * (
        np.asarray(forward_s) + np.asarray(input_gradient_s) + np.asarray(weight_gradient_s)
    )
    return np.asarray(1.0 - busy_s / total_s, dtype=np.float64)


def in_flight(
    schedule: str, *, ranks: Number, microbatches: Number, rank: Number, interleave: Number = 1
) -> FloatArray:
    """Return how many micro-batches of one stage a rank holds at most, counted over all of its stages.

    With interleave v a rank's activations are that number times those of one of its v stages. Raises `CostModelError`
    for a schedule without a closed form.
    """
    return _formula(IN_FLIGHT, schedule).evaluate(p=ranks, m=microbatches, v=interleave, rank=rank)


def _formula(formulas: Mapping[str, Formula], schedule: str) -> Formula:
    if schedule not in formulas:
        known = ", ".join(formulas)
        message = f"no closed form for schedule {schedule!r}{suggestion(schedule, formulas)}; known: {known}"
        raise CostModelError(message)
    return formulas[schedule]
