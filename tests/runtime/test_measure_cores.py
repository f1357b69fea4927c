"""What is measured of shared cores: which ranks share them, and how much all of them do at once."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import measure_cores as module
from autopar.runtime.measure_cores import MeasuredCores, machine_ranks, measure_cores
from autopar.runtime.measure_effort import Effort
from autopar.runtime.ranks import Ranks
from tests.support.ranks import RankPool


@pytest.mark.parametrize(
    ("machines", "size"),
    [("a", 1), ("aaaa", 4), ("aabb", 2), ("abcd", 1), ("abab", None), ("aab", None), ("abb", None), ("aabbaa", None)],
)
def test_ranks_of_a_machine_are_equal_runs_or_nothing_is_said_of_them(machines: str, size: int | None):
    assert machine_ranks(machines) == size


def test_a_rank_has_one_core_at_most_and_disturbed_rounds_do_not_count():
    assert MeasuredCores(4, (1.9, 2.0, 0.2, 2.1, 1.8)).value == 1.9
    assert MeasuredCores(2, (2.1, 2.3, 2.2)).value == 2.0


def test_ranks_of_this_machine_measure_what_they_do_at_once():
    with RankPool(2) as pool:
        found = pool.run(_measured)

    assert found[0].error == ""
    assert found[0].value == found[1].value
    cores = found[0].value
    assert cores.ranks == 2
    assert len(cores.cores) == 2
    assert 0 < cores.value <= 2


def _measured(_: int) -> MeasuredCores | None:
    module._ROUND_S = 0.05
    torch.set_num_threads(1)
    return measure_cores(Ranks.join(), Effort(longest_s=0.05, runs=2))
