"""What is said of a calibration that something else disturbed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.report.calibration import disturbed


def calibration(*, ranks: int, cores: float) -> Any:
    return SimpleNamespace(machine=SimpleNamespace(machine_devices=ranks, cores=cores))


@pytest.mark.parametrize(
    ("ranks", "measured", "cores"), [(2, 1.98, 2), (4, 1.98, 2), (1, 0.0, 8), (2, 1.9, 64)], ids=str
)
def test_nothing_is_said_of_ranks_that_had_their_cores(ranks: int, measured: float, cores: int):
    assert disturbed(calibration(ranks=ranks, cores=measured), cores) == ""


def test_ranks_without_their_cores_are_told_with_both_numbers_and_what_to_do():
    assert disturbed(calibration(ranks=2, cores=1.192), 2) == (
        "2 ranks on 2 cores computed 1.19 ranks' worth of products at once, not 2: these cores are hyperthreads, or "
        "something else was running. In that case calibrate again on an idle machine; all figures of this calibration "
        "are too slow"
    )
