"""Reductions that travel together: the best of all ways to cut their sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.buckets import Reduction, bucketed


def reductions(moments: Sequence[float], sizes: Sequence[int]) -> list[Reduction]:
    return [
        Reduction(f"p{i}", 0, size, "float32", at) for i, (at, size) in enumerate(zip(moments, sizes, strict=False))
    ]


def cuts(count: int) -> Iterator[list[int]]:
    """Yield every way to cut a sequence into runs, as their borders."""
    for chosen in range(2 ** (count - 1)):
        yield [0, *(i + 1 for i in range(count - 1) if chosen >> i & 1), count]


def ends_s(runs: Sequence[Sequence[Reduction]], latency_s: float, end_s: float, call_s: float) -> float:
    """Return when the step ends: reductions one after another, each when its last member is ready."""
    free = 0.0
    for run in runs:
        free = max(free, max(each.ready_s for each in run)) + latency_s + sum(each.bytes for each in run) * 1e-3
    return max(free, end_s) + len(runs) * call_s


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 2000)), min_size=1, max_size=8),
    st.floats(0, 3),
    st.floats(0, 12),
    st.sampled_from([0.0, 0.1]),
)
def test_no_other_cut_ends_earlier_or_as_early_with_fewer_calls(pairs, latency_s, end_s, call_s):
    given_ = sorted(reductions(*zip(*pairs, strict=True)), key=lambda each: each.ready_s)

    found = bucketed(given_, lambda size: latency_s + size * 1e-3, end_s, call_s, enough=0.0, patience=0.0)

    assert [each for run in found for each in run] == given_
    every = [
        (ends_s(runs, latency_s, end_s, call_s), len(runs))
        for borders in cuts(len(given_))
        for runs in [[given_[a:b] for a, b in pairwise(borders)]]
    ]
    least_s = min(ends for ends, _ in every)
    assert ends_s(found, latency_s, end_s, call_s) <= least_s * (1 + 1e-9)
    assert len(found) <= min((calls for ends, calls in every if ends == least_s), default=len(given_))


def test_what_hides_behind_computation_is_merged_and_the_last_goes_alone():
    given_ = reductions([1.0, 2.0, 3.0, 9.0], [100, 100, 100, 100])

    found = bucketed(given_, lambda size: 0.5 + size * 1e-3, end_s=9.0, call_s=0.0)

    assert [[each.name for each in run] for run in found] == [["p0", "p1", "p2"], ["p3"]]


def test_messages_that_are_large_enough_are_merged_no_further():
    given_ = reductions([1.0] * 6, [1000] * 6)

    found = bucketed(given_, lambda size: 1e-3 + size * 1e-3, end_s=0.0, call_s=0.0)

    assert max(len(run) for run in found) <= 2


def test_what_is_ready_early_does_not_wait_for_what_is_late_to_save_a_short_call():
    given_ = reductions([1.0, 1.001, 5.0], [1000, 1, 1000])

    def seconds(size: int) -> float:
        return 0.03 + size * 1e-3

    found = bucketed(given_, seconds, end_s=9.0, call_s=0.01)
    patient = bucketed(given_, seconds, end_s=9.0, call_s=0.01, patience=0.0)

    assert [[each.name for each in run] for run in found] == [["p0", "p1"], ["p2"]]
    assert len(patient) == 1
