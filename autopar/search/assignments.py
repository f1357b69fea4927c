"""Which block of ranks takes which place in a pipeline, where blocks have unlike devices.

Blocks of one kind are interchangeable, so what is searched are the distinct orders of kinds: all of them while they are
few, each with the best cuts for it; else some that are likely best - the fastest last or first, those with most memory
first - and what is reached from the best of these by exchanging two blocks of unlike kinds, while that helps.

Of a kind, blocks keep the order of their ranks. So equal blocks stay where they are: along a chain of stages each
group of near blocks is then passed through once, and no order crosses any link level less often. (With values of
unlike size between blocks another order may cross a slow level where less passes; the cut can do so as well.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial, prod

from autopar.search.cuts import Cut, Cuts, NoCut

Order = tuple[int, ...]
"""The block of each pipeline rank."""

MOST, MOST_INTERLEAVED = 40, 12
"""Orders for which cuts are searched at most, a tenth of a second each; where ranks have several stages, of which
the search takes four times as long."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells blocks apart, as far as likely orders need it."""

    speed: float
    """Relative: how fast its devices compute."""

    free_bytes: int
    """What its devices can hold."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A cut for one order of blocks."""

    order: Order
    cut: Cut


def orders(kind_of: Sequence[int]) -> int:
    """Return how many distinct orders of the blocks' kinds there are."""
    counts = Counter(kind_of).values()
    return factorial(len(kind_of)) // prod(map(factorial, counts))


def find_placed(
    kind_of: Sequence[int],
    kinds: Sequence[Kind],
    cuts_of: Callable[[Order], Cuts | NoCut],
    *,
    keep: int = 5,
    most: int = MOST,
) -> list[Placed] | NoCut:
    """Return all cuts of the best order, then the best cut of each of the next `keep` orders, or what would fit.

    `kind_of` is the kind of each block, in the order of their ranks. The first is optimal for the closed form where
    no more than `most` orders exist and the cuts of each are.
    """
    found: dict[Order, Cuts | NoCut] = {}

    def step_s(sequence: Sequence[int]) -> float:
        order = _blocks(kind_of, sequence)
        if order not in found:
            found[order] = cuts_of(order)
        cuts = found[order]
        return cuts.cuts[0].step_s if isinstance(cuts, Cuts) else float("inf")

    if orders(kind_of) <= most:
        for sequence in _sequences(kind_of):
            step_s(sequence)
    else:
        best = min(_likely(kind_of, kinds), key=step_s)
        _exchange(best, step_s, lambda: len(found) < most)
    ranked = sorted(
        ((order, cuts) for order, cuts in found.items() if isinstance(cuts, Cuts)),
        key=lambda each: each[1].cuts[0].step_s,
    )
    if not ranked:
        return min((cuts for cuts in found.values() if isinstance(cuts, NoCut)), key=lambda each: each.least_bytes)
    (first, near), *others = ranked
    return [Placed(first, cut) for cut in near.cuts] + [Placed(other, cuts.cuts[0]) for other, cuts in others[:keep]]


def _blocks(kind_of: Sequence[int], sequence: Sequence[int]) -> Order:
    """Return the blocks that a sequence of kinds takes: of each kind in the order of their ranks."""
    left = {kind: [at for at, each in enumerate(kind_of) if each == kind] for kind in set(kind_of)}
    return tuple(left[kind].pop(0) for kind in sequence)


def _sequences(kind_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all distinct orders of kinds, that of the ranks first."""
    found: list[tuple[int, ...]] = [()]
    counts = Counter(kind_of)
    for _ in kind_of:
        found = [(*begun, kind) for begun in found for kind in counts if begun.count(kind) < counts[kind]]
    first = tuple(kind_of)
    return [first, *(each for each in found if each != first)]


def _likely(kind_of: Sequence[int], kinds: Sequence[Kind]) -> list[tuple[int, ...]]:
    """Return some orders of kinds: as the ranks are, fastest first, most memory first, and each of these reversed."""
    given = tuple(kind_of)
    fast = tuple(sorted(given, key=lambda kind: -kinds[kind].speed))
    roomy = tuple(sorted(given, key=lambda kind: -kinds[kind].free_bytes))
    return list(dict.fromkeys(each for one in (given, fast, roomy) for each in (one, one[::-1])))


def _exchange(sequence: tuple[int, ...], step_s: Callable[[Sequence[int]], float], goes_on: Callable[[], bool]) -> None:
    """Exchange blocks of unlike kinds, neighbours first, while the step gets shorter and the search goes on."""
    best_s = step_s(sequence)
    pairs = sorted(combinations(range(len(sequence)), 2), key=lambda pair: pair[1] - pair[0])
    improved = True
    while improved:
        improved = False
        for one, other in pairs:
            if not goes_on():
                return
            if sequence[one] == sequence[other]:
                continue
            tried = list(sequence)
            tried[one], tried[other] = tried[other], tried[one]
            if (tried_s := step_s(tried)) < best_s:
                sequence, best_s, improved = tuple(tried), tried_s, True
