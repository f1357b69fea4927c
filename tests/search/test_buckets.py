"""Reductions that travel together: the best of all ways to cut their sequence."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.api import captured_for
from autopar.costs.buckets import Reduction, Seconds, bucketed
from autopar.costs.moves import settled_by
from autopar.costs.outcome import Outcome
from autopar.ir.graph import Graph
from autopar.ir.placement import Layout, Replicate, Shard


def reductions(moments: Sequence[float], sizes: Sequence[int]) -> list[Reduction]:
    return [
        Reduction(f"p{i}", 0, size, "float32", at) for i, (at, size) in enumerate(zip(moments, sizes, strict=False))
    ]


def cuts(count: int) -> Iterator[list[int]]:
    """Yield every way to cut a sequence into runs, as their borders."""
    for chosen in range(2 ** (count - 1)):
        yield [0, *(i + 1 for i in range(count - 1) if chosen >> i & 1), count]


def free(_size: int) -> float:
    return 0.0


def ends_s(runs: Sequence[Sequence[Reduction]], latency_s: float, end_s: float, issue_s: Seconds) -> float:
    """Return when the step ends: reductions one after another, each when its last member is ready.

    Each delays the computation behind it, and so all gradients that come later.
    """
    done, later = 0.0, 0.0
    for run in runs:
        size = sum(each.bytes for each in run)
        done = max(done, max(each.ready_s for each in run) + later) + latency_s + size * 1e-3
        later += issue_s(size)
    return max(done, end_s + later)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 2000)), min_size=1, max_size=8),
    st.floats(0, 3),
    st.floats(0, 12),
    st.sampled_from([0.0, 0.125]),
    st.sampled_from([0.0, 2**-11]),
)
def test_no_other_cut_ends_earlier_or_as_early_with_fewer_calls(pairs, latency_s, end_s, call_s, byte_s):
    def issue_s(size: int) -> float:
        return min(call_s, latency_s) + size * byte_s

    given_ = sorted(reductions(*zip(*pairs, strict=True)), key=lambda each: each.ready_s)

    found = bucketed(given_, lambda size: latency_s + size * 1e-3, end_s, issue_s, enough=0.0, patience=0.0)

    assert [each for run in found for each in run] == given_
    every = [
        (ends_s(runs, latency_s, end_s, issue_s), len(runs))
        for borders in cuts(len(given_))
        for runs in [[given_[a:b] for a, b in pairwise(borders)]]
    ]
    least_s = min(ends for ends, _ in every)
    assert ends_s(found, latency_s, end_s, issue_s) <= least_s * (1 + 1e-9)
    assert len(found) <= min((calls for ends, calls in every if ends == least_s), default=len(given_))


def test_a_link_that_is_narrow_only_for_unhindered_computation_carries_the_last_gradient_alone():
    given_ = reductions([0.0627 * (i + 1) for i in range(8)], [100] * 8)

    def seconds(size: int) -> float:
        return 0.004 + 7.85e-4 * size

    beside = bucketed(given_, seconds, end_s=0.5016, issue_s=free)
    taking = bucketed(given_, seconds, end_s=0.5016, issue_s=lambda size: 4e-4 + 3.36e-4 * size)

    assert len(beside[-1]) > 1
    assert len(taking[-1]) == 1


def test_what_hides_behind_computation_is_merged_and_the_last_goes_alone():
    given_ = reductions([1.0, 2.0, 3.0, 9.0], [100, 100, 100, 100])

    found = bucketed(given_, lambda size: 0.5 + size * 1e-3, end_s=9.0, issue_s=free)

    assert [[each.name for each in run] for run in found] == [["p0", "p1", "p2"], ["p3"]]


def test_messages_that_are_large_enough_are_merged_no_further():
    given_ = reductions([1.0] * 6, [1000] * 6)

    found = bucketed(given_, lambda size: 1e-3 + size * 1e-3, end_s=0.0, issue_s=free)

    assert max(len(run) for run in found) <= 2


def test_what_is_ready_early_does_not_wait_for_what_is_late_to_save_a_short_call():
    given_ = reductions([1.0, 1.001, 5.0], [1000, 1, 1000])

    def seconds(size: int) -> float:
        return 0.03 + size * 1e-3

    found = bucketed(given_, seconds, end_s=9.0, issue_s=lambda _size: 0.01)
    patient = bucketed(given_, seconds, end_s=9.0, issue_s=lambda _size: 0.01, patience=0.0)

    assert [[each.name for each in run] for run in found] == [["p0", "p1"], ["p2"]]
    assert len(patient) == 1


@dataclass(frozen=True)
class Laid:
    """Layouts by operator, whole where none is given."""

    graph: Graph
    parts: frozenset[str]

    def layout(self, name: str, _index: int = 0) -> Layout:
        return (Shard(0),) if name in self.parts else (Replicate(),)

    def strategy(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(inputs=tuple(self.layout(ref.op, ref.index) for ref in self.graph.by_name[name].refs))


def test_a_cast_whose_result_is_gathered_again_cannot_wait_until_the_end():
    captured = captured_for(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), (torch.randn(2, 4),), "bf16", training=True, with_backward=True
    )
    graph = captured.graph
    casts = {each.name: each.ref.op for each in graph.outputs if each.kind == "gradient" and each.ref is not None}
    assert {graph.by_name[cast].target for cast in casts.values()} == {"aten._to_copy.default"}
    name, cast = next(iter(casts.items()))

    whole = settled_by(laid(graph, frozenset()))
    gathered = settled_by(laid(graph, frozenset({cast})))
    stays = settled_by(laid(graph, frozenset({cast, name})))

    assert set(casts.values()) <= whole
    assert set(casts.values()) - gathered == {cast}
    assert cast in stays


def laid(graph: Graph, parts: frozenset[str]) -> Outcome:
    return typing.cast(Outcome, Laid(graph, parts))


def test_a_jump_of_the_price_ends_no_run_where_longer_ones_save_again():
    """A collective that changes its form with its size costs a tenth more where the forms are close."""
    given_ = reductions([0.1 * (i + 1) for i in range(12)], [100] * 12)

    def least_s(size: int) -> float:
        return min(0.02 + size * 1e-3, 0.2 + size * 5e-4)

    def seconds(size: int) -> float:
        return least_s(size) * (1.1 if 300 <= size <= 600 else 1.0)

    stopped = bucketed(given_, seconds, end_s=9.0, issue_s=lambda size: 0.5 * seconds(size), patience=0.01)
    found = bucketed(
        given_,
        seconds,
        end_s=9.0,
        issue_s=lambda size: 0.5 * seconds(size),
        patience=0.01,
        smooth_s=lambda size: 1.5 * least_s(size),
    )

    assert max(len(run) for run in stopped) < 3
    assert max(len(run) for run in found) > 6
