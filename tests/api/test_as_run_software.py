"""What software does with the same program changes its price: fp8, rings of keys and values, joined products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.api.validating import estimates_of
from autopar.ir.plan import Estimates
from cost_models.training_rows import TrainingRow, read_training_row
from tests.support.training_row import ROW

LLAMA = {
    **ROW, "family": "llama", "device": "h100-sxm-80gb", "framework": "megatron-core", "year": "2025", "layers": "3",
    "hidden": "2048", "heads": "16", "kv_heads": "8", "ffn_hidden": "8192", "vocab": "4096", "seq_len": "4096",
    "gpus": "8", "dp": "8", "tp": "1", "pp": "1", "recompute": "none", "attention": "flash", "global_batch": "8",
    "intra_node_GB_per_s_per_gpu": "450",
}  # fmt: skip


def _row(**change: str) -> TrainingRow:
    return read_training_row({**LLAMA, **change})


def _priced(row: TrainingRow, **software: bool) -> Estimates:
    return estimates_of(replace(row, stack=replace(row.stack, **software)))


def test_fp8_takes_less_than_bf16_and_more_than_half_of_it():
    # Attention, head and what moves memory stay; operands are cast besides.
    sizes = {"hidden": "4096", "heads": "32", "ffn_hidden": "16384"}
    short, narrow = (_priced(_row(**sizes, precision=each)).breakdown.compute_s for each in ("bf16", "fp8"))

    assert 0.5 * short < narrow < 0.9 * short


def test_casts_to_fp8_eat_what_small_products_gain():
    sizes = {"hidden": "128", "heads": "4", "kv_heads": "4", "ffn_hidden": "256", "layers": "8"}
    short, narrow = (
        _priced(replace(row, stack=replace(row.stack, kernels="compiled"))).step_time_s
        for row in (_row(**sizes, precision=each) for each in ("bf16", "fp8"))
    )

    assert narrow > 0.95 * short


def test_a_ring_hides_keys_and_values_behind_attention():
    split = _row(dp="4", cp="2", global_batch="4", intra_node_GB_per_s_per_gpu="20")
    ring, gathered = (_priced(split, rings=each).breakdown.exposed_communication_s for each in (True, False))

    assert ring < gathered


def test_positions_of_both_ends_move_less_than_heads_where_queries_share_keys():
    split = _row(dp="4", cp="2", global_batch="4")
    positions, heads = (_priced(split, balances=each, rings=False).communication_bytes for each in (True, False))

    assert positions < heads


def test_half_a_sequence_of_both_ends_is_half_of_its_attention():
    whole = _priced(_row(seq_len="16384"))
    split = _priced(_row(seq_len="16384", dp="4", cp="2", global_batch="4"))

    assert split.breakdown.compute_s == pytest.approx(whole.breakdown.compute_s / 2, rel=0.05)


def test_norms_and_gates_as_a_kernel_each_move_less_memory():
    row = _row()
    fused, plain = (_priced(row, fuses_parts=each).breakdown.compute_s for each in (True, False))

    assert fused < 0.97 * plain


def test_joined_products_are_fewer_and_their_inputs_gradients_no_terms():
    joined, apart = (_priced(_row(), joins=each).breakdown.compute_s for each in (True, False))

    assert joined < apart


def test_encoders_take_longer_than_decoders_of_their_size():
    sizes = {"framework": "fsdp", "kv_heads": "16", "seq_len": "8192"}
    encoder, decoder = (_priced(_row(**sizes, family=each)).breakdown.compute_s for each in ("bert", "gpt"))

    assert encoder > 1.1 * decoder
