"""Models of transformers, from their configuration alone: nothing is downloaded, parameters stay on meta."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.models.settings import parse_setting
from autopar.suggest import did_you_mean

_HEADS: tuple[tuple[str, str], ...] = (
    ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForVideoClassification", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES"),
    ("AutoModelForTimeSeriesPrediction", "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES"),
)
"""Heads whose forward returns a loss, the most usual for training an architecture first; else the bare model."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_FEATURES = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")
"""Settings that tell how many numbers a frame of sound has, where frames come before them."""
_DEFAULT_BATCH = 8
_DEFAULT_SEQ = 128


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape of an input and, for integers, the number of values it can have (0: floating-point noise)."""

    shape: tuple[int, ...]
    values: int = 0

    def meta(self) -> torch.Tensor:
        """Return a tensor without storage."""
        return torch.empty(self.shape, dtype=torch.int64 if self.values else torch.float32, device="meta")

    def random(self, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor of random values."""
        if self.values:
            return torch.randint(self.values, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator)


def load_config(source: str, overrides: Mapping[str, str]) -> Any:
    """Return the configuration that `source` names (a directory, a `config.json`, a model type), with overrides.

    Raises:
        UsageError: transformers is missing, nothing has that name, or an override does not fit.
    """
    transformers = _transformers()
    if Path(source).exists():
        import json

        file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        try:
            given = json.loads(file.read_text())
            kind = given.pop("model_type")
        except FileNotFoundError:
            raise UsageError(f"hf:{source} has no config.json; name a directory or file that has one") from None
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(f"{file} is no transformers configuration (JSON with a model_type): {error!r}") from error
    else:
        given, kind = {}, source
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if kind not in known:
        if "/" in kind or kind.endswith(".json"):
            raise UsageError(
                f"hf:{kind} is no directory or file here, and models are not downloaded; name a local directory with a "
                "config.json, or a model type such as hf:llama with --set KEY=VALUE"
            )
        raise UsageError(
            f"transformers knows no model type {kind!r}{did_you_mean(kind, known)}; name one that it knows, such as "
            "hf:llama, or a local directory with a config.json"
        )
    with _quiet():
        plain = transformers.AutoConfig.for_model(kind, **given)
        return transformers.AutoConfig.for_model(kind, **given | _overrides(plain, overrides)) if overrides else plain


