"""Model references: what they name, and what a user reads when they name nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import UsageError
from autopar.models import resolve

FACTORIES = """
from torch import nn
import torch

def pair(batch=4):
    return nn.Linear(8, 8), (torch.zeros(int(batch), 8),)

def keyword(batch=4, width="8"):
    return nn.Linear(int(width), 8), {"input": torch.zeros(int(batch), int(width))}

def alone():
    return nn.Linear(8, 8)

instance = nn.Linear(8, 8)

def fails():
    return helper()

def helper():
    raise RuntimeError("no data")  # line 20

def number():
    return 5

def kind():
    return nn.Linear

def kind_and_input():
    return nn.Linear, (torch.zeros(4, 8),)

def wrong_inputs():
    return nn.Linear(8, 8), 7

value = 3

def declared(width=8, depth: int = 1, scale: float = 1.0, bias=True, name=None, kind: str = "7"):
    assert all(type(each) is str for each in (name, kind)), (name, kind)
    layers = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(depth)))
    return layers, (torch.full((4, width), scale),)
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    file = tmp_path / "factories.py"
    file.write_text(FACTORIES)
    return file


def test_factory_of_a_file_gets_batch_and_settings(factories: Path):
    found = resolve(f"{factories}:keyword", batch=16, overrides={"width": "24"})

    assert isinstance(found.example_inputs, dict)
    assert found.example_inputs["input"].shape == (16, 24)


def test_settings_are_of_the_type_that_a_factory_declares(factories: Path):
    settings = {"width": "6", "depth": "2", "scale": "2.5", "bias": "no", "name": "12", "kind": "3"}
    found = resolve(f"{factories}:declared", overrides=settings)

    assert [name for name, _ in found.model.named_parameters()] == ["0.weight", "1.weight"]
    assert isinstance(found.example_inputs, tuple)
    assert found.example_inputs[0].tolist() == [[2.5] * 6] * 4


@pytest.mark.parametrize("name", ["alone", "instance"])
def test_model_without_inputs_is_taken(factories: Path, name: str):
    assert resolve(f"{factories}:{name}").example_inputs is None


