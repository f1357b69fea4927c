"""Models of other libraries at small sizes, by library and name, for those libraries that are installed.

    timm:NAME   torchvision:NAME   diffusers:NAME   vit_pytorch:NAME   smp:CLASS (segmentation_models_pytorch)
    hf:TYPE     any model type of transformers, its default configuration made small
    MODULE:NAME of `benchmarks.smaller_libraries`

Dropout of every kind is off, so that one device and several compute the same; forward returns the loss.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models import Around
from benchmarks.shrunk import shrunk_model
from benchmarks.smaller_libraries import MODELS as SMALLER
from benchmarks.smaller_libraries import small_model

Example = tuple[nn.Module, dict[str, Any]]

CLASSES = 10
_SIDES = (64, 128, 224, 256, 299)
"""Sides of images, the first that a model takes."""


_PROBABILITIES = ("drop_prob", "dropout", "dropout_p", "attn_drop", "attention_dropout", "drop_rate")


def undropped(model: nn.Module) -> nn.Module:
    """Return the model with every probability of leaving something out set to zero."""
    for module in model.modules():
        drops = any(part in type(module).__name__ for part in ("Drop", "StochasticDepth"))
        for name in (*_PROBABILITIES, *(("p",) if drops else ())):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def timm_model(name: str, batch: int) -> Example:
    """Return a model of timm for small images and few classes, with a loss around it."""
    import timm

    def made(**sizes: Any) -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=CLASSES, drop_rate=0.0, **sizes)
        return model

    try:
        body = made(img_size=_SIDES[0])
    except (TypeError, AssertionError, ValueError, RuntimeError):
        body = made()
    return _classifier(body, batch)


def torchvision_model(name: str, batch: int) -> Example:
    """Return a classifier, a segmentation model or a video classifier of torchvision, with a loss around it."""
    from torchvision import models

    if name in models.list_models(models.segmentation):
        body = models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)
        images, target = torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch, 32, 32))
        return Around(undropped(body), _of_pixels).train(), {"x": images, "target": target}
    if name in models.list_models(models.video):
        body = models.get_model(name, weights=None, num_classes=CLASSES)
        clips, target = torch.randn(batch, 3, 16 if "s3d" in name else 8, 32, 32), torch.randint(CLASSES, (batch,))
        return Around(undropped(body)).train(), {"x": clips, "target": target}
    sizes = {"image_size": 64} if name.startswith("vit_") else {}
    return _classifier(models.get_model(name, weights=None, num_classes=CLASSES, **sizes), batch)


def _of_pixels(found: dict[str, Tensor], target: Tensor) -> Tensor:
    loss = F.cross_entropy(found["out"], target)
    return loss + 0.5 * F.cross_entropy(found["aux"], target) if "aux" in found else loss


def _of_classes(found: Any, target: Tensor) -> Tensor:
    """Return the loss of logits, or the sum of those of several heads."""
    heads = found if isinstance(found, tuple | list) else [found]
    return sum((F.cross_entropy(each, target) for each in heads), torch.zeros(()))


def _classifier(body: nn.Module, batch: int) -> Example:
    body = undropped(body)
    target = torch.randint(CLASSES, (batch,))
    for side in _SIDES:
        try:
            with torch.no_grad():
                body.eval()(torch.zeros(1, 3, side, side))
        except (RuntimeError, AssertionError, ValueError, TypeError):
            continue
        plain = isinstance(body.train()(torch.zeros(2, 3, side, side)), Tensor)
        model = Around(body) if plain else Around(body, _of_classes)
        return model.train(), {"x": torch.randn(batch, 3, side, side), "target": target}
    raise ValueError(f"no square image of {_SIDES} fits")


class _Towards(nn.Module):
    """The first output of a model of diffusers, against a target of its shape."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, target: Tensor, **given: Tensor) -> Tensor:
        return F.mse_loss(self.body(**given, return_dict=False)[0], target)