def _overrides(config: Any, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the overrides as values of the types that the configuration has; `a.b=1` reaches into a part."""
    given: dict[str, Any] = {}
    for key, text in overrides.items():
        *path, last = key.split(".")
        part, target = config, given
        for name in path:
            inner = getattr(part, name, None)
            if inner is None or not hasattr(inner, "to_dict"):
                raise UsageError(
                    f"--set {key}: {type(part).__name__} has no part {name!r}{did_you_mean(name, vars(part))}"
                )
            part, target = inner, target.setdefault(name, inner.to_dict())
        names = {*part.to_dict(), *getattr(part, "attribute_map", {})}
        if last not in names | _derived(type(part)):
            raise UsageError(f"--set {key}: {type(part).__name__} has no {last!r}{did_you_mean(last, names)}")
        target[last] = parse_setting(key, text, getattr(part, last, None))
    return given


def _derived(kind: type) -> set[str]:
    """Return the settings that a class of configurations keeps as others, as `num_labels` by `id2label`."""
    found = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {name for name, each in found.items() if isinstance(each, property) and each.fset is not None}


def build(config: Any, device: str = "meta") -> nn.Module:
    """Return the model of the configuration with the head that gives a loss, ready for training."""
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        _make_trainable(part)
    with _quiet(), torch.device(device):
        made: Any = _model_class(config)(config)
    if hasattr(made, "freeze_feature_encoder"):
        # Speech models fine-tune so; else their forward turns requires_grad on midway, which no graph can hold.
        made.freeze_feature_encoder()
    trained: nn.Module = made.train()
    return trained


def _make_trainable(config: Any) -> None:
    """Switch off what training on fixed shapes does not use: caches, and masks drawn by numpy."""
    for name, value in (("use_cache", False), ("apply_spec_augment", False), ("layerdrop", 0.0)):
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "problem_type", "") is None:
        config.problem_type = "single_label_classification"
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int):
        for name in ("pad_token_id", *(each for each in config.to_dict() if each.endswith("_token_id"))):
            now = getattr(config, name, None)
            if (now is None and name == "pad_token_id") or (isinstance(now, int) and now >= vocabulary):
                setattr(config, name, 0)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


def _model_class(config: Any) -> Any:
    """Return the class that the configuration names, else the one with the most usual head of its type."""
    transformers = _transformers()
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    auto = transformers.models.auto.modeling_auto
    if not (hasattr(config, "text_config") and hasattr(config, "vision_config")) or _in(auto, _HEADS[2][1], config):
        for head, mapping in _HEADS:
            if _in(auto, mapping, config):
                return _first(getattr(transformers, head)._model_mapping[type(config)])
    try:
        return _first(transformers.AutoModel._model_mapping[type(config)])
    except KeyError:
        raise UsageError(f"transformers has no model for the configuration of type {config.model_type!r}") from None


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _in(auto: Any, mapping: str, config: Any) -> bool:
    return config.model_type in getattr(auto, mapping, {})


def inputs(model: nn.Module, batch: int | None, seq: int | None) -> dict[str, InputSpec]:
    """Return the inputs that the model's forward needs to give a loss, by name.

    Raises:
        UsageError: the sequence is longer than the model's positions, or the kind of input is not known.
    """
    config: Any = model.config
    wanted = inspect.signature(model.forward).parameters
    text = getattr(config, "text_config", None) or config
    size = batch or _DEFAULT_BATCH
    limit = next((getattr(text, name) for name in _POSITIONS if isinstance(getattr(text, name, None), int)), None)
    limit = getattr(text, "max_target_positions", limit)
    if seq is not None and limit is not None and 0 < limit < seq:
        setting = next((name for name in (*_POSITIONS, "max_target_positions") if hasattr(text, name)), _POSITIONS[0])
        raise UsageError(
            f"--seq {seq} is longer than the {limit} positions of this model; use a shorter one, or --set "
            f"{setting}={seq}"
        )
    length = seq or (min(_DEFAULT_SEQ, limit) if limit and limit > 0 else _DEFAULT_SEQ)
    given = _main_input(model, config, text, size, length)
    if "input_ids" in wanted and "pixel_values" in given and "return_loss" in wanted:
        given = {"input_ids": InputSpec((size, length), _vocabulary(config, text)), **given}
    labels = _labels(model, config, text, size, length, given)
    if labels is not None and "labels" in wanted:
        given["labels"] = labels
    elif "decoder_input_ids" in wanted and config.is_encoder_decoder:
        given["decoder_input_ids"] = InputSpec((size, length), _vocabulary(config, text))
    if "future_values" in wanted and "past_values" in given:
        channels = given["past_values"].shape[-1]
        given["future_values"] = InputSpec((size, config.prediction_length, channels))
    return given


def _vocabulary(config: Any, text: Any) -> int:
    """Return how many values token ids have."""
    found = getattr(text, "vocab_size", None)
    if isinstance(found, int):
        return found
    raise _unknown(config, "token ids, and its configuration has no vocab_size")


def _unknown(config: Any, what: str) -> UsageError:
    return UsageError(
        f"hf:{config.model_type} reads {what}, and autopar does not know how to make one; write a factory that "
        "returns (model, example_inputs), and name it as path/to/file.py:factory"
    )


def _main_input(model: nn.Module, config: Any, text: Any, size: int, length: int) -> dict[str, InputSpec]:
    vision = getattr(config, "vision_config", None) or config
    main: str = model.main_input_name  # type: ignore[assignment]
    if "return_loss" in inspect.signature(model.forward).parameters and hasattr(vision, "image_size"):
        main = "pixel_values"
    match main:
        case "input_ids":
            return {"input_ids": InputSpec((size, length), _vocabulary(config, text))}
        case "pixel_values":
            edges = getattr(vision, "image_size", 224)
            height, width = edges if isinstance(edges, tuple | list) else (edges, edges)
            channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
            frames = (vision.num_frames,) if isinstance(getattr(vision, "num_frames", None), int) else ()
            return {"pixel_values": InputSpec((size, *frames, channels, height, width))}
        case "input_features" if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            return {"input_features": InputSpec((size, config.num_mel_bins, 2 * config.max_source_positions))}
        case "input_features" if (spec := _frames(config, size, length)) is not None:
            return {"input_features": spec}
        case "past_values" if hasattr(config, "num_input_channels") and hasattr(config, "context_length"):
            return {"past_values": InputSpec((size, config.context_length, config.num_input_channels))}
        case "input_values" if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return {"input_values": InputSpec((size, config.max_length, config.num_mel_bins))}
        case "input_values" if hasattr(config, "conv_stride"):
            samples = 1
            for stride in config.conv_stride:
                samples *= stride
            return {"input_values": InputSpec((size, samples * (length + 1)))}
    raise _unknown(config, repr(main))


def _frames(config: Any, size: int, length: int) -> InputSpec | None:
    """Return frames of sound, of numbers each, of which `length` are left once shortened; `None` if not told how."""
    heard = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    numbers = next((getattr(heard, name) for name in _FEATURES if isinstance(getattr(heard, name, None), int)), None)
    if numbers is None:
        return None
    shortened = getattr(heard, "subsampling_factor", 4)
    frames = min(shortened * length, getattr(heard, "max_source_positions", shortened * length))
    return InputSpec((size, frames, numbers))


_LabelKind = Literal["token", "token_class", "class", "pixel", "none"]
_LABELS: tuple[tuple[str, _LabelKind], ...] = (
    ("ForCausalLM", "token"),
    ("LMHead", "token"),
    ("ForMaskedLM", "token"),
    ("ForConditionalGeneration", "token"),
    ("ForTokenClassification", "token_class"),
    ("SemanticSegmentation", "pixel"),
    ("Classification", "class"),
)


def _labels(
    model: nn.Module, config: Any, text: Any, size: int, length: int, given: Mapping[str, InputSpec]
) -> InputSpec | None:
    kind = next((kind for part, kind in _LABELS if part in type(model).__name__), "none")
    match kind:
        case "token":
            return InputSpec((size, length), _vocabulary(config, text))
        case "token_class":
            return InputSpec((size, length), config.num_labels)
        case "class":
            return InputSpec((size,), config.num_labels)
        case "pixel":
            return InputSpec((size, *given["pixel_values"].shape[2:]), config.num_labels)
    return None


def plain_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the plain values that the model's forward needs beside its inputs to give a loss."""
    wanted = inspect.signature(model.forward).parameters
    return {"return_loss": True} if "return_loss" in wanted else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers says about configurations without weights."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("hf: models need transformers; install it with: pip install 'autopar[hf]'") from None
    return transformers
