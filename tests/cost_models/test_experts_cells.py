"""What rows say of experts and of latent attention, and what a model's name says in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cost_models.errors import CostModelError
from cost_models.experts_cells import Latent, Mixture
from cost_models.training_rows import read_training_row
from tests.support.training_row import ROW

LATENT = {"kv_lora_rank": "512", "qk_nope_head_dim": "128", "qk_rope_head_dim": "64", "v_head_dim": "128"}
DEEPSEEK = {
    **ROW, **LATENT, "family": "llama", "layers": "61", "q_lora_rank": "1536", "experts": "256", "top_k": "8",
    "ffn_hidden": "18432", "moe_ffn_hidden": "2048", "first_k_dense": "3", "n_shared_experts": "1", "mtp_layers": "1",
}  # fmt: skip
V3 = (
    Latent(q_rank=1536, kv_rank=512, plain=128, rotated=64, values=128),
    Mixture(experts=256, chosen=8, ffn=2048, shared_ffn=2048, dense_layers=3, dense_ffn=18432),
)


def test_columns_say_latent_attention_dense_layers_and_shared_experts():
    sizes = read_training_row(DEEPSEEK).architecture

    assert (sizes.latent, sizes.mixture, sizes.further) == (*V3, 1)


@pytest.mark.parametrize("family", ["deepseek", "DeepSeek-V3", "llama"])
@pytest.mark.parametrize("width", ["18432", "2048"])
def test_a_model_known_by_its_name_needs_none_of_them(family: str, width: str):
    row = {**ROW, "model": "DeepSeek-V3", "family": family, "layers": "61", "ffn_hidden": width}
    read = read_training_row(row)

    assert read.architecture.latent == V3[0]
    assert read.architecture.mixture == replace(V3[1], groups=8, reached=4)
    assert "kv_lora_rank is missing: 512 and its kin, by the model's name" in read.assumed


def test_what_a_row_says_goes_before_what_its_models_name_says():
    row = {
        **ROW,
        "model": "DeepSeek-V3",
        "family": "deepseek",
        "layers": "13",
        "first_k_dense": "0",
        "experts": "64",
        "top_k": "4",
    }
    sizes = read_training_row(row | {"n_shared_experts": "2", "ffn_hidden": "1024"}).architecture

    own = Mixture(experts=64, chosen=4, ffn=1024, shared_ffn=2048, dense_layers=0, dense_ffn=18432)
    assert sizes.mixture == replace(own, groups=8, reached=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": ""}, "kv_lora_rank is 512, of latent attention: add qk_rope_head_dim"),
        ({"family": "gpt"}, "family is 'gpt': mixtures of experts are priced of the llama family alone"),
        ({"moe_ffn_hidden": ""}, "first_k_dense is 3: add moe_ffn_hidden, the width of one expert"),
        ({"layers": "3"}, "first_k_dense is 3 of 3 layers"),
        ({"experts": "", "top_k": ""}, "first_k_dense is 3, and the row says of no experts: add experts and top_k"),
    ],
)
def test_columns_that_say_a_part_name_what_is_missing(change: Mapping[str, str], message: str):
    with pytest.raises(CostModelError, match=message):
        read_training_row({**DEEPSEEK, **change})


def test_an_encoder_with_a_decoder_has_the_layers_of_both():
    t5 = read_training_row({**ROW, "family": "t5", "decoder_layers": "12", "decoder_seq_len": "128"})
    same = read_training_row({**ROW, "family": "mT5"})

    assert (t5.architecture.decoder_layers, t5.architecture.decoder_seq) == (12, 128)
    assert same.architecture.decoder_layers == same.architecture.layers
    assert "decoder_layers and decoder_seq_len missing: the encoder's" in same.assumed


@pytest.mark.parametrize(("width", "said", "gated"), [("0.5", "", True), ("4", "", False), ("4", "yes", True)])
def test_a_feed_forward_narrower_than_four_is_a_gated_one(width: str, said: str, gated: bool):
    row = {**ROW, "family": "t5", "ffn_hidden": str(int(float(width) * int(ROW["hidden"]))), "gated": said}

    assert read_training_row(row).architecture.gated is gated


def test_sequences_of_an_encoder_with_a_decoder_are_not_split():
    row = {**ROW, "family": "t5", "cp": "2", "gpus": str(2 * int(ROW["gpus"]))}

    with pytest.raises(CostModelError, match="cp is 2: context parallelism of an encoder with a decoder is not priced"):
        read_training_row(row)
