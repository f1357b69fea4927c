"""What others ran is priced through the planner's own path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.api import validating
from autopar.api.validating import estimates_of, price_steps
from autopar.ir.plan import Estimates
from autopar.search.cuts import even_cut
from cost_models.published import Priced
from cost_models.training_rows import read_training_row
from cost_models.validation import Skipped
from tests.support.training_row import ROW

SMALL = {
    **ROW, "hidden": "256", "heads": "4", "kv_heads": "4", "ffn_hidden": "1024", "vocab": "1024", "seq_len": "128",
    "gpus": "8", "layers": "6",
}  # fmt: skip
WAYS: dict[str, Mapping[str, str]] = {
    "tensor": {"dp": "4", "tp": "2", "pp": "1"},
    "sequence": {"dp": "4", "tp": "2", "pp": "1", "sequence_parallel": "yes", "recompute": "selective"},
    "stages": {"dp": "2", "tp": "2", "pp": "2", "zero": "1"},
    "sharded": {
        "dp": "8", "tp": "1", "pp": "1", "zero": "3", "framework": "fsdp", "attention": "flash", "layers": "4",
    },
    "llama": {
        "dp": "4", "tp": "2", "pp": "1", "family": "llama", "attention": "flash", "framework": "torchtitan",
        "layers": "4",
    },
}  # fmt: skip
"""One layer more than are captured; three more where programs are shared with other tests."""

LATENT = {
    "family": "llama", "attention": "flash", "framework": "megatron-bridge", "precision": "bf16", "kv_lora_rank": "64",
    "q_lora_rank": "96", "qk_nope_head_dim": "64", "qk_rope_head_dim": "32", "v_head_dim": "64", "experts": "8",
    "top_k": "2", "moe_ffn_hidden": "128", "first_k_dense": "1", "n_shared_experts": "1", "mtp_layers": "1", "tp": "1",
}  # fmt: skip
WAYS["latent attention and experts"] = {**LATENT, "dp": "8", "pp": "1", "ep": "4", "layers": "5"}
WAYS["encoder and decoder"] = {
    "family": "t5", "attention": "unfused", "framework": "nemo", "dp": "4", "tp": "2", "pp": "1", "zero": "1",
    "layers": "4", "decoder_layers": "5", "decoder_seq_len": "64", "head_dim": "64", "ffn_hidden": "512",
}  # fmt: skip
FAST = ("tensor", "stages", "llama")
SLOW = {"intra_node_GB_per_s_per_gpu": "1"}
"""Links on which communication takes longer than computation."""


def _priced(**change: str) -> Estimates:
    return estimates_of(read_training_row({**SMALL, **change}))


@pytest.mark.parametrize(
    "way", [*FAST, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in FAST)]
)
def test_a_few_layers_repeated_cost_what_all_of_them_captured_cost(way: str, monkeypatch: pytest.MonkeyPatch):
    repeated = _priced(**WAYS[way])
    validating._recomputed.cache_clear()
    monkeypatch.setattr(validating, "FEW", 6)

    captured = _priced(**WAYS[way])

    assert repeated.step_time_s == pytest.approx(captured.step_time_s, rel=1e-9)
    assert repeated.peak_memory_bytes == captured.peak_memory_bytes
    validating._recomputed.cache_clear()


def test_recomputation_takes_time_and_saves_memory():
    # Long sequences, so that the peak is where backward begins and not where all gradients are there.
    none, full = (_priced(dp="8", tp="1", pp="1", seq_len="1024", recompute=way) for way in ("none", "full"))

    assert none.step_time_s < full.step_time_s
    assert none.peak_memory_bytes > full.peak_memory_bytes


@pytest.mark.parametrize(
    ("count", "stages", "sizes"),
    [
        (72, 12, [6] * 12),
        (126, 16, [7, *[8] * 14, 7]),
        (82, 12, [6, *[7] * 10, 6]),
        (31, 4, [8, 8, 8, 7]),
        (3, 2, [2, 1]),
        (5, 4, [1, 1, 1, 2]),
    ],
)
def test_layers_that_do_not_divide_are_spread_with_both_ends_as_a_layer_each(count: int, stages: int, sizes: list[int]):
    firsts = even_cut(count, stages)

    assert [stop - first for first, stop in pairwise((*firsts, count))] == sizes


def test_a_stage_holds_a_gradient_for_each_parameter_and_nothing_that_was_made_beside_it():
    # Operators that make gradients of norms make that of the layer's input, too.
    held = _priced(**WAYS["stages"], framework="megatron-deepspeed", precision="fp16", micro_batch="4").memory

    assert held.gradients < 1.2 * held.parameters


def test_without_sequence_parallelism_every_rank_holds_whole_layers_inputs():
    # What full recomputation keeps is the input of each layer: batch x sequence x hidden, of six layers.
    whole, split = (_priced(dp="4", tp="2", pp="1", seq_len="1024", sequence_parallel=way) for way in ("no", "yes"))

    assert whole.memory.activations - split.memory.activations >= 0.5 * 6 * 1024 * 256 * 2


def test_a_sharded_optimizer_needs_less_memory_than_a_whole_one():
    whole, sharded = (_priced(dp="8", tp="1", pp="1", zero=zero) for zero in ("0", "1"))

    assert sharded.memory.optimizer == pytest.approx(whole.memory.optimizer / 8, rel=0.01)
    assert sharded.memory.parameters == whole.memory.parameters


@pytest.mark.parametrize(("dp", "cp"), [("8", "1"), ("4", "2")])
def test_stage_two_holds_its_own_part_of_gradients_besides(dp: str, cp: str):
    ways = {**SMALL, "dp": dp, "cp": cp, "tp": "1", "pp": "1", "framework": "pytorch fsdp", "micro_batch": "1"}
    ways["attention"] = "flash"
    one, two = price_steps([(2, {**ways, "zero": "1"}), (3, {**ways, "zero": "2"})], workers=1)
    whole = _priced(**{**ways, "zero": "1"}).memory.gradients

    assert isinstance(one, Priced)
    assert isinstance(two, Priced)
    assert one.predicted_bytes - two.predicted_bytes == pytest.approx(whole * 7 / 8)
    assert whole > 0


def test_rows_that_cannot_be_priced_are_named_and_skipped():
    rows = [(2, {**SMALL, **WAYS["tensor"]}), (3, {**SMALL, "dp": "3"}), (4, {"id": "x"})]

    found = sorted(price_steps(rows), key=lambda each: each.line)

    assert [type(each) is Skipped for each in found] == [False, True, True]
    assert isinstance(found[1], Skipped)
    assert found[1].reason == "dp 3 x tp 8 x pp 2 is not the 8 GPUs"


def test_megatron_of_2022_sums_behind_the_weight_gradients_of_backward():
    def exposed(framework: str, tp: str) -> list[float]:
        ways = {"dp": str(8 // int(tp)), "tp": tp, "pp": "1", "framework": framework}
        return [_priced(**ways, year=year).breakdown.exposed_communication_s for year in ("2021", "2022")]

    before, then = exposed("megatron-lm", "2")
    same, alone = exposed("megatron-deepspeed", "2"), exposed("megatron-lm", "1")

    assert then < before
    assert same[0] == pytest.approx(same[1])
    assert alone[0] == pytest.approx(alone[1])


def test_shards_reduce_each_micro_batchs_gradients_and_hold_their_part():
    held = _priced(**WAYS["sharded"], micro_batch="1").memory

    assert held.gradients == pytest.approx(held.parameters, rel=0.05)


@pytest.mark.parametrize("dp", ["1", "2"])
def test_parameters_are_sharded_over_the_ranks_of_a_sequence_too(dp: str):
    alone = _priced(**{**WAYS["llama"], "dp": "8", "tp": "1", "zero": "3"}).memory
    along = _priced(**{**WAYS["llama"], "dp": dp, "tp": "1", "zero": "3", "cp": str(8 // int(dp))}).memory

    assert along.parameters == pytest.approx(alone.parameters, rel=0.02)
    assert along.optimizer == pytest.approx(alone.optimizer, rel=0.02)


def test_tensor_parallelism_gathers_no_table():
    # A large vocabulary and few tokens would make it cheaper to hold the table whole than to move activations.
    held = _priced(**WAYS["tensor"], vocab="65536", micro_batch="1", seq_len="64")
    split = _priced(**{**WAYS["tensor"], "dp": "8", "tp": "1"}, vocab="65536", micro_batch="1", seq_len="64")

    assert held.memory.parameters < 0.55 * split.memory.parameters


@pytest.mark.parametrize("pp", ["1", "2"])
def test_new_parameters_of_a_sharded_optimizer_are_gathered_behind_the_next_forward(pp: str):
    def priced(zero: str, *, ahead: bool) -> Estimates:
        ways = {
            "dp": str(8 // int(pp)),
            "tp": "1",
            "pp": pp,
            "zero": zero,
            "framework": "megatron-core",
            "compiled": "yes",
        }
        row = read_training_row({**SMALL, **SLOW, **ways})
        return estimates_of(replace(row, stack=replace(row.stack, gathers_ahead=ahead)))

    ahead, after = (priced("1", ahead=each) for each in (True, False))
    hidden_s = after.step_time_s - ahead.step_time_s

    assert 0 < hidden_s < after.breakdown.compute_s, "no more than what forward computes"
    assert priced("0", ahead=True).step_time_s == priced("0", ahead=False).step_time_s, "nothing to gather"


def test_sums_of_micro_batches_hide_behind_the_last_ones_backward_alone():
    def hidden(count: int) -> float:
        ways = {"dp": "8", "tp": "1", "pp": "1", "zero": "0", "framework": "pytorch ddp", "micro_batch": "1"}
        row = read_training_row({**SMALL, **SLOW, **ways, "global_batch": str(8 * count)})
        rows = (replace(row, stack=replace(row.stack, overlaps=overlaps)) for overlaps in (False, True))
        after, behind = (estimates_of(each).breakdown.exposed_communication_s for each in rows)
        return after - behind

    assert hidden(8) == pytest.approx(hidden(2), rel=1e-6)
    assert hidden(2) > 0


@pytest.mark.parametrize("dp", ["12", "24"])
def test_shards_on_ranks_that_divide_nothing_take_what_others_take(dp: str):
    def sharded(ranks: str) -> Estimates:
        few = {"gpus": ranks, "dp": ranks, "gpus_per_node": "4", "global_batch": str(2 * int(ranks))}
        return _priced(**{**WAYS["sharded"], **few})

    odd, even = sharded(dp), sharded("16")

    assert odd.step_time_s == pytest.approx(even.step_time_s, rel=0.1)
    resting = [each.memory.parameters + each.memory.optimizer for each in (odd, even)]
    assert resting[0] == pytest.approx(resting[1] * 16 / int(dp), rel=0.1)
