"""Caches of transformers, which `generate` hands to every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import UsageError

transformers = pytest.importorskip("transformers")


class Decoder(nn.Linear):
    def forward(self, x: torch.Tensor, past_key_values: object = None) -> torch.Tensor:
        return super().forward(x).sum()


def test_a_cache_as_input_is_refused_with_the_way_out():
    inputs = {"x": torch.randn(2, 4), "past_key_values": transformers.DynamicCache()}

    with pytest.raises(UsageError, match=r"past_key_values is of type DynamicCache.*use_cache=False, of generate\(\)"):
        capture(Decoder(4, 4), inputs)
