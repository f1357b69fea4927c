"""What a training process holds beside its tensors: as published logs and sources of frameworks say."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from cost_models.device import catalogued_device
from cost_models.memory import ALLOCATOR_SLACK, COMMUNICATOR_BYTES, FLAT_BUCKET, Flat, flat_bytes, process_bytes

LOGS = Path(__file__).parents[2] / "benchmarks" / "data" / "allocator_logs.csv"
A100 = catalogued_device("a100-sxm-80gb")


def _logs() -> list[tuple[float, float, float]]:
    with LOGS.open(encoding="utf-8") as file:
        return [tuple(float(value) for value in row.values()) for row in csv.DictReader(file)]  # type: ignore[misc]


def test_the_allocators_slack_is_the_median_of_published_logs():
    shares = [(reserved - peak) / (peak - resting) for resting, peak, reserved in _logs()]

    assert pytest.approx(median(shares), abs=5e-4) == ALLOCATOR_SLACK


def test_most_published_logs_are_reproduced():
    without = process_bytes(0.0, 0.0, A100, groups=0)
    errors = [
        (process_bytes(resting, peak - resting, A100, groups=0) - without) / reserved - 1
        for resting, peak, reserved in _logs()
    ]

    assert median(abs(error) for error in errors) < 0.05


def test_each_process_group_takes_buffers():
    none, four = (process_bytes(1e9, 0.0, A100, groups=groups) for groups in (0, 4))

    assert none == 1e9 + A100.reserved_bytes
    assert four - none == 4 * COMMUNICATOR_BYTES


FLAT = [
    # Of 8e9 parameters, each replica updates a quarter: their gradients flattened (2) and cast (4).
    ("sharded optimizer", {"parameters": 8e9, "state_bytes": 24e9, "gradient_item": 2, "zero": 1, "replicas": 4}, 12e9),
    # Casts (4) and their flattened copy (4) of all.
    ("no ZeRO", {"parameters": 8e9, "state_bytes": 96e9, "gradient_item": 2, "zero": 0, "replicas": 4}, 64e9),
    ("runs of 1e9", {"parameters": 2e9, "state_bytes": 24e9, "gradient_item": 2, "zero": 3, "replicas": 4}, 6e9),
    # Sums are flat already; a micro-batch's own gradients of 16 bits lie beside them.
    ("float32 sums", {"parameters": 8e9, "state_bytes": 24e9, "gradient_item": 4, "zero": 1, "replicas": 4}, 16e9),
]


@pytest.mark.parametrize(("given", "copies"), [case[1:] for case in FLAT], ids=[case[0] for case in FLAT])
def test_deepspeed_copies_gradients_before_a_step(given: dict[str, float], copies: float):
    bucket = FLAT_BUCKET * given["gradient_item"]

    assert flat_bytes(**given).both == pytest.approx(copies + bucket)  # type: ignore[arg-type]


def test_a_small_model_fills_no_bucket_and_one_rank_needs_none():
    small = flat_bytes(1e6, 12e6, 2, zero=0, replicas=2)
    alone = flat_bytes(1e6, 12e6, 2, zero=0, replicas=1)

    assert small.both - alone.both == 2e6


def test_copies_for_the_step_take_the_room_of_activations_where_a_device_has_no_other():
    around = 40e9 + A100.reserved_bytes
    small, large = (process_bytes(40e9, 20e9, A100, groups=0, flat=Flat(1e9, step)) for step in (10e9, 30e9))

    assert small == around + 20e9 * (1 + ALLOCATOR_SLACK) + 11e9, "the allocator keeps both"
    assert large == A100.memory_bytes, "it gives back what activations had, and fits"


def test_copies_beside_activations_and_ones_larger_than_they_may_not_fit():
    beside = process_bytes(40e9, 20e9, A100, groups=0, flat=Flat(30e9))
    larger = process_bytes(40e9, 20e9, A100, groups=0, flat=Flat(0.0, 60e9))

    assert beside == 40e9 + A100.reserved_bytes + 20e9 + 30e9
    assert larger == 40e9 + A100.reserved_bytes + 60e9
