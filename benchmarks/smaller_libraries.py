"""Models of libraries that hold one or a few architectures each: their constructors' arguments, small, and an input.

    monai:NAME  perceiver_pytorch:NAME  x_transformers:NAME  ...  (the module to import before the colon)

Images and sounds are told by the shape of one sample, tokens by how many there are.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import VOCABULARY

Example = tuple[nn.Module, dict[str, Any]]

_VIEWED = {"spatial_dims": 2, "in_channels": 3, "out_channels": 4}
_TOKENS = {"num_tokens": VOCABULARY, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}

MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[tuple[int, ...] | int, ...]]] = {
    "monai:unet": (
        "monai.networks.nets", "UNet",
        {**_VIEWED, "channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "norm": "instance"},
        ((3, 32, 32),),
    ),
    "monai:attention_unet": (
        "monai.networks.nets", "BasicUNetPlusPlus",
        {**_VIEWED, "features": (8, 8, 16, 16, 32, 8)}, ((3, 32, 32),),
    ),
    "monai:segresnet": (
        "monai.networks.nets", "SegResNet",
        {"spatial_dims": 3, "init_filters": 8, "in_channels": 1, "out_channels": 2, "blocks_down": (1, 1),
         "blocks_up": (1,)},
        ((1, 16, 16, 16),),
    ),
    "monai:swin_unetr": (
        "monai.networks.nets", "SwinUNETR",
        {**_VIEWED, "feature_size": 12, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}, ((3, 64, 64),),
    ),
    "monai:unetr": (
        "monai.networks.nets", "UNETR",
        {**_VIEWED, "img_size": 32, "feature_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_heads": 4},
        ((3, 32, 32),),
    ),
    "perceiver_pytorch:perceiver": (
        "perceiver_pytorch", "Perceiver",
        {"input_channels": 3, "input_axis": 2, "num_freq_bands": 4, "max_freq": 8.0, "depth": 2, "num_latents": 8,
         "latent_dim": 32, "cross_dim_head": 8, "latent_heads": 4, "latent_dim_head": 8, "num_classes": 10},
        ((8, 8, 3),),
    ),
    "performer_pytorch:performer": (
        "performer_pytorch", "PerformerLM", {**_TOKENS, "max_seq_len": 16, "causal": False}, (16,),
    ),
    "conformer:block": ("conformer", "ConformerBlock", {"dim": 32, "dim_head": 8, "heads": 4}, ((16, 32),)),
    "vector_quantize_pytorch:fsq": ("vector_quantize_pytorch", "FSQ", {"levels": [8, 5, 5], "dim": 32}, ((16, 32),)),
    "mambapy:mamba": (
        "mambapy.mamba", "Mamba", {"config": ("MambaConfig", {"d_model": 32, "n_layers": 2})}, ((16, 32),),
    ),
    "x_transformers:decoder": (
        "x_transformers", "TransformerWrapper",
        {"num_tokens": VOCABULARY, "max_seq_len": 16,
         "attn_layers": ("Decoder", {"dim": 32, "depth": 2, "heads": 4, "rotary_pos_emb": True, "attn_kv_heads": 2,
                                     "ff_swish": True, "ff_glu": True, "use_rmsnorm": True, "shift_tokens": 1})},
        (16,),
    ),
    "x_transformers:encoder": (
        "x_transformers", "TransformerWrapper",
        {"num_tokens": VOCABULARY, "max_seq_len": 16,
         "attn_layers": ("Encoder", {"dim": 32, "depth": 2, "heads": 4, "alibi_pos_bias": True, "macaron": True,
                                     "use_scalenorm": True})},
        (16,),
    ),
}  # fmt: skip
"""Module, class, arguments and each input: a shape of floating values, or so many tokens."""


class Drawn(nn.Module):
    """The first tensor of what a model returns, against a target of its shape."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, target: Tensor, **given: Tensor) -> Tensor:
        """Return the loss."""
        return F.mse_loss(first(self.body(*given.values())), target)


def first(found: Any) -> Tensor:
    """Return the first tensor of a result."""
    while not isinstance(found, Tensor):
        found = found[0]
    return found


def small_model(name: str, batch: int) -> Example:
    """Return a model of the table and its keyword arguments."""
    module, kind, settings, shapes = MODELS[name]
    library = importlib.import_module(module)
    body = getattr(library, kind)(**{key: _made(library, value) for key, value in settings.items()})
    inputs = {
        f"input_{i}": torch.randint(3, (batch, shape)) if isinstance(shape, int) else torch.randn(batch, *shape)
        for i, shape in enumerate(shapes)
    }
    with torch.no_grad():
        found = first(body(*inputs.values()))
    return Drawn(body), {**inputs, "target": torch.randn(found.shape)}


def _made(library: Any, value: Any) -> Any:
    """Return an argument, made if it is a class of the library by name with arguments of its own."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return getattr(library, value[0])(**value[1])
    return value