def test_factory_of_a_module_is_imported():
    found = resolve("torch.nn:Identity")

    assert isinstance(found.model, torch.nn.Identity)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no colon": ("factories", {}, "is not of the form path/to/file.py:factory, package.module:factory, zoo:NAME"),
    "no name": ("zoo:", {}, "is not of the form"),
    "no file": ("nowhere.py:f", {}, "model file nowhere.py does not exist"),
    "no module": ("no.such:f", {}, "no module named 'no'"),
    "attribute": ("FILE:pairs", {}, "has no 'pairs' (did you mean 'pair'?)"),
    "raises": ("FILE:fails", {}, "RuntimeError: no data\n  at FILE:20: raise RuntimeError"),
    "returns": ("FILE:number", {}, "returned a value of type int, and must return a model or (model, example_inputs)"),
    "class": ("FILE:kind", {}, "returned the class Linear instead of an instance, and must return a model or"),
    "class in pair": ("FILE:kind_and_input", {}, "returned a tuple of 2, whose first is the class Linear instead of"),
    "not an import": ("FILE:torhc", {}, "has no 'torhc' (reference"),
    "inputs": ("FILE:wrong_inputs", {}, "returned example inputs of type int"),
    "no function": ("FILE:value", {}, "is of type int, and must be a function"),
    "factory type": ("FILE:declared", {"overrides": {"width": "x"}}, "width is a whole number (now 8)"),
    "setting": ("FILE:pair", {"overrides": {"bach": "3"}}, "takes no 'bach' (did you mean 'batch'?)"),
    "zoo name": ("zoo:llama3-9b", {}, "no model of the zoo is called 'llama3-9b' (did you mean 'llama3-8b'?)"),
    "zoo setting": ("zoo:gpt2", {"overrides": {"layer": "3"}}, "has no 'layer' (did you mean 'layers'?)"),
    "zoo type": ("zoo:gpt2", {"overrides": {"layers": "x"}}, "layers is a whole number (now 12)"),
    "zoo heads": ("zoo:gpt2", {"overrides": {"heads": "7"}}, "hidden=768 is no multiple of heads=7"),
    "zoo zero": ("zoo:gpt2", {"overrides": {"layers": "0"}}, "needs a positive layers"),
    "zoo seq": ("zoo:gpt2", {"seq": 4096}, "longer than the 1024 positions"),
    "batch": ("zoo:gpt2", {"batch": 0}, "--batch 0 is no positive number"),
    "hf type": ("hf:lama", {}, "knows no model type 'lama' (did you mean 'llama'?)"),
    "hf hub": ("hf:meta-llama/Llama-3", {}, "models are not downloaded"),
    "hf setting": ("hf:llama", {"overrides": {"num_layers": "3"}}, "did you mean 'num_hidden_layers'?"),
    "hf value": ("hf:llama", {"overrides": {"num_hidden_layers": "q"}}, "num_hidden_layers is a whole number"),
    "hf seq": ("hf:llama", {"seq": 8192}, "--set max_position_embeddings=8192"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_reference_is_refused_with_the_way_out(factories: Path, name: str):
    reference, options, message = WRONG[name]

    with pytest.raises(UsageError) as caught:
        resolve(reference.replace("FILE", str(factories)), **options)

    assert message.replace("FILE", str(factories)) in str(caught.value)


def test_file_that_cannot_be_imported_names_its_line(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("def f(:\n")

    with pytest.raises(UsageError, match=r"SyntaxError[^\n]*\n  at .*broken\.py:1: def f\(:"):
        resolve(f"{file}:f")


def test_transformers_configuration_of_a_directory_is_read(tmp_path: Path):
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 128}
    config = {"model_type": "llama", "vocab_size": 128, "architectures": ["LlamaForSequenceClassification"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = resolve(f"hf:{tmp_path}", batch=4, seq=16, overrides={"num_hidden_layers": "3"})

    assert type(found.model).__name__ == "LlamaForSequenceClassification"
    assert isinstance(found.example_inputs, dict)
    assert {name: tuple(each.shape) for name, each in found.example_inputs.items()} == {
        "input_ids": (4, 16),
        "labels": (4,),
    }
    assert found.model.config.num_hidden_layers == 3
    assert found.tokens_per_step == 64


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no transformers configuration"), ("{}", "is no transformers configuration")]
)
def test_configuration_that_is_none_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(UsageError, match=message):
        resolve(f"hf:{tmp_path}")


def test_settings_derived_from_others_follow_overrides():
    model = resolve("hf:llama", overrides={"hidden_size": "512", "num_hidden_layers": "1"}).model

    assert model.config.head_dim == 16


@pytest.mark.parametrize("name", ["hf:bert", "hf:vit", "hf:t5"])
def test_models_of_transformers_are_on_meta(name: str):
    found = resolve(name)

    assert isinstance(found.example_inputs, dict)
    tensors = [*found.model.parameters(), *found.example_inputs.values()]
    assert {each.device.type for each in tensors} == {"meta"}
    assert "labels" in found.example_inputs


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hf:speech_to_text", {"input_features": (4, 128, 80), "labels": (4, 32)}),
        ("hf:parakeet_ctc", {"input_features": (4, 256, 80)}),
        ("hf:videomae", {"pixel_values": (4, 16, 3, 224, 224), "labels": (4,)}),
        ("hf:patchtst", {"past_values": (4, 32, 1), "future_values": (4, 24, 1)}),
    ],
)
def test_inputs_of_sound_videos_and_series_follow_the_configuration(name: str, wanted: dict[str, tuple[int, ...]]):
    found = resolve(name, batch=4, seq=32).example_inputs

    assert isinstance(found, dict)
    assert {each: tuple(tensor.shape) for each, tensor in found.items()} == wanted


def test_inputs_that_no_setting_tells_are_refused_with_the_way_out():
    with pytest.raises(
        UsageError, match=r"^hf:canine reads token ids, and its configuration has no vocab_size, .*factory"
    ):
        resolve("hf:canine", batch=4, seq=32)


def test_a_setting_that_a_configuration_keeps_as_another_is_set():
    model = resolve("hf:vit", overrides={"num_labels": "7", "num_hidden_layers": "1"}).model

    assert dict(model.named_parameters())["classifier.bias"].shape == (7,)
