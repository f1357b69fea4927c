"""Small configurations of many architectures of transformers, for tests and benchmarks.

    model, kwargs = tiny("llama")        # float32 on the CPU, dropout off, the same values for the same seed

Sizes divide by 8 where the architecture allows it: hidden 64, 8 heads, vocabulary 128, batch 8, sequence 32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.models import hf
from autopar.suggest import did_you_mean

BATCH = 8
SEQ = 32

_COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
_TEXT = {**_COMMON, "intermediate_size": 128, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 8, "head_dim": 8}
_IMAGE = {"image_size": 32, "num_labels": 16}
_PATCHES = {**_IMAGE, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
            "intermediate_size": 128}  # fmt: skip
_MOE = {"num_experts_per_tok": 2}
_LATENT = {
    **_MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 8,
}
"""Latent attention and experts, as DeepSeek has them."""
_BART = {
    "vocab_size": 128, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip

_SMALL: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64},
    "bert": _TEXT,
    "t5": {"vocab_size": 128, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2,
           "num_heads": 8},
    "vit": _PATCHES,
    "resnet": {**_IMAGE, "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 1, 1, 1],
               "layer_type": "basic"},
    "mixtral": {**_GROUPED, **_MOE, "num_local_experts": 8},
    "mamba": {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 8},
    "whisper": {**_BART, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64,
                "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "qwen3_moe": {**_GROUPED, **_MOE, "num_experts": 8, "moe_intermediate_size": 64},
    "gemma": _GROUPED,
    "gemma2": _GROUPED,
    "gemma3_text": {**_GROUPED, "sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": {**_GROUPED, **_MOE, "num_local_experts": 8, "sliding_window": 16},
    "qwen2_moe": {**_GROUPED, **_MOE, "num_experts": 8, "moe_intermediate_size": 64,
                  "shared_expert_intermediate_size": 64},
    "olmoe": {**_GROUPED, **_MOE, "num_experts": 8},
    "deepseek_v2": {**_TEXT, **_LATENT},
    "deepseek_v3": {**_TEXT, **_LATENT},
    "phi": _TEXT,
    "phi3": _GROUPED,
    "mistral": _GROUPED,
    "falcon": {**_COMMON, "new_decoder_architecture": True, "num_kv_heads": 8},
    "gpt_neox": _TEXT,
    "gptj": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "rotary_dim": 8},
    "opt": {**_COMMON, "ffn_dim": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    "bloom": {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 8},
    "mpt": {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 8, "max_seq_len": 64},
    "stablelm": _GROUPED,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "starcoder2": _GROUPED,
    "cohere": _GROUPED,
    "granite": _GROUPED,
    "distilbert": {"vocab_size": 128, "dim": 64, "n_layers": 2, "n_heads": 8, "hidden_dim": 128,
                   "max_position_embeddings": 64},
    "roberta": _TEXT,
    "electra": {**_TEXT, "embedding_size": 64},
    "albert": {**_TEXT, "embedding_size": 64},
    "deberta-v2": {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta": {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "rwkv": {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64,
             "intermediate_size": 128, "context_length": 64},
    "mamba2": {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
               "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "fnet": _TEXT,
    "modernbert": {**_TEXT, "attn_implementation": "sdpa"},
    "bart": _BART,
    "mbart": _BART,
    "pegasus": _BART,
    "deit": _PATCHES,
    "beit": _PATCHES,
    "dinov2": {**_PATCHES, "mlp_ratio": 2},
    "swin": {**_IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [8, 8], "window_size": 4},
    "convnext": {**_IMAGE, "patch_size": 2, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 1, 1, 1]},
    "segformer": {**_IMAGE, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1],
                  "num_attention_heads": [1, 2, 4, 8], "decoder_hidden_size": 64},
    "mobilenet_v2": {**_IMAGE, "depth_multiplier": 0.5},
    "clip": {"text_config": {**_TEXT, "eos_token_id": 2, "bos_token_id": 1},
             "vision_config": {**_PATCHES, "num_labels": 16}, "projection_dim": 64},
    "siglip": {"text_config": {**_TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
               "vision_config": _PATCHES},
    "wav2vec2": {**_TEXT, "conv_dim": [32, 32], "conv_stride": [4, 4], "conv_kernel": [8, 8],
                 "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 8,
                 "num_labels": 16, "classifier_proj_size": 64},
}  # fmt: skip


def tiny_names() -> tuple[str, ...]:
    """Return the names of all small models."""
    return tuple(_SMALL)


def tiny_config(name: str, **settings: Any) -> Any:
    """Return the small configuration of an architecture, with some settings replaced."""
    import transformers

    if name not in _SMALL:
        raise UsageError(f"no small model is called {name!r}{did_you_mean(name, _SMALL)}")
    config = transformers.AutoConfig.for_model(name, **{**_SMALL[name], **settings})
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        for key, value in part.to_dict().items():
            if ("drop" in key or key.startswith("mask_")) and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def tiny(
    name: str, *, seed: int = 0, meta: bool = False, batch: int = BATCH, seq: int = SEQ, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model in training mode and its keyword arguments, both on the CPU (on meta if asked).

    `settings` replace those of the configuration (`num_hidden_layers=4`). Random state is left as it was.
    """
    config = tiny_config(name, **settings)
    if meta:
        model = hf.build(config)
        given = hf.inputs(model, batch, seq)
        return model, {key: spec.meta() for key, spec in given.items()} | hf.plain_arguments(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.build(config, "cpu")
    given = hf.inputs(model, batch, seq)
    generator = torch.Generator().manual_seed(seed)
    return model, {key: spec.random(generator) for key, spec in given.items()} | hf.plain_arguments(model)
