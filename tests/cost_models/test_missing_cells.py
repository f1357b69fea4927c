"""What a row leaves out is worked out of others, assumed and said, or asked for by name."""

from __future__ import annotations

import pytest

from cost_models.errors import CostModelError
from cost_models.training_rows import TrainingRow, read_training_row
from tests.support.training_row import ROW


def _read(**change: str) -> TrainingRow:
    return read_training_row({**ROW, **change})


@pytest.mark.parametrize(
    ("change", "batches"),
    [
        ({"global_batch": "", "gradient_accumulation": "8"}, (1, 32)),
        ({"micro_batch": "", "gradient_accumulation": "2"}, (4, 32)),
        ({"gradient_accumulation": "8"}, (1, 32)),
    ],
)
def test_a_batch_follows_from_micro_batches_a_step(change: dict[str, str], batches: tuple[int, int]):
    read = _read(**change)

    assert (read.micro_batch, read.global_batch) == batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": ""}, "global_batch is missing: two of micro_batch, global_batch and gradient_accumulation"),
        ({"micro_batch": ""}, "micro_batch is missing: two of"),
        (
            {"gradient_accumulation": "3"},
            r"global_batch is 32, and 3 micro-batches \(gradient_accumulation\) of 1 on 4 data-parallel ranks are 12",
        ),
        (
            {"micro_batch": "", "gradient_accumulation": "3"},
            "a batch of 32 does not divide into 3 micro-batches a step",
        ),
        ({"year": ""}, "year is missing: when it was measured"),
        ({"family": "llama", "ffn_hidden": ""}, "ffn_hidden is missing"),
        ({"framework": "axolotl (QLoRA)"}, r"framework is 'axolotl \(QLoRA\)': adapters \(LoRA\) beside frozen"),
        ({"lora_rank": "16"}, "lora_rank is '16': adapters beside frozen parameters are not priced"),
        ({"device": "MI350X", "peak_TFLOP_per_s": "2300"}, "memory_GiB and memory_GB_per_s are missing: a device is"),
    ],
)
def test_what_cannot_be_worked_out_is_asked_for(change: dict[str, str], message: str):
    with pytest.raises(CostModelError, match=message):
        _read(**change)


@pytest.mark.parametrize(
    ("change", "assumed"),
    [
        ({"gpus_per_node": ""}, "gpus_per_node is missing: 8"),
        ({"gpus_per_node": "", "gpus": "4", "dp": "4", "tp": "1", "pp": "1"}, "gpus_per_node is missing: 4"),
        ({"ffn_hidden": ""}, "ffn_hidden is missing: four times hidden, 4096"),
        ({"optimizer": "Lion"}, "optimizer 'Lion' is priced as AdamW"),
        ({"optimizer": "adamw_torch_fused"}, ""),
        ({"optimizer": "Fused Adam"}, ""),
    ],
)
def test_what_is_assumed_is_said(change: dict[str, str], assumed: str):
    assert _read(**change).assumed == assumed


@pytest.mark.parametrize("none", ["", "-", "n/a", "1"])
def test_degrees_that_a_row_does_not_say_are_one(none: str):
    read = _read(gpus="8", dp="", tp=none, pp=none)

    assert (read.dp, read.tp, read.pp) == (8, 1, 1)


def test_a_date_tells_the_year():
    assert _read(year="", date="12 May 2024").year == 2024


@pytest.mark.parametrize(
    ("column", "text", "read"),
    [
        ("zero", "deepspeed_stage_2", ("zero", 2)),
        ("zero", "DeepSpeed ZeRO-3", ("zero", 3)),
        ("zero", "zero_stage_1", ("zero", 1)),
        ("precision", "bfloat16 (AMP)", ("precision", "bf16")),
        ("precision", "fp16 mixed precision", ("precision", "fp16")),
        ("recompute", "gradient checkpointing (full)", ("recompute", "full")),
        ("recompute", "activation_checkpointing_selective", ("recompute", "selective")),
        ("device", "8x A100 80GB", ("device", "a100-sxm-80gb")),
    ],
)
def test_more_ways_of_saying_the_same(column: str, text: str, read: tuple[str, object]):
    assert getattr(_read(**{column: text}), read[0]) == read[1]


def test_a_row_may_say_its_dropout():
    drops = [
        _read(attention=attention, dropout=said).architecture.drops
        for attention in ("unfused", "flash")
        for said in ("", "0", "none", "0.1")
    ]

    assert drops == [True, False, False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("change", "peak", "alone"),
    [
        ({}, None, False),
        ({"measured_peak_gib": "40"}, 40 * 2**30, False),
        ({"measured_allocated_gib": "30"}, 30 * 2**30, True),
        ({"measured_peak_gib": "40", "measured_allocated_gib": "30"}, 40 * 2**30, False),
    ],
)
def test_memory_is_a_processs_or_that_of_its_tensors(change: dict[str, str], peak: float | None, alone: bool):
    read = _read(**change)

    assert (read.measured_peak_bytes, read.measured_alone) == (peak, alone)
