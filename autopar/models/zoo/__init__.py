"""Architectures of our own in plain torch.nn: published sizes by name, each setting replaceable; all return a loss.

build("llama3-8b", batch=128, seq=8192, overrides={"layers": "4"})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.models.settings import parse_setting
from autopar.models.shallow import ShorterModels
from autopar.models.zoo.bert import BertSettings
from autopar.models.zoo.gpt import GptSettings
from autopar.models.zoo.llama import LlamaSettings
from autopar.models.zoo.mlp import MlpSettings
from autopar.models.zoo.resnet import ResNetSettings
from autopar.models.zoo.seq2seq import Seq2SeqSettings
from autopar.models.zoo.t5 import T5Settings
from autopar.models.zoo.vit import VitSettings
from autopar.suggest import did_you_mean


class Settings(Protocol):
    """Sizes of one architecture."""

    @property
    def default_batch(self) -> int:
        """Return the global batch where none is asked for."""

    @property
    def default_seq(self) -> int:
        """Return the sequence length where none is asked for; 0 where the model reads no sequences."""

    def model(self) -> nn.Module:
        """Return the model."""

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, ...]:
        """Return what forward takes."""


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> GptSettings:
    return GptSettings(layers=layers, hidden=hidden, heads=heads, **more)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, **more: Any) -> LlamaSettings:
    return LlamaSettings(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, intermediate=intermediate, **more
    )


# GPT-3's vocabulary is GPT-2's, padded further so that it splits over more devices (Megatron-LM).
_GPT3 = {"vocab": 51200, "positions": 2048}
_LLAMA2 = {"vocab": 32000, "rope_theta": 10000.0, "sequence": 4096}
_MIXTRAL = {"vocab": 32000, "rope_theta": 1e6, "sequence": 4096, "experts": 8}

_DEEPSEEK = {"vocab": 129280, "rope_theta": 10000.0, "sequence": 4096, "kv_rank": 512, "capacity_factor": 1.0}

ZOO: dict[str, Settings] = {
    "mlp": MlpSettings(),
    "gpt-tiny": _gpt(2, 64, 8, vocab=128, positions=64),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-1.3b": _gpt(24, 2048, 16, **_GPT3),
    "gpt3-6.7b": _gpt(32, 4096, 32, **_GPT3),
    "gpt3-13b": _gpt(40, 5120, 40, **_GPT3),
    "gpt3-175b": _gpt(96, 12288, 96, **_GPT3),
    "llama-tiny": _llama(2, 64, 8, 8, 128, vocab=128, sequence=64),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, **_LLAMA2),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, **_LLAMA2),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, **_LLAMA2),
    "llama3-1b": _llama(16, 2048, 32, 8, 8192, tied=True),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248),
    "mixtral-tiny": _llama(2, 64, 8, 8, 128, vocab=128, sequence=64, experts=8),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, **_MIXTRAL),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, **{**_MIXTRAL, "vocab": 32768}),
    "deepseek-tiny": _llama(
        3,
        64,
        8,
        8,
        32,
        vocab=128,
        sequence=64,
        experts=8,
        kv_rank=16,
        q_rank=24,
        plain_size=8,
        rotated_size=4,
        value_size=8,
        shared_intermediate=32,
        dense_layers=1,
        dense_intermediate=128,
        predictions=1,
    ),
    "deepseek-v2-lite": _llama(
        27,
        2048,
        16,
        16,
        1408,
        experts=64,
        experts_per_token=6,
        shared_intermediate=2816,
        dense_layers=1,
        dense_intermediate=10944,
        **{**_DEEPSEEK, "vocab": 102400},
    ),
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        128,
        2048,
        experts=256,
        experts_per_token=8,
        shared_intermediate=2048,
        dense_layers=3,
        dense_intermediate=18432,
        q_rank=1536,
        predictions=1,
        **_DEEPSEEK,
    ),
    "bert-tiny": BertSettings(2, 64, 8, 128, vocab=128, positions=64),
    "bert-base": BertSettings(),
    "bert-large": BertSettings(24, 1024, 16, 4096),
    "seq2seq-tiny": Seq2SeqSettings(
        2, 2, 64, 8, intermediate=128, gated=True, vocab=128, positions=64, decoder_positions=16
    ),
    "t5-tiny": T5Settings(2, 64, 8, 8, 128, vocab=128),
    "t5-small": T5Settings(6, 512, 8, 64, 2048),
    "t5-base": T5Settings(),
    "t5-large": T5Settings(24, 1024, 16, 64, 4096),
    "vit-tiny": VitSettings(2, 64, 8, 128, patch=8, image=32, classes=16),
    "vit-b": VitSettings(),
    "vit-l": VitSettings(24, 1024, 16, 4096),
    "vit-h": VitSettings(32, 1280, 16, 5120, patch=14),
    "resnet-tiny": ResNetSettings((2, 1, 1, 1), bottleneck=False, width=16, image=32, classes=16),
    "resnet18": ResNetSettings((2, 2, 2, 2), bottleneck=False),
    "resnet50": ResNetSettings(),
}


def settings_of(name: str, overrides: Mapping[str, str]) -> Settings:
    """Return the settings of a named architecture with some of them replaced.

    Raises:
        UsageError: no architecture has that name, or no setting does, or a value is of another type.
    """
    if name not in ZOO:
        raise UsageError(f"no model of the zoo is called {name!r}{did_you_mean(name, ZOO)}; known: {', '.join(ZOO)}")
    settings: Any = ZOO[name]
    known = {field.name for field in fields(settings)}
    changed: dict[str, Any] = {}
    for key, text in overrides.items():
        if key not in known:
            raise UsageError(
                f"--set {key}: zoo:{name} has no {key!r}{did_you_mean(key, known)}; known: {', '.join(sorted(known))}"
            )
        value = parse_setting(key, text, getattr(settings, key))
        changed[key] = tuple(value) if isinstance(value, list) else value
    _check(name, replace(settings, **changed))
    made: Settings = replace(settings, **changed)
    return made


def _check(name: str, settings: Any) -> None:
    """Refuse sizes that make no model."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        may_be_zero = field.default == 0
        if isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or not (value or may_be_zero)):
            raise UsageError(f"--set {field.name}={value}: zoo:{name} needs a positive {field.name}")
    for part, whole in (("heads", "hidden"), ("kv_heads", "heads"), ("patch", "image")):
        small, large = getattr(settings, part, 1) or 1, getattr(settings, whole, 0)
        if large % small and not getattr(settings, "head_size", 0):
            raise UsageError(f"zoo:{name}: {whole}={large} is no multiple of {part}={small}; change one with --set")


