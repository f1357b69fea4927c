"""Published rows whose activations wait in the host's memory for backward."""

from __future__ import annotations

import pytest

from autopar.api.validating import estimates_of
from autopar.ir.plan import Estimates
from cost_models.training_rows import read_training_row
from tests.support.training_row import ROW

LAYERS = 8
SMALL = {
    **ROW, "family": "llama", "hidden": "256", "heads": "4", "kv_heads": "4", "ffn_hidden": "1024", "vocab": "128",
    "seq_len": "1024", "gpus": "2", "layers": str(LAYERS), "dp": "2", "tp": "1", "pp": "1", "global_batch": "8",
    "attention": "flash", "recompute": "none", "year": "2025", "framework": "megatron-bridge",
}  # fmt: skip


def _priced(layers: int) -> Estimates:
    return estimates_of(read_training_row({**SMALL, "activation_offload_layers": str(layers) if layers else ""}))


def test_each_layer_that_is_offloaded_holds_no_activations_at_the_peak():
    none, two, four = (_priced(layers) for layers in (0, 2, 4))

    # q, k, v, attention and its input, the norms' input and output, gate and up and their product: 16 bits each.
    tokens, hidden, ffn = 1024, 256, 1024
    least = tokens * 2 * (7 * hidden + 3 * ffn)
    assert none.memory.activations - two.memory.activations >= 2 * least
    assert none.peak_memory_bytes - two.peak_memory_bytes == none.memory.activations - two.memory.activations
    assert two.memory.activations - four.memory.activations == pytest.approx(
        none.memory.activations - two.memory.activations, rel=0.1
    )
    assert four.step_time_s == none.step_time_s


def test_what_is_offloaded_is_there_while_its_layer_runs():
    none, four, every = (_priced(layers) for layers in (0, 4, LAYERS))

    one = (none.memory.activations - four.memory.activations) / 4
    # In its backward a layer has its own beside gradients.
    assert every.memory.activations >= 1.3 * one
