"""The schedules that have a name, for any number of ranks and micro-batches.

Each is a pattern of (stage, kind) for every rank; micro-batches of one stage and kind go in order, so the numbers
follow by counting.

Sources: GPipe: Huang et al. 2019. 1F1B and its interleaved form: Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", SC 2021. ZB-H1 and ZB-V: Qi, Wan, Huang & Lin, "Zero Bubble Pipeline
Parallelism", ICLR 2024, and "Pipeline Parallelism with Controllable Memory", NeurIPS 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autopar.errors import UsageError
from autopar.ir.schedule import Action, Kind, PipelineSchedule, loop, v_shape
from autopar.suggest import did_you_mean

Pattern = list[tuple[int, Kind]]
"""Stage and kind of one rank's actions in order."""


@dataclass(frozen=True, slots=True)
class Named:
    """How a named schedule is made."""

    pattern: Callable[[int, int, int, int], Pattern]
    """Of (rank, ranks, micro-batches, interleave)."""

    interleave: int | None
    """Stages a rank; None: any number."""

    splits_backward: bool = False
    """Whether input and weight gradients are computed apart."""


def names() -> tuple[str, ...]:
    """Return the names that `generate` knows."""
    return tuple(_NAMED)


def named(name: str) -> Named:
    """Return how the schedule of that name is made.

    Raises `UsageError` with the closest name where there is none.
    """
    if name not in _NAMED:
        raise UsageError(f"unknown schedule {name!r}{did_you_mean(name, _NAMED)}; known: {', '.join(_NAMED)}")
    return _NAMED[name]


def generate(name: str, *, ranks: int, microbatches: int, interleave: int | None = None) -> PipelineSchedule:
    """Return a named schedule of computations; `interleave` is the number of stages a rank.

    Without `interleave` it is what the schedule demands (zbv: 2), or 2 where any will do. Stages are numbered over all
    ranks, round the ranks or, for zbv, down and back. Raises `UsageError` for an unknown name or a wrong number.
    """
    rule = named(name)
    interleave = interleave or rule.interleave or 2
    for what, count in (("ranks", ranks), ("micro-batches", microbatches), ("stages a rank", interleave)):
        if count < 1:
            raise UsageError(f"a pipeline schedule needs at least 1 of {what}, not {count}")
    if rule.interleave not in (None, interleave):
        raise _wrong_interleave(name, interleave, rule.interleave)
    rank_of = v_shape(ranks) if name == "zbv" else loop(ranks, interleave)
    rows = (_numbered(rule.pattern(rank, ranks, microbatches, interleave), microbatches) for rank in range(ranks))
    return PipelineSchedule(rank_of, microbatches, tuple(rows), name)