def build(
    name: str, *, batch: int | None, seq: int | None, overrides: Mapping[str, str]
) -> tuple[nn.Module, tuple[torch.Tensor, ...], int | None]:
    """Return a named model, its inputs (both on meta) and the tokens of a step, `None` where it reads no tokens.

    Raises:
        UsageError: no such name or setting, or a sequence longer than the model's positions.
    """
    settings = settings_of(name, overrides)
    size = batch or settings.default_batch
    length = seq or settings.default_seq
    positions = getattr(settings, "positions", None)
    if positions is not None and length > positions:
        raise UsageError(
            f"--seq {length} is longer than the {positions} positions of zoo:{name}; use a shorter one, or --set "
            f"positions={length}"
        )
    with torch.device("meta"):
        inputs = settings.inputs(size, length)
    return _model(settings), inputs, size * length if settings.default_seq else None


def shorter_models(model: nn.Module, inputs: Any, name: str, overrides: Mapping[str, str]) -> ShorterModels:
    """Return models with few layers that may stand for the named one."""
    settings: Any = settings_of(name, overrides)
    plain = SimpleNamespace(**{field.name: getattr(settings, field.name) for field in fields(settings)})
    return ShorterModels(model, inputs, plain, lambda less: _model(type(settings)(**vars(less))))


def _model(settings: Settings) -> nn.Module:
    with torch.device("meta"):
        return settings.model().train()
