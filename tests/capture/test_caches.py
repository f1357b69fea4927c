"""Caches of transformers, which `generate` hands to every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError, UsageError

transformers = pytest.importorskip("transformers")


class Decoder(nn.Linear):
    def forward(self, x: torch.Tensor, past_key_values: object = None) -> torch.Tensor:
        return super().forward(x).sum()


def test_a_cache_as_input_is_refused_with_the_way_out():
    inputs = {"x": torch.randn(2, 4), "past_key_values": transformers.DynamicCache()}

    with pytest.raises(UsageError, match=r"past_key_values is of type DynamicCache.*use_cache=False, of generate\(\)"):
        capture(Decoder(4, 4), inputs)


def tiny(use_cache: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, use_cache=use_cache,
    )  # fmt: skip
    tokens = torch.randint(64, (2, 8))
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def test_a_cache_that_only_the_configuration_asks_for_is_not_returned():
    model, inputs = tiny(use_cache=True)

    captured, plain = capture(model, inputs), capture(*tiny(use_cache=False))

    assert captured.graph.fingerprint == plain.graph.fingerprint
    assert captured.result.names() == plain.result.names()
    assert model.config.use_cache  # generate reads it


def test_a_cache_that_the_call_asks_for_is_refused():
    model, inputs = tiny(use_cache=False)

    with pytest.raises(CaptureError, match="neither a tensor nor a container"):
        capture(model, inputs | {"use_cache": True})
