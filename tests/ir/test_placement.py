"""Which layouts split a tensor: evenly, no digit twice."""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.placement import Layout, Replicate, Shard, is_valid


@pytest.mark.parametrize(
    ("shape", "layout", "sizes"),
    [
        ((8,), (Shard(0), Shard(0, 2)), (2, 4)),
        ((8,), (Shard(0, 4), Shard(0)), (2, 4)),
        ((8,), (Shard(0, 4), Replicate()), (2, 4)),
        ((24,), (Shard(0), Shard(0, 6), Shard(0, 2)), (2, 4, 3)),
        ((2, 4), (Shard(0), Shard(1)), (2, 4)),
        ((), (Replicate(), Replicate()), (2, 4)),
    ],
)
def test_digits_one_inside_the_other_are_valid(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]):
    for order in itertools.permutations(range(len(sizes))):
        assert is_valid(shape, tuple(layout[i] for i in order), tuple(sizes[i] for i in order))


@pytest.mark.parametrize(
    ("shape", "layout", "sizes"),
    [
        pytest.param((16,), (Shard(0), Shard(0, 2)), (4, 2), id="digits overlap"),
        pytest.param((48,), (Shard(0), Shard(0, 2), Shard(0, 4)), (2, 4, 3), id="inner digits overlap"),
        pytest.param((8,), (Shard(0), Shard(0)), (2, 4), id="one digit twice"),
        pytest.param((8,), (Shard(0), Shard(0, 2)), (2, 3), id="the innermost divides unevenly"),
        pytest.param((8,), (Shard(1), Replicate()), (2, 4), id="no such dimension"),
        pytest.param((0,), (Shard(0), Replicate()), (2, 4), id="nothing to split"),
    ],
)
def test_other_digits_are_not(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]):
    for order in itertools.permutations(range(len(sizes))):
        assert not is_valid(shape, tuple(layout[i] for i in order), tuple(sizes[i] for i in order))


def test_the_innermost_digit_alone_may_be_padded():
    assert is_valid((10,), (Shard(0), Shard(0, 2)), (2, 3), padded=True)
    assert not is_valid((10,), (Shard(0), Shard(0, 3)), (3, 2), padded=True)
    assert not is_valid((4,), (Shard(0), Shard(0, 2)), (2, 3), padded=True)
