"""Any model type of transformers at a small size: sizes of its default configuration, replaced by their names."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

SEQ = 32

_BY_SIZE: dict[int, tuple[str, ...]] = {
    1: ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
    2: ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks",
        "encoder_num_hidden_layers", "decoder_num_hidden_layers", "encoder_depth", "decoder_depth", "num_block_layers",
        "decoder_num_layers", "mamba_n_groups", "n_groups", "num_experts_per_tok", "moe_topk", "moe_k",
        "num_experts_per_token", "top_k_experts", "type_vocab_size", "num_kv_shared_layers", "num_feat_extract_layers"),
    4: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
        "encoder_num_key_value_heads", "decoder_num_key_value_heads", "multi_query_group_num"),
    8: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_key_heads", "linear_num_value_heads",
        "mamba_num_heads", "mamba_n_heads", "decoder_num_attention_heads", "encoder_num_attention_heads",
        "attention_heads", "index_n_heads", "num_heads_k", "head_dim", "d_kv", "linear_key_head_dim",
        "linear_value_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels",
        "attention_head_dim", "index_head_dim", "attention_head_size", "mamba_d_state", "ssm_state_size", "state_size",
        "time_step_rank", "mamba_dt_rank", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
        "patch_size", "index_topk", "hidden_size_per_layer_input", "laurel_rank", "num_conv_pos_embedding_groups"),
    16: ("mamba_d_head", "mamba_head_dim", "mamba_chunk_size", "chunk_size", "sliding_window", "attention_window",
         "num_labels", "num_mel_bins", "attention_chunk_size", "num_conv_pos_embeddings"),
    32: ("q_lora_rank", "kv_lora_rank", "image_size", "max_source_positions", "original_max_position_embeddings"),
    64: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "hidden_dim",
         "word_embed_proj_dim", "projection_dim", "decoder_hidden_size", "encoder_hidden_size", "mamba_d_ssm",
         "lru_width", "input_embedding_size", "width", "output_dim", "out_hidden_size", "vision_hidden_size",
         "token_dim", "encoder_embed_dim", "decoder_embed_dim", "proj_dim", "hidden_channels", "text_hidden_size",
         "pooler_output_size", "attention_dim", "d_embed", "audio_hidden_size", "text_embed_dim", "embedding_dim",
         "rope_dim", "moe_intermediate_size", "expert_ffn_hidden_size", "max_position_embeddings", "n_positions",
         "max_sequence_length", "n_ctx", "max_seq_len", "max_target_positions", "context_length", "seq_length",
         "block_size", "projector_dim", "expert_capacity", "classifier_proj_size"),
    128: ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "feedforward_size",
          "ffn_hidden_size", "mlp_dim", "shared_expert_intermediate_size", "dim_feedforward", "d_inner",
          "encoder_intermediate_size", "decoder_intermediate_size", "inner_size", "vocab_size",
          "vocab_size_per_layer_input", "codebook_size", "text_vocab_size"),
}  # fmt: skip
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names}
"""A small value for each size that configurations name; a smaller default stays."""

_LISTS = {"conv_dim": [32, 32], "conv_stride": [4, 4], "conv_kernel": [8, 8]}
"""What layers of speech models have, where it is a list."""

_DERIVED = frozenset(
    {"qk_head_dim", "mlp_layer_types", "rope_parameters", "rope_scaling", "transformers_version", "architectures",
     "dtype"}
)  # fmt: skip
"""What a configuration makes of the others itself."""

_LAYER_KINDS = frozenset({"layer_types", "layers_block_type"})


def shrunk(kind: str) -> Any:
    """Return the small configuration of a model type."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain = transformers.AutoConfig.for_model(kind)
    return type(plain)(**_arguments(plain))


def shrunk_model(kind: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model of that type and its keyword arguments."""
    from autopar.models import hf

    model = hf.build(shrunk(kind), "cpu")
    generator = torch.Generator().manual_seed(0)
    made = {name: each.random(generator) for name, each in hf.inputs(model, batch, SEQ).items()}
    return model, made | hf.plain_arguments(model)


def _arguments(plain: Any) -> dict[str, Any]:
    """Return what makes a configuration small; of settings that are left out the class's own default counts."""
    made = {name: _small(name, value, plain) for name, value in vars(plain).items() if not name.startswith("_")}
    return {name: value for name, value in made.items() if value is not None}


def _small(name: str, value: Any, plain: Any) -> Any:
    """Return the small value of a setting, `None` to leave it as it is."""
    if name in _DERIVED:
        return None
    if hasattr(value, "to_dict"):
        kind = {"model_type": value.model_type} if hasattr(value, "model_type") else {}
        return {**_arguments(value), **kind}
    if name == "image_size" and not isinstance(getattr(plain, "patch_size", None), int):
        return 64
    if isinstance(value, list | tuple):
        if name in _LAYER_KINDS and value:
            return (list(dict.fromkeys(value)) * 4)[:4]  # every kind of layer that there is
        return [1] * len(value) if name == "depths" else _LISTS.get(name)
    if name == "pad_token_id":
        return 0 if value is not None else None
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if name.endswith("_token_id"):
            return 1 if value >= 100 else None
        return min(_SIZES[name], value) if name in _SIZES and value > 0 else None
    is_drop = isinstance(value, float) and ("drop" in name or name.startswith("mask_"))
    return 0.0 if is_drop else None