def rounds(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return how many micro-batches go through one stage before an interleaved rank turns to its next stage.

    As many rounds as there are whole sets of `ranks` micro-batches, at least one, of sizes that differ by 1 at most,
    larger ones first: 10 micro-batches on 4 ranks go in 5 and 5, 3 in one round of 3.
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def _gpipe(rank: int, ranks: int, microbatches: int, interleave: int) -> Pattern:
    """All forwards, then all backwards."""
    return _alternating([rank] * microbatches, [rank] * microbatches, microbatches)


def _one_f_one_b(rank: int, ranks: int, microbatches: int, interleave: int) -> Pattern:
    """As many forwards as there are ranks below, then forward and backward in turn, then the backwards left."""
    warmup = min(microbatches, ranks - 1 - rank)
    return _alternating([rank] * microbatches, [rank] * microbatches, warmup)


def _interleaved(rank: int, ranks: int, microbatches: int, interleave: int) -> Pattern:
    """1F1B over the rank's stages in turn, a round of micro-batches on each; two more forwards ahead a rank below."""
    own = [rank + chunk * ranks for chunk in range(interleave)]
    sizes = rounds(ranks, microbatches)
    forwards = [stage for size in sizes for stage in own for _ in range(size)]
    backwards = [stage for size in sizes for stage in reversed(own) for _ in range(size)]
    ahead = 2 if interleave > 1 else 1
    warmup = (interleave - 1) * sizes[0] + ahead * (ranks - 1 - rank)
    return _alternating(forwards, backwards, min(warmup, len(forwards)))


def _zb_h1(rank: int, ranks: int, microbatches: int, interleave: int) -> Pattern:
    """1F1B's order of forwards and input gradients; weight gradients follow `rank` micro-batches later.

    Activations and what waits for weight gradients are then `ranks` micro-batches on every rank: 1F1B's largest.
    """
    pattern: Pattern = []
    gradients = 0
    for stage, kind in _one_f_one_b(rank, ranks, microbatches, interleave):
        pattern.append((stage, "I" if kind == "B" else kind))
        gradients += kind == "B"
        if kind == "B" and gradients > rank:
            pattern.append((stage, "W"))
    late: Pattern = [(rank, "W")] * min(rank, microbatches)
    return pattern + late


def _zbv(rank: int, ranks: int, microbatches: int, interleave: int) -> Pattern:
    """Two stages a rank, down and back, so that the rank that starts first also has the loss: no bubble if F = I = W.

    The pattern is that of at least 2 * ranks - 1 micro-batches; of fewer, the numbers too high are left out.
    """
    down, back = rank, 2 * ranks - 1 - rank
    below = ranks - rank
    steps = max(microbatches, 2 * ranks - 1) - ranks
    down_forward: Pattern = [(down, "F")]
    down_backward: Pattern = [(down, "I"), (down, "W")]
    back_both: Pattern = [(back, "F"), (back, "I"), (back, "W")]
    with_forward = steps - ranks + rank + 1

    warmup = down_forward * (2 * below - 1) + [(back, "F"), *down_forward] * rank + back_both * below
    steady = [*down_forward, *down_backward, *back_both] * with_forward
    steady += [*down_backward, *back_both] * (steps - with_forward)
    drain: Pattern = [(down, "I"), (back, "I")]
    back_late: Pattern = [(back, "W")]
    down_late: Pattern = [(down, "W")]
    return warmup + steady + drain * rank + down_backward * below + back_late * rank + down_late * rank


def _alternating(forwards: Sequence[int], backwards: Sequence[int], warmup: int) -> Pattern:
    """Return `warmup` forwards, then forwards and backwards in turn, then the backwards left; given by stage."""
    ahead: Pattern = [(stage, "F") for stage in forwards[:warmup]]
    turns: Iterable[tuple[int, Kind]] = chain.from_iterable(
        ((f, "F"), (b, "B")) for f, b in zip(forwards[warmup:], backwards, strict=False)
    )
    drain: Pattern = [(stage, "B") for stage in backwards[len(forwards) - warmup :]]
    return [*ahead, *turns, *drain]


def _numbered(pattern: Pattern, microbatches: int) -> tuple[Action, ...]:
    """Return the pattern with its micro-batches, counted for each stage and kind; numbers too high are left out."""
    count: Counter[tuple[int, Kind]] = Counter()
    actions = []
    for each in pattern:
        number = count[each]
        count[each] = number + 1
        if number < microbatches:
            actions.append(Action(*each, number))
    return tuple(actions)


_NAMED: Mapping[str, Named] = {
    "gpipe": Named(_gpipe, 1),
    "1f1b": Named(_one_f_one_b, 1),
    "interleaved_1f1b": Named(_interleaved, None),
    "zb_h1": Named(_zb_h1, 1, splits_backward=True),
    "zbv": Named(_zbv, 2, splits_backward=True),
}


def _wrong_interleave(name: str, interleave: int, demanded: int | None) -> UsageError:
    return UsageError(
        f"schedule {name!r} has {demanded} stages a rank, not {interleave}: use --fix interleave={demanded}, or "
        "--fix schedule=interleaved_1f1b, which takes any number"
    )
