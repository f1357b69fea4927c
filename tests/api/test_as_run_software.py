"""What software does with the same program changes its price: fp8, rings of keys and values, joined products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.api.as_run import AsRun
from autopar.api.validating import estimates_of, price_steps
from autopar.ir.plan import Estimates
from cost_models.device import catalogued_device
from cost_models.frameworks import stack_of
from cost_models.published import Priced
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


def _row_of(cells: dict[str, str], **change: str) -> Estimates:
    return estimates_of(read_training_row({**cells, **change}))


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


def test_what_a_kernel_of_a_norm_or_a_gate_has_inside_is_not_saved():
    row = _row(layers="8")
    fused, plain = (_priced(row, fuses_parts=each).memory.activations for each in (True, False))

    # Of a layer, in units of a hidden state in bf16: both norms' inputs and outputs, queries to values before and after
    # they are rotated, attention, gate and up, and what the second product reads.
    saved = 4 + 2 + 1.5 + 1 + 3 * 8192 / 2048
    assert fused == pytest.approx(8 * saved * 4096 * 2048 * 2, rel=0.15), "and logits"
    assert plain > 1.3 * fused


def test_compiled_losses_keep_logits_of_16_bits_and_make_their_softmax_again():
    # Torchtitan of 2024 left the loss out of what it compiled.
    wide = {"vocab": "131072", "compiled": "yes", "framework": "torchtitan", "layers": "1"}
    outside, inside = (estimates_of(_row(**wide, year=each)) for each in ("2024", "2025"))
    logits = 4096 * 131072

    # Without: float32 scores for backward and their cast beside them. With: the product's result of 16 bits.
    held = outside.memory.activations + outside.memory.temporary - inside.memory.activations - inside.memory.temporary
    assert held > 1.4 * 4 * logits
    assert inside.step_time_s < outside.step_time_s


def test_kernels_of_flash_attention_read_logits_of_16_bits_under_autocast():
    wide = {**GPT, "vocab": "131072", "layers": "1"}
    plain, fused = (_row_of(wide, framework=each) for each in ("pytorch ddp", "flash-attention (lightning)"))

    assert fused.memory.temporary + fused.memory.activations < 0.7 * (plain.memory.temporary + plain.memory.activations)
    assert fused.step_time_s < plain.step_time_s


def test_torch_compile_computes_again_what_it_can_fuse_and_xla_does_not():
    eager, compiled = (estimates_of(_row(framework="fsdp", compiled=each)) for each in ("no", "yes"))
    jax = {estimates_of(_row(framework="maxtext", compiled=each)).memory.activations for each in ("no", "yes")}

    assert compiled.memory.activations < 0.7 * eager.memory.activations
    assert len(jax) == 1


def test_jaxs_policies_keep_products_alone():
    kept, core = (
        _priced(_row(framework="maxtext", recompute="selective"), saves_products=each) for each in (True, False)
    )
    none = estimates_of(_row(framework="maxtext", recompute="none"))

    assert kept.memory.activations < 0.8 * core.memory.activations
    assert core.memory.activations <= none.memory.activations
    assert kept.step_time_s < 1.05 * core.step_time_s


@pytest.mark.parametrize(
    ("change", "sharded"),
    [
        ({}, True),
        ({"framework": "gpt-neox"}, True),
        ({"year": "2022"}, False),
        ({"precision": "fp16"}, False),
        ({"precision": "bf16-true"}, False),
        ({"framework": "megatron-lm"}, False),
    ],
    ids=str,
)
def test_deepspeed_shards_the_states_of_bf16_without_being_told(change: dict[str, str], sharded: bool):
    row = {"framework": "megatron-deepspeed", "year": "2024", "zero": "0", "device": "a100-sxm-80gb", **change}
    read = _row(**row)
    alone = estimates_of(_row(**row, gpus="1", dp="1", global_batch="1"))

    assert read.shards_states is sharded
    share = estimates_of(read).memory.optimizer / alone.memory.optimizer
    assert share == pytest.approx(1 / 8 if sharded else 1.0, rel=0.01)


@pytest.mark.parametrize(
    ("framework", "compiled", "slower"),
    [
        ("nanotron", "no", True),
        ("pytorch ddp", "no", True),
        ("pytorch ddp", "yes", False),
        ("megatron-core", "no", False),
        ("paxml", "yes", False),
    ],
)
def test_a_vocabulary_of_50257_is_padded_or_slow(framework: str, compiled: str, slower: bool):
    software = {"framework": framework, "compiled": compiled, "layers": "1"}
    odd, even = (estimates_of(_row(**software, vocab=each)).breakdown.compute_s for each in ("50257", "50304"))

    # Logits are most of this model's products, and take some five times as long.
    assert (odd > 1.5 * even) is slower
    assert slower or odd == even


def test_ranks_have_even_shares_of_a_vocabulary_that_is_not_padded_further():
    split = {"framework": "nanotron", "tp": "2", "dp": "4", "global_batch": "4", "layers": "1"}
    whole, odd, even = (estimates_of(_row(**split, vocab=each)).breakdown.compute_s for each in _OF_TWO)

    assert whole > 1.2 * even  # 50257 are 50258, of which each rank has 25129
    assert odd == whole


_OF_TWO = ("50257", "50258", "50304")


def test_what_tensors_took_is_compared_with_tensors_alone():
    process, tensors = (
        next(iter(price_steps([(2, {**LLAMA, "gpus": "1", "dp": "1", "global_batch": "1", column: "10"})], workers=1)))
        for column in ("measured_peak_gib", "measured_allocated_gib")
    )
    held = estimates_of(_row(gpus="1", dp="1", global_batch="1")).memory

    assert isinstance(process, Priced)
    assert isinstance(tensors, Priced)
    alone = held.parameters + held.gradients + held.optimizer + held.activations + held.temporary
    assert tensors.predicted_bytes == alone
    assert process.predicted_bytes is not None
    assert process.predicted_bytes > alone + 2**30


@pytest.mark.parametrize("sequence_parallel", ["yes", "no"])
def test_stages_hold_sums_over_tensor_parallel_ranks_as_they_are_read(sequence_parallel: str):
    split = {"tp": "4", "sequence_parallel": sequence_parallel, "global_batch": "2", "layers": "8"}
    rows = (_row(**split, **more) for more in ({"dp": "1", "pp": "2"}, {"dp": "2", "pp": "1"}))

    # Two micro-batches in flight of half of the layers each.
    of_stage, of_all = (each.activations + each.temporary for each in (estimates_of(row).memory for row in rows))
    assert of_stage == pytest.approx(of_all, rel=0.05)


def test_joined_products_are_fewer_and_their_inputs_gradients_no_terms():
    joined, apart = (_priced(_row(), joins=each).breakdown.compute_s for each in (True, False))

    assert joined < apart


def test_encoders_take_longer_than_decoders_of_their_size():
    sizes = {"framework": "fsdp", "kv_heads": "16", "seq_len": "8192"}
    encoder, decoder = (_priced(_row(**sizes, family=each)).breakdown.compute_s for each in ("bert", "gpt"))

    assert encoder > 1.1 * decoder


@pytest.mark.parametrize("way", [{}, {"recompute": "full"}, {"pp": "2", "dp": "2"}])
def test_linears_that_keep_their_own_rows_gather_them_again_for_weight_gradients(way: dict[str, str]):
    # Compiled, so that the device, and not its host, takes the time.
    split = _row(**{"dp": "4", "tp": "2", "sequence_parallel": "yes", "global_batch": "4", "compiled": "yes", **way})
    again, kept = (_priced(split, gathers_again=each) for each in (True, False))

    # What queries, keys and values are made of, gate and up, and the logits.
    microbatches, gathered = 2 if "pp" in way else 1, 4096 * 2048 * 2
    assert again.communication_bytes - kept.communication_bytes == microbatches * (2 * 3 + 1) * gathered
    assert kept.step_time_s < again.step_time_s < 1.2 * kept.step_time_s


def test_rows_that_are_gathered_again_are_not_kept_gathered():
    split = _row(dp="4", tp="2", sequence_parallel="yes", global_batch="4", layers="8")
    again, kept = (_priced(split, gathers_again=each) for each in (True, False))

    saved = kept.peak_memory_bytes - again.peak_memory_bytes
    # At the peak, where backward begins, the last of eight layers has gathered its own.
    assert saved == pytest.approx(2 * 7 * 4096 * 2048 * 2 / 2, rel=0.1), "but for a rank's own rows"
    assert again.memory.parameters == kept.memory.parameters


def test_without_sequence_parallelism_nothing_is_gathered_again():
    whole = _row(dp="4", tp="2", global_batch="4")
    again, kept = (_priced(whole, gathers_again=each) for each in (True, False))

    assert again.communication_bytes == kept.communication_bytes
    assert again.peak_memory_bytes == kept.peak_memory_bytes


def test_keys_and_values_go_round_once_more_in_backward(monkeypatch: pytest.MonkeyPatch):
    # Keys that are rotated may be gathered before, and are whole then.
    split = _row(dp="4", cp="2", global_batch="4", family="gpt")
    round_again = estimates_of(split)
    monkeypatch.setattr(AsRun, "_again_axes", lambda *_: frozenset())
    kept = estimates_of(split)

    assert round_again.communication_bytes - kept.communication_bytes == 3 * 2 * 4096 * 8 * 128 * 2


def test_what_is_cast_before_it_is_gathered_takes_half_as_long():
    split = _row(dp="4", tp="2", sequence_parallel="yes", global_batch="4", compiled="yes", precision="fp8")
    narrow, wide = (_priced(split, gathers_narrow=each).breakdown.exposed_communication_s for each in (True, False))
    short = replace(split, precision="bf16", narrow="")
    same = {_priced(short, gathers_narrow=each).breakdown.exposed_communication_s for each in (True, False)}

    assert narrow < wide
    assert len(same) == 1, "nothing is cast"


@pytest.mark.parametrize("way", [{"pp": "1"}, {"pp": "3", "dp": "2", "gpus": "6", "micro_batch": "1"}])
def test_linear_layers_that_keep_what_they_cast_need_less_memory_in_the_same_time(way: dict[str, str]):
    row = _row(**{"precision": "fp8", "global_batch": "24", **way})
    cast, whole = (_priced(row, keeps_narrow=each) for each in (True, False))
    # Inputs of qkv, gate and up, and down, of 16 bits; what attention makes is kept besides by attention itself.
    held = row.micro_batch * row.seq_len * (2 * 2048 + 8192 - 2048)

    assert cast.memory.activations <= whole.memory.activations - held
    assert cast.step_time_s == pytest.approx(whole.step_time_s, rel=1e-6)


def test_software_on_transformer_engine_keeps_what_it_casts_and_torchao_does_not():
    row = _row(precision="fp8")
    held = {
        name: _priced(_row(precision="fp8", framework=name)).memory.activations
        - _priced(_row(precision="fp8", framework=name), keeps_narrow=False).memory.activations
        for name in ("nemo", "composer", "torchtitan")
    }

    assert row.stack.keeps_narrow
    assert (held["nemo"] < 0, held["composer"] < 0, held["torchtitan"]) == (True, True, 0)


def test_pure_bf16_has_no_float32_beside_its_parameters():
    mixed, pure = (_priced(_row(framework="pytorch", precision=each, autocast="no")) for each in ("bf16", "bf16-true"))

    # A float32 copy, two moments in float32: 12 bytes a parameter; two in bf16: 4.
    assert pure.memory.parameters == mixed.memory.parameters
    assert mixed.memory.optimizer == pytest.approx(3 * pure.memory.optimizer, rel=1e-3)
    assert pure.step_time_s < mixed.step_time_s

    under_autocast = _priced(_row(framework="pytorch", precision="bf16"))
    # Parameters are the float32 copy.
    assert under_autocast.memory.parameters == 2 * pure.memory.parameters
    assert under_autocast.memory.optimizer == pytest.approx(2 * pure.memory.optimizer, rel=1e-3)


def test_experts_weighed_inside_their_activation_keep_no_output():
    sizes = {"hidden": "1024", "heads": "8", "kv_heads": "8", "ffn_hidden": "1024", "experts": "8", "top_k": "4"}
    few, many = (_row(layers=each, **sizes) for each in ("3", "4"))
    inside, behind = (
        _priced(many, weighs_inside_from=year).memory.activations
        - _priced(few, weighs_inside_from=year).memory.activations
        for year in (2025, 0)
    )

    outputs = (4 - 3) * 4096 * 4 * 1024 * 2  # of so many layers: tokens of a rank, experts of each, sizes, bytes
    assert behind - inside == pytest.approx(outputs, rel=0.02)


def test_megatron_core_weighs_inside_since_0_13():
    found = {
        (name, year): stack_of(name, compiled=False).of_year(year).weighs_inside_from > 0
        for name in ("megatron-core", "nemo", "hai-llm", "pytorch")
        for year in (2024, 2025)
    }

    assert {key for key, inside in found.items() if inside} == {("megatron-core", 2025), ("nemo", 2025)}


@pytest.mark.parametrize(
    ("framework", "device"), [("nemo", "b200"), ("megatron-core", "gb200"), ("nemo", "h100-sxm-80gb")]
)
def test_graphs_are_replayed_by_recipes_for_racks_alone(framework: str, device: str):
    def host_s(framework: str, device: str, year: int) -> float:
        return stack_of(framework, compiled=False).of_year(year).on(catalogued_device(device), year).host_s

    eager = host_s("megatron-core", "h100-sxm-80gb", 2025)
    assert host_s(framework, device, 2025) == eager
    assert host_s("nemo", "gb300", 2025) == host_s("megatron-bridge", "gb200", 2026) < eager / 5
    assert host_s("nemo", "gb200", 2024) == eager


@pytest.mark.parametrize(("framework", "device"), [("nemo", "b200"), ("megatron-core", "h100-sxm-80gb")])
def test_a_row_says_whether_graphs_are_replayed(framework: str, device: str):
    rows = {each: _row(framework=framework, device=device, cuda_graphs=each) for each in ("", "yes", "no")}
    host_s = {each: row.stack.on(row.spec, row.year).host_s for each, row in rows.items()}

    assert host_s[""] == host_s["no"] > 5 * host_s["yes"]
    racks = _row(framework=framework, device="gb200", cuda_graphs="no")
    assert racks.stack.on(racks.spec, racks.year).host_s == host_s["no"]


GPT = {
    **ROW, "framework": "pytorch ddp", "year": "2024", "layers": "3", "gpus": "1", "dp": "1", "tp": "1", "pp": "1",
    "recompute": "none", "seq_len": "1024", "global_batch": "8", "micro_batch": "8",
    "inter_node_Gbit_per_s_per_node": "",
}  # fmt: skip


def test_autocast_takes_longer_than_parameters_of_16_bits_and_has_gradients_in_float32():
    cast, whole = (estimates_of(read_training_row({**GPT, "autocast": each})) for each in ("yes", "no"))

    assert cast.memory.gradients == pytest.approx(2 * whole.memory.gradients)
    assert cast.memory.parameters == pytest.approx(2 * whole.memory.parameters)
    # A float32 copy and two moments beside 16 bits are as much as two moments beside float32, less that copy.
    assert whole.memory.optimizer == pytest.approx(1.5 * cast.memory.optimizer, rel=1e-3)
    assert 1.2 * whole.step_time_s < cast.step_time_s < 2.0 * whole.step_time_s


def test_gelu_written_out_reads_and_writes_more_than_one_operator():
    written, fused = (estimates_of(read_training_row({**GPT, "activation": each})) for each in ("gelu_new", "gelu"))

    assert written.step_time_s > 1.05 * fused.step_time_s
    assert written.memory.activations > fused.memory.activations