_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 4}
_PLANES: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_DIFFUSERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "unet": (
        "UNet2DModel",
        {**_PLANES, "sample_size": 16, "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (3, 16, 16), "timestep": ()},
    ),
    "unet_text": (
        "UNet2DConditionModel",
        {**_PLANES, "sample_size": 16, "attention_head_dim": 8, "cross_attention_dim": 32,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"sample": (4, 16, 16), "timestep": (), "encoder_hidden_states": (8, 32)},
    ),
    "autoencoder_kl": (
        "AutoencoderKL",
        {**_PLANES, "latent_channels": 4, "sample_size": 16, "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (3, 16, 16)},
    ),
    "flux": (
        "FluxTransformer2DModel",
        {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (16, 4), "encoder_hidden_states": (8, 32), "pooled_projections": (32,), "timestep": ()},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 8},
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": (8, 32), "pooled_projections": (32,), "timestep": ()},
    ),
    "wan": (
        "WanTransformer3DModel",
        {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 4, "in_channels": 4, "out_channels": 4,
         "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 16},
        {"hidden_states": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": (8, 32)},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "sample_width": 8,
         "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 8},
        {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": (8, 32), "timestep": ()},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
         "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8},
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": (8, 32), "timestep": ()},
    ),
}  # fmt: skip
"""Class, configuration, and a sample's inputs by shape; those without dimensions are steps of the diffusion."""


def diffusers_model(name: str, batch: int) -> Example:
    """Return a small model of diffusers against random targets."""
    import diffusers

    kind, settings, shapes = _DIFFUSERS[name]
    body = getattr(diffusers, kind)(**settings)
    inputs = {
        key: torch.randn(batch, *shape) if shape else torch.randint(1000, (batch,)).float()
        for key, shape in shapes.items()
    }
    if name == "flux":  # places in picture and text, the same for all samples
        inputs |= {"img_ids": torch.arange(48.0).view(16, 3) % 4, "txt_ids": torch.zeros(8, 3)}
    with torch.no_grad():
        found = body(**inputs, return_dict=False)[0]
    return _Towards(body), {**inputs, "target": torch.randn(found.shape)}


_VIT = {"image_size": 64, "patch_size": 16, "num_classes": CLASSES, "dim": 32, "depth": 4, "heads": 4, "mlp_dim": 64}
_VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", _VIT),
    "simple_vit": ("SimpleViT", _VIT),
    "deepvit": ("DeepViT", _VIT),
    "cait": ("CaiT", {**_VIT, "cls_depth": 1}),
    "xcit": ("XCiT", {**_VIT, "cls_depth": 1}),
    "rvt": ("RvT", _VIT),
    "parallel_vit": ("ViT", {**_VIT, "num_parallel_branches": 2}),
    "learnable_memory_vit": ("ViT", _VIT),
    "vit_for_small_dataset": ("ViT", _VIT),
    "normalized_vit": ("nViT", {**_VIT, "dim_head": 8}),
    "nest": ("NesT", {"image_size": 64, "patch_size": 4, "dim": 32, "heads": 2, "num_hierarchies": 2,
                      "block_repeats": (1, 1), "num_classes": CLASSES}),
    "max_vit": ("MaxViT", {"num_classes": CLASSES, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4,
                           "dim_conv_stem": 16}),
    "cvt": ("CvT", {"num_classes": CLASSES, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 32, "s2_heads": 2,
                    "s3_heads": 4, "s3_depth": 1}),
}  # fmt: skip


def vit_pytorch_model(name: str, batch: int) -> Example:
    """Return a small model of vit_pytorch with a loss around it."""
    kind, settings = _VIT_PYTORCH[name]
    body = getattr(importlib.import_module(f"vit_pytorch.{name}"), kind)(**settings)
    return _classifier(body, batch)


def segmentation_model(name: str, batch: int) -> Example:
    """Return a model of segmentation_models_pytorch on a ResNet-18, with the loss of every pixel around it."""
    import segmentation_models_pytorch as library

    body = getattr(library, name)("resnet18", encoder_weights=None, classes=CLASSES)
    images, target = torch.randn(batch, 3, 64, 64), torch.randint(CLASSES, (batch, 64, 64))
    return Around(undropped(body)), {"x": images, "target": target}


_LIBRARIES: dict[str, tuple[str, Callable[[str, int], Example], tuple[str, ...]]] = {
    "timm": (
        "timm", timm_model,
        ("resnet18", "efficientnet_b0", "mixer_s32_224", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224",
         "convnext_atto", "mobilenetv3_small_050", "regnetx_002", "densenet121", "deit3_small_patch16_224",
         "eva02_tiny_patch14_224", "maxvit_rmlp_pico_rw_256", "levit_128", "xcit_nano_12_p8_224", "coat_tiny",
         "cait_xxs24_224", "convit_tiny", "pvt_v2_b0", "gmlp_ti16_224", "test_mambaout", "pit_ti_224"),
    ),
    "torchvision": (
        "torchvision", torchvision_model,
        ("vit_b_16", "squeezenet1_1", "lraspp_mobilenet_v3_large", "shufflenet_v2_x0_5", "swin_v2_t"),
    ),
    "diffusers": ("diffusers", diffusers_model, tuple(_DIFFUSERS)),
    "vit_pytorch": ("vit_pytorch", vit_pytorch_model, tuple(_VIT_PYTORCH)),
    "smp": ("segmentation_models_pytorch", segmentation_model, ("Unet", "FPN", "UPerNet")),
    "hf": ("transformers", shrunk_model, ()),
}  # fmt: skip
"""By kind: the module to import, what makes a model of it, and the models that are run by default."""


def installed() -> list[str]:
    """Return the models that are run by default, of the libraries that this interpreter finds."""
    return [
        f"{kind}:{name}"
        for kind, (module, _, known) in _LIBRARIES.items()
        if importlib.util.find_spec(module)
        for name in known
    ] + [name for name in SMALLER if importlib.util.find_spec(name.partition(":")[0])]


def example(kind: str, name: str, batch: int) -> Example:
    """Return a model of a library in training mode and its keyword arguments, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        known = f"{kind}:{name}" in SMALLER
        model, inputs = small_model(f"{kind}:{name}", batch) if known else _LIBRARIES[kind][1](name, batch)
    return undropped(model).train(), inputs
