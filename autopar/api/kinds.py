"""Trials by kind: those of a kind are estimated wrong in the same way, and differ by little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from autopar.costs.rough import Shape
from autopar.search.meshes import Candidate, MeshAxis
from autopar.search.trials import Recompute, Trial

Alone = tuple[int, int]
"""Ranks that share each sample: along which its tokens are split, and along which its tensors are."""

_ALIKE = 3
"""Trials of a kind that are relaxed before those of others."""


def shape_of(trial: Trial) -> Shape:
    """Return the numbers of a trial that estimates read."""
    tokens, width = alone(trial)
    shards = prod(axis.size for axis in trial.ranks if axis.role in {"dp_shard", "cp", "ep"})
    experts = prod(axis.size for axis in trial.ranks if axis.role == "ep")
    return Shape(trial.depth, trial.microbatches, trial.replicas * tokens, shards, width, experts)


def alone(trial: Trial) -> Alone:
    """Return along how many ranks a sample's tokens are split, and along how many its tensors are."""
    tokens = prod(axis.size for axis in trial.ranks if axis.role == "cp")
    return tokens, prod(axis.size for axis in trial.ranks) // (trial.replicas * tokens)


def beside_data(trial: Trial) -> Candidate:
    """Return the axes along which ranks do not just take other samples: of tensors, tokens, experts, and free ones."""
    return tuple(axis for axis in trial.ranks if axis.role not in {"dp_replicate", "dp_shard"})


def tensor_parallel(batch: int, size: int, width: int, recompute: Recompute = "none") -> Trial:
    """Return the trial of micro-batches of so many samples on nothing but ranks along which tensors are split."""
    return on_ranks(batch, size, (MeshAxis("tp", width),) if width > 1 else (), recompute)


def on_ranks(batch: int, size: int, ranks: Candidate, recompute: Recompute = "none") -> Trial:
    """Return the trial of micro-batches of so many samples on nothing but these ranks."""
    count = batch // size
    in_time = (MeshAxis("microbatch", count),) if count > 1 else ()
    return Trial((*in_time, *ranks), recompute=recompute)


def varied(trials: Sequence[Trial]) -> list[Trial]:
    """Return sorted trials such that the best few of every kind come before the others of any.

    Trials of a kind - as many ranks to a sample, as much recomputed, all with stages or without - are estimated wrong
    in the same way, and differ by little.
    """
    seen: Counter[tuple[Alone, Recompute, bool]] = Counter()
    turns: list[int] = []
    for trial in trials:
        kind = (*kind_of(trial), trial.depth > 1)
        turns.append(seen[kind] // _ALIKE)
        seen[kind] += 1
    return [trials[place] for place in sorted(range(len(trials)), key=lambda each: (turns[each], each))]


def kind_of(trial: Trial) -> tuple[Alone, Recompute]:
    """Return along how many ranks tokens and tensors are split, and what is recomputed."""
    return alone(trial), trial.recompute


def is_harder(trial: Trial, than: Trial) -> bool:
    """Return whether what is foreseen of a trial is too fast by no less than of another of its kind.

    More stages divide less evenly, and with fewer micro-batches a stage what nobody foresaw is waited for more often.
    """
    if kind_of(trial) != kind_of(than) or (trial.depth > 1) != (than.depth > 1):
        return False
    if trial.depth == 1:
        return True
    return trial.depth >= than.depth and trial.microbatches * than.depth <= than.microbatches * trial.depth
