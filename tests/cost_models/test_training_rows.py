"""A published training step is read as it is, or refused with the column that is wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cost_models.device import catalogued_device
from cost_models.errors import CostModelError
from cost_models.frameworks import is_known, pytorch, stack_of
from cost_models.training_rows import read_training_row, training_cluster
from tests.support.training_row import ROW

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "training_steps.csv"

WRONG = [
    ({"layers": ""}, "layers is missing"),
    ({"device": "h1000"}, "device 'h1000' is not in the catalogue (did you mean 'h"),
    (
        {"family": "rwkv"},
        "family is 'rwkv', not one of gpt, llama, bert, t5: a table's columns say no more than their sizes",
    ),
    ({"recompute": "maybe"}, "recompute is 'maybe', not one of none, selective, full"),
    ({"attention": "fast"}, "attention is 'fast', not one of flash, unfused"),
    ({"zero": ""}, "zero is missing: 0 for nothing sharded, 1 the optimizer, 2 gradients too, 3 parameters too"),
    ({"zero": "zero-4"}, "zero is 'zero-4': 0 for nothing sharded"),
    ({"model": "Mixtral-8x7B"}, "family is 'gpt': mixtures of experts are priced of the llama family alone"),
    (
        {"model": "Qwen3-30B-A3B", "family": "llama"},
        "model is 'Qwen3-30B-A3B', a mixture of experts by its name: add columns experts and top_k",
    ),
    ({"family": "llama", "experts": "8"}, "top_k is missing"),
    ({"family": "llama", "experts": "8", "top_k": "9"}, "top_k is 9 of 8 experts"),
    ({"family": "llama", "experts": "6", "top_k": "2", "ep": "4"}, "ep is 4, which does not divide 6 experts"),
    ({"head_dim": "128"}, "head_dim is 128, and hidden 1024 on 16 heads is 64 each: heads of another size"),
    ({"seq_len": "8 192"}, "seq_len is '8 192', not a number of at least 0"),
    ({"seq_len": "8k"}, "seq_len is '8k', which may be 8000 or 8192: write one of these"),
    ({"measured_step_s": "1,234"}, "measured_step_s is '1,234', which may be 1234 or 1.234: write one of these"),
    ({"measured_step_s": "45%"}, "measured_step_s is '45%': a share is no time; write the seconds of a step"),
    (
        {"measured_step_s": "", "mfu": "0.45"},
        "measured_step_s is missing, and mfu does not say it: what counts as an operation differs; write the seconds",
    ),
    ({"precision": "amp"}, "precision is 'amp', not one of fp32, bf16, fp16, tf32, fp8: mixed with which of them?"),
    ({"recompute": "block:4"}, "recompute is 'block:4': that some layers are recomputed and others not is not priced"),
    ({"recompute": "every 2nd"}, "that some layers are recomputed and others not is not priced"),
    ({"zero": "zero3 offload"}, "zero is 'zero3 offload': state kept in the host's memory is not priced"),
    ({"compiled": "maybe"}, "compiled is 'maybe', not one of yes, no"),
    ({"dp": "5"}, "dp 5 x tp 8 x pp 2 is not the 64 GPUs"),
    ({"hidden": "1024.5"}, "hidden is '1024.5', not a whole number"),
    ({"measured_step_s": "0"}, "measured_step_s is '0', not a number above 0"),
    ({"precision": "nvfp4"}, "precision is 'nvfp4', not one of fp32, bf16, fp16, tf32, fp8"),
    ({"precision": "fp8"}, "precision is fp8, for which a100-sxm-80gb has no rate: it has bfloat16, float16"),
    ({"global_batch": "30"}, "a batch of 30 does not divide into micro-batches of 1 on 4 GPUs"),
    ({"gpus_per_node": "48"}, "64 GPUs do not fill nodes of 48"),
    ({"inter_node_Gbit_per_s_per_node": "0"}, "no inter_node_Gbit_per_s_per_node"),
    ({"kv_heads": "3"}, "heads 16 and kv_heads 3 do not divide"),
    ({"ep": "2"}, "ep is 2, and the row says of no experts: add columns experts and top_k"),
    ({"family": "llama", "experts": "8", "top_k": "2", "ep": "8"}, "ep is 8, which does not divide dp 4"),
    ({"cp": "2"}, "dp 4 x tp 8 x pp 2 x cp 2 is not the 64 GPUs"),
    ({"cp": "2", "dp": "2", "seq_len": "511"}, "a sequence of 511 does not divide over cp 2"),
    ({"zero": "3", "dp_shard": "3"}, "dp_shard is 3, and there are 4 data-parallel ranks"),
    ({"offload": "optimizer"}, "offload is 'optimizer': state kept in the host's memory is not priced"),
    ({"activation_offload_layers": "4"}, "activations in the host's memory are not priced on 2 stages"),
    ({"activation_offload_layers": "99"}, "activation_offload_layers is 99 of "),
    ({"pp": "1", "dp": "8", "interleave": "2"}, "interleave is 2 without pipeline stages"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_row_that_cannot_be_says_why(change: dict[str, str], message: str):
    with pytest.raises(CostModelError) as caught:
        read_training_row({**ROW, **change})

    assert message in str(caught.value)


def test_a_column_that_is_not_there_is_missing():
    with pytest.raises(CostModelError, match="vocab is missing"):
        read_training_row({key: value for key, value in ROW.items() if key != "vocab"})


def test_all_published_rows_can_be_read():
    with DATA.open(encoding="utf-8") as file:
        rows = [read_training_row(row) for row in csv.DictReader(file)]

    assert len(rows) == 262
    assert sum(row.measured_peak_bytes is not None for row in rows) > 10


def test_the_rows_machines_have_its_bandwidths():
    cluster = training_cluster(read_training_row(ROW))

    assert (cluster.node_count, cluster.devices_per_node) == (8, 8)
    assert [level.bytes_per_s for level in cluster.levels] == [300e9, 200e9]


@pytest.mark.parametrize(("per_node", "gbit"), [("4", "1600"), ("72", "28800"), ("64", "25600")])
def test_a_rack_of_joined_devices_is_one_node_however_it_is_counted(per_node: str, gbit: str):
    rack = {
        "device": "gb200",
        "gpus": "128",
        "dp": "8",
        "gpus_per_node": per_node,
        "intra_node_GB_per_s_per_gpu": "900",
    }

    cluster = training_cluster(read_training_row({**ROW, **rack, "inter_node_Gbit_per_s_per_node": gbit}))

    assert (cluster.node_count, cluster.devices_per_node) == (2, 64)
    assert [level.bytes_per_s for level in cluster.levels] == [900e9, 64 * 50e9]


@pytest.mark.parametrize(
    ("change", "group", "is_hybrid"),
    [
        ({"zero": "full_shard"}, 64, False),
        ({"zero": "hybrid_shard"}, 8, True),
        ({"zero": "HSDP"}, 8, True),
        ({"zero": "hybrid_shard", "tp": "2", "dp": "32"}, 4, True),
        ({"zero": "hybrid_shard", "gpus": "8", "dp": "8"}, 8, False),
        ({"zero": "3", "dp_shard": "16"}, 16, True),
        ({"zero": "0"}, 64, False),
    ],
    ids=str,
)
def test_hybrid_sharding_is_over_a_nodes_ranks_where_the_row_does_not_say_how_many(
    change: dict[str, str], group: int, is_hybrid: bool
):
    read = read_training_row({**ROW, "tp": "1", "pp": "1", "dp": "64", "global_batch": "64", **change})

    assert (read.dp_shard, read.is_hybrid) == (group, is_hybrid)


def test_a_mixtrals_experts_are_known_by_its_name_and_others_by_their_columns():
    llama = {**ROW, "family": "llama"}
    mixtral = read_training_row({**llama, "model": "Mixtral-8x7B"})
    other = read_training_row({**llama, "model": "Qwen3-30B-A3B", "num_experts": "128", "top_k": "8"})

    found = [each.architecture.mixture for each in (mixtral, other)]
    assert [(each.experts, each.chosen) for each in found if each is not None] == [(8, 2), (128, 8)]
    assert mixtral.assumed == "experts is missing: 8, of which 2 take a token, by the model's name"


@pytest.mark.parametrize("said", ["fp8", "FP8", "amp_fp8", "float8", "mxfp8", "fp8-hybrid", "bf16+fp8", "fp8_cs"])
def test_fp8_is_mixed_precision_in_bf16_whose_layers_compute_in_fp8(said: str):
    read = read_training_row({**ROW, "device": "h100-sxm-80gb", "precision": said})

    assert (read.precision, read.narrow) == ("bf16", "fp8")
    assert training_cluster(read).device.narrow == "fp8"
    assert read.label.endswith("fp8")


@pytest.mark.parametrize(
    ("said", "way"),
    [("", "none"), ("no", "none"), ("yes", "full"), ("full (block)", "full"), ("selective-2", "selective")],
)
def test_recomputation_is_told_by_the_names_that_tables_have_for_it(said: str, way: str):
    assert read_training_row({**ROW, "recompute": said}).recompute == way


def test_an_encoder_is_a_gpt_without_a_causal_mask():
    read = read_training_row({**ROW, "family": "BERT"})

    assert (read.architecture.family, read.architecture.causal) == ("gpt", False)
    assert read.assumed.startswith("family 'BERT' is priced as gpt without a causal mask")


def test_megatron_lm_runs_megatron_core_from_2024_on():
    before, then = (stack_of("megatron-lm", compiled=False).of_year(year) for year in (2023, 2024))

    assert (before.fuses_parts, then) == (False, stack_of("megatron-core", compiled=False).of_year(2024))
    assert [stack_of("nemo", compiled=False).of_year(year).fuses_parts for year in (2022, 2023)] == [False, True]


def test_columns_that_change_nothing_are_no_reason_to_refuse_a_row():
    neutral = {"ep": "1", "cp": "1", "experts": "0", "offload": "no"}

    assert read_training_row({**ROW, **neutral}) == read_training_row(ROW)


def test_a_rows_device_may_be_spelled_as_its_maker_does():
    assert read_training_row({**ROW, "device": "NVIDIA A100-SXM4-40GB"}).device == "a100-sxm-40gb"


def test_a_framework_that_nobody_knows_is_pytorchs_own():
    assert stack_of("something new", compiled=False).kernels == "eager"
    assert stack_of("something new", compiled=True).kernels == "compiled"
    assert stack_of("megatron-core+te", compiled=False).overlaps_tensor


def test_gathers_hide_behind_products_where_transformer_engine_does_that_and_else_in_backward_alone():
    hides = {
        name: (stack.overlaps_tensor, stack.hides_backward)
        for name in ("megatron-core", "Megatron-Core (TE)", "nemo", "megatron-bridge", "megatron-lm")
        for stack in [stack_of(name, compiled=False).of_year(2025)]
    }

    assert hides == {
        "megatron-core": (False, True), "Megatron-Core (TE)": (True, False), "nemo": (True, False),
        "megatron-bridge": (True, False), "megatron-lm": (False, True),
    }  # fmt: skip


@pytest.mark.parametrize(("framework", "year", "long"), [
    ("nemo", 2022, True), ("nemo", 2023, False), ("megatron-core+te", 2025, False),
    ("megatron-core", 2025, True), ("megatron-lm", 2025, True),
])  # fmt: skip
def test_nemos_recipes_sum_gradients_in_bf16_and_megatrons_default_is_float32(framework: str, year: int, long: bool):
    assert stack_of(framework, compiled=False).of_year(year).float32_gradients is long


def test_frameworks_that_are_always_compiled_or_share_megatrons_kernels_are_known_by_name():
    kernels = {name: stack_of(name, compiled=False).kernels for name in ("MaxText", "paxml", "gpt-neox", "deepspeed")}

    assert kernels == {"MaxText": "compiled", "paxml": "compiled", "gpt-neox": "fused", "deepspeed": "eager"}


@pytest.mark.parametrize(
    ("nodes", "fabric", "waits"), [(40, "Omni-Path", True), (39, "Omni-Path", False), (40, "InfiniBand", False)]
)
def test_the_host_waits_for_kernels_where_jobs_hung_otherwise(nodes: int, fabric: str, waits: bool):
    size = {"gpus": str(8 * nodes), "dp": str(nodes), "pp": "1", "global_batch": str(nodes), "fabric_note": fabric}
    device = training_cluster(read_training_row({**ROW, **size})).device

    assert device.host_waits is waits
    assert device.with_host_s(1.0, 1000) == pytest.approx(1.0 + 1000 * device.host_s if waits else 1.0)


def test_deepspeed_sums_in_float32_without_zero_only():
    rows = [read_training_row({**ROW, "framework": "megatron-deepspeed", "zero": zero}) for zero in ("0", "1")]

    assert [row.stack.float32_gradients for row in rows] == [True, False]


@pytest.mark.parametrize(("layers", "pp", "long"), [("70", "12", True), ("72", "12", False), ("71", "12", False)])
def test_megatron_deepspeed_that_counts_both_ends_as_layers_sums_in_float32(layers: str, pp: str, long: bool):
    change = {
        "framework": "megatron-deepspeed",
        "zero": "1",
        "layers": layers,
        "pp": pp,
        "dp": "1",
        "tp": "1",
        "gpus": pp,
    }

    row = read_training_row({**ROW, **change, "gpus_per_node": pp})

    assert row.stack.float32_gradients is long


def test_software_of_the_year_a_device_came_out_is_slower_on_it():
    device = catalogued_device("h100-sxm-80gb")
    stack = stack_of("fsdp", compiled=False)
    rates = [stack.on(device, year).matmul_efficiency_for("bf16") for year in (2023, 2024, 2025, 2030)]

    assert rates[0] < rates[1] < rates[2] == rates[3] < device.matmul_efficiency_for("bf16")


def test_software_is_as_old_as_a_devices_matrix_instructions():
    stack = pytorch()
    rates = {
        name: stack.on(catalogued_device(name), 2025).matmul_efficiency_for("bf16")
        / catalogued_device(name).matmul_efficiency_for("bf16")
        for name in ("h100-sxm-80gb", "h200", "rtx-5090", "b200")
    }

    assert rates["h100-sxm-80gb"] == rates["h200"] == rates["rtx-5090"] > rates["b200"]


def test_pytorchs_own_attention_is_no_faster_on_blackwell_than_instructions_of_ampere_allow():
    device = catalogued_device("b200")
    plain, vendors = (stack_of(name, compiled=False).on(device, 2026) for name in ("pytorch", "nemo"))

    rate = plain.attention_efficiency * plain.flops_for("bf16")
    assert rate == pytest.approx(337.5e12)
    assert vendors.attention_efficiency == pytest.approx(3 * plain.attention_efficiency)


ANSWERS = [
    ({"precision": "bfloat16", "family": "GPT", "attention": "Flash"}, {"precision": "bf16"}),
    ({"interleave": "", "measured_peak_gib": " "}, {"interleave": 1, "measured_peak_bytes": None}),
    ({"interleave": "0", "sequence_parallel": "True"}, {"interleave": 1, "sequence_parallel": True}),
    ({"sequence_parallel": "0"}, {"sequence_parallel": False}),
    ({"sequence_parallel": ""}, {"sequence_parallel": False}),
    ({"zero": "ZeRO-3"}, {"zero": 3}),
    ({"zero": "FULL_SHARD"}, {"zero": 3}),
    ({"zero": "SHARD_GRAD_OP"}, {"zero": 2}),
    ({"zero": "stage 2"}, {"zero": 2}),
    ({"zero": "none"}, {"zero": 0}),
    ({"id": "", "source": "", "model": ""}, {"id": "row", "source": "no source named", "model": "gpt"}),
    ({"head_dim": "64"}, {"zero": 0}),
    ({"seq_len": "8,192", "vocab": "51,200"}, {"seq_len": 8192}),
    ({"measured_step_s": "12,91"}, {"measured_step_s": 12.91}),
    ({"measured_step_s": "1,234.5"}, {"measured_step_s": 1234.5}),
    ({"measured_step_s": "250 ms"}, {"measured_step_s": 0.25}),
    ({"interleave": "-", "cp": "n/a", "measured_peak_gib": "n/a"}, {"interleave": 1, "measured_peak_bytes": None}),
    ({"sequence_parallel": "on"}, {"sequence_parallel": True}),
    ({"sequence_parallel": "n/a"}, {"sequence_parallel": False}),
    ({"zero": "distributed optimizer"}, {"zero": 1}),
    ({"zero": "zero_stage_2"}, {"zero": 2}),
    ({"zero": "os+g"}, {"zero": 2}),
    ({"zero": "megatron-fsdp"}, {"zero": 3}),
    ({"precision": "half"}, {"precision": "fp16"}),
    ({"precision": "16-mixed"}, {"precision": "fp16"}),
    ({"precision": "bf16-true"}, {"precision": "bf16", "pure": True}),
    ({"precision": "pure_bf16"}, {"precision": "bf16", "pure": True}),
    ({"precision": "bf16-mixed"}, {"precision": "bf16", "pure": False}),
    ({"precision": "fp8-true", "device": "h100-sxm-80gb"}, {"precision": "bf16", "narrow": "fp8", "pure": True}),
    ({"precision": "tf32"}, {"precision": "fp32", "narrow": "tf32"}),
    ({"recompute": "gradient checkpointing"}, {"recompute": "full"}),
    ({"recompute": "nothing_saveable"}, {"recompute": "full"}),
    ({"recompute": "core_attn"}, {"recompute": "selective"}),
    ({"recompute": "-"}, {"recompute": "none"}),
]


@pytest.mark.parametrize(("change", "read"), ANSWERS)
def test_other_spellings_of_what_a_row_says_are_read(change: dict[str, str], read: dict[str, object]):
    found = read_training_row({**ROW, **change})

    assert {name: getattr(found, name) for name in read} == read


@pytest.mark.parametrize(
    ("column", "rate"), [("tokens_per_s_per_gpu", 512.0), ("tokens_per_s", 32768.0), ("samples_per_s", 64.0)]
)
def test_a_steps_time_follows_from_a_rate_where_the_row_has_no_other(column: str, rate: float):
    alone = {"measured_step_s": "n/a", "seq_len": "512", "global_batch": "32", column: str(rate)}

    assert read_training_row({**ROW, **alone}).measured_step_s == pytest.approx(0.5)


def test_products_in_tf32_have_its_rate_and_nothing_is_cast():
    device = training_cluster(read_training_row({**ROW, "precision": "tf32"})).device

    assert device.flops_for("fp32") == catalogued_device("a100-sxm-80gb").peak_flops["tf32"]
    assert device.matmul_efficiency_for("fp32") == device.matmul_efficiency_for("tf32") < 0.8
    assert device.narrow == ""


def test_clocks_fall_under_matrix_units_and_not_under_plain_arithmetic():
    alone = catalogued_device("a100-sxm-80gb")
    device = training_cluster(read_training_row({**ROW, "precision": "fp32"})).device

    assert device.matmul_efficiency_for("fp32") == alone.matmul_efficiency_for("fp32")
    assert device.matmul_efficiency_for("bf16") < 0.9 * alone.matmul_efficiency_for("bf16")


@pytest.mark.parametrize("answer", ["yes", "True", " 1 ", "torch.compile", "per-layer"])
def test_a_row_may_say_in_several_ways_that_it_was_compiled(answer: str):
    assert read_training_row({**ROW, "framework": "pytorch", "compiled": answer}).stack.kernels == "compiled"
    assert read_training_row({**ROW, "framework": "pytorch", "compiled": ""}).stack.kernels == "eager"


ASSUMED = [
    ({"device": "A100"}, "a100-sxm-80gb", "device 'A100' is taken to be a100-sxm-80gb"),
    ({"device": "A100 40GB"}, "a100-sxm-40gb", "device 'A100 40GB' is taken to be a100-sxm-40gb"),
    ({"device": "H100 80GB HBM3"}, "h100-sxm-80gb", "device 'H100 80GB HBM3' is taken to be h100-sxm-80gb"),
    ({"device": "H100", "intra_node_GB_per_s_per_gpu": "64"}, "h100-pcie-80gb", "is taken to be h100-pcie-80gb"),
    ({"device": "H100", "intra_node_GB_per_s_per_gpu": ""}, "h100-sxm-80gb", "is taken to be h100-sxm-80gb"),
    ({"device": "Tesla V100"}, "v100-32gb", "device 'Tesla V100' is taken to be v100-32gb"),
    ({"family": "Qwen-2", "device": "b200"}, "b200", "family 'Qwen-2' is priced as llama"),
    ({"family": "Qwen2.5", "device": "b200"}, "b200", "family 'Qwen2.5' is priced as llama"),
    ({"family": "Llama-3.1", "device": "b200"}, "b200", "family 'Llama-3.1' is priced as llama"),
    ({"kv_heads": ""}, "a100-sxm-80gb", "kv_heads is missing: as many as heads, 16"),
    ({"kv_heads": "-"}, "a100-sxm-80gb", "kv_heads is missing: as many as heads, 16"),
    ({"dp": ""}, "a100-sxm-80gb", "dp is missing: 4, which the other degrees leave"),
    ({"attention": ""}, "a100-sxm-80gb", "attention is missing: unfused, as most software of that year"),
    ({"attention": "", "year": "2024"}, "a100-sxm-80gb", "attention is missing: flash, as most software of that year"),
    ({"device": "A100-80G"}, "a100-sxm-80gb", "device 'A100-80G' is taken to be a100-sxm-80gb"),
    ({"family": "Mixtral", "experts": "8", "top_k": "2"}, "a100-sxm-80gb", "family 'Mixtral' is priced as llama"),
    (
        {"family": "llama", "model": "Mixtral-8x7B", "experts": "8", "top_k": ""},
        "a100-sxm-80gb",
        "top_k is missing: 2, by the model's name",
    ),
]


@pytest.mark.parametrize(("change", "device", "assumed"), ASSUMED)
def test_what_a_row_leaves_out_is_assumed_and_said(change: dict[str, str], device: str, assumed: str):
    found = read_training_row({**ROW, **change})

    assert found.device == device
    assert assumed in found.assumed


_FUSED = ("FlashAttention-2", "sdpa", "fused", "FA3", "flex_attention", "Transformer Engine", "ring")
ATTENTION = dict.fromkeys(_FUSED, True) | dict.fromkeys(("eager", "unfused", "Math", "naive", "none"), False)


@pytest.mark.parametrize("said", ATTENTION)
def test_attention_is_fused_under_any_of_its_kernels_names(said: str):
    assert read_training_row({**ROW, "attention": said}).architecture.fused_attention is ATTENTION[said]


def test_one_node_needs_no_rate_between_nodes():
    alone = {"gpus": "8", "dp": "1", "pp": "1", "inter_node_Gbit_per_s_per_node": ""}

    assert read_training_row({**ROW, **alone}).nic_bytes_per_s == 0


def test_a_framework_that_is_not_known_is_plain_pytorch_and_the_row_says_so():
    found = read_training_row({**ROW, "framework": "Abacus-LM"})

    assert found.stack == pytorch().at_zero(found.zero).of_year(2021)
    assert found.assumed == "framework 'Abacus-LM' is not known: priced as plain PyTorch"
    assert not read_training_row(ROW).assumed


def test_every_framework_that_rows_were_fitted_to_is_known():
    with DATA.open(encoding="utf-8") as file:
        assert all(is_known(row["framework"]) for row in csv.DictReader(file))


@pytest.mark.parametrize(("year", "reruns_all"), [(2023, True), (2024, False)])
def test_recomputation_of_pytorch_stops_early_in_versions_that_can(year: int, reruns_all: bool):
    assert pytorch().of_year(year).reruns_all is reruns_all
    assert stack_of("deepspeed", compiled=False).of_year(year).reruns_all


def test_a_slingshot_fabric_has_its_own_efficiency():
    slingshot, unnamed = (
        training_cluster(read_training_row({**ROW, "fabric_note": note})).levels[-1].efficiency
        for note in ("4x200 Gbit/s Slingshot-11", "4x200 Gbit/s")
    )

    assert slingshot > unnamed


def test_pytorchs_own_attention_does_not_use_what_is_new_in_hopper():
    def reached(framework: str, device: str, year: int = 2025) -> float:
        return stack_of(framework, compiled=False).on(catalogued_device(device), year).attention_efficiency

    assert reached("megatron-core", "h100-sxm-80gb") > 1.3 * reached("torchtitan", "h100-sxm-80gb")
    assert reached("jax", "h200") == reached("nemo", "h200")
    assert reached("megatron-core", "a100-sxm-80gb") == reached("torchtitan", "a100-sxm-80gb")
    assert reached("megatron-core", "h100-sxm-80gb", 2023) == reached("torchtitan", "h100-sxm-80gb", 2023)


FIGURES = {"device": "my-accelerator", "peak_TFLOP_per_s": "400", "memory_GiB": "96", "memory_GB_per_s": "3000"}


def test_a_device_that_the_catalogue_lacks_is_described_by_the_rows_figures():
    read = read_training_row({**ROW, **FIGURES})
    device = training_cluster(read).device

    assert (device.name, read.label.split()[4]) == ("my-accelerator", "my-accelerator,")
    assert (device.memory_bytes, device.memory_bytes_per_s) == (96 * 2**30, 3000e9)
    assert device.flops_for("bfloat16") == 400e12
    assert [level.bytes_per_s for level in training_cluster(read).levels] == [300e9, 200e9]


def test_a_device_described_as_one_of_the_catalogue_is_computed_like_it():
    a100 = {"device": "a copy", "peak_TFLOP_per_s": "312", "memory_GiB": "80", "memory_GB_per_s": "2039"}
    copy, known = (training_cluster(read_training_row({**ROW, **change})).device for change in (a100, {}))

    assert copy.matmul_efficiency_for("bfloat16") == known.matmul_efficiency_for("bfloat16")
    assert copy.attention_efficiency == known.attention_efficiency


@pytest.mark.parametrize("missing", sorted(FIGURES.keys() - {"device"}))
def test_a_described_device_needs_all_its_figures(missing: str):
    with pytest.raises(CostModelError, match=f"{missing} is missing"):
        read_training_row({**ROW, **FIGURES, missing: ""})


@pytest.mark.parametrize(("gpus", "links"), [("1", 150e9), ("2", 25e9), ("4", 100e9), ("8", 150e9)])
def test_a_part_of_a_machine_of_eight_v100_has_the_links_within_it(gpus: str, links: float):
    alone = {"device": "v100-32gb", "gpus": gpus, "dp": gpus, "tp": "1", "pp": "1", "precision": "fp16"}
    read = read_training_row({**ROW, **alone, "intra_node_GB_per_s_per_gpu": "150"})

    assert training_cluster(read).groups[0].node.links.bytes_per_s == pytest.approx(links)


def test_ranks_that_end_inside_a_node_are_priced_on_parts_of_nodes():
    uneven = {"gpus": "24", "dp": "6", "tp": "2", "pp": "2", "global_batch": "96"}
    read, even = read_training_row({**ROW, **uneven}), read_training_row({**ROW, "dp": "4"})

    node, whole = training_cluster(read).groups[0].node, training_cluster(even).groups[0].node
    assert (node.count, training_cluster(read).node_count) == (4, 6)
    assert node.nic is not None
    assert whole.nic is not None
    assert node.nic.bytes_per_s == whole.nic.bytes_per_s / 2
    assert "ranks do not lie evenly on nodes of 8: priced as 4 each, with their share of its adapters" in read.assumed
    assert (whole.count, "evenly" in even.assumed) == (8, False)


@pytest.mark.parametrize(("family", "drops"), [("vit", False), ("DeiT", False), ("bert", True), ("gpt", True)])
def test_transformers_of_images_are_trained_without_dropout(family: str, drops: bool):
    assert read_training_row({**ROW, "family": family, "attention": "unfused"}).architecture.drops is drops
