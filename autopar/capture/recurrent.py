"""Recurrent networks as one operator a layer, where torch would unroll them over the steps of a sequence.

    lstm(x, (h, c), weights, num_layers=2)   →   lstm_layer(x, h[0], c[0], weights[0])   dropout   lstm_layer(...)

Sequences of unlike lengths (`pack_padded_sequence`) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.nn import functional

from autopar.capture.autocasting import as_products_read
from autopar.own_recurrence import LSTM_LAYER, RNN_LAYER, Kind

_NETWORKS: dict[Kind, Callable[..., Any]] = {kind: getattr(torch, kind) for kind in get_args(Kind)}


@contextmanager
def layer_by_layer(graph: fx.GraphModule) -> Iterator[None]:
    """Let recurrent networks of a graph of Dynamo become operators of a layer where it is differentiated here."""
    mine = {network: partial(_layers, kind) for kind, network in _NETWORKS.items()}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in mine:
            node.target = mine[node.target]
    graph.recompile()
    with ExitStack() as stack:
        for kind, network in _NETWORKS.items():
            stack.enter_context(patch.object(torch, kind, mine[network]))
        yield


def _layers(kind: Kind, input: Tensor, second: Any, *rest: Any) -> tuple[Tensor, ...]:
    """Return what the network makes; `rest` is what torch's function takes behind the states."""
    if isinstance(second, Tensor) and second.dim() == 1:  # a batch of sequences of unlike lengths
        made: tuple[Tensor, ...] = _NETWORKS[kind](input, second, *rest)
        return made
    weights, biased, layers, dropout, train, both, batch_first = rest
    states: Sequence[Tensor] = second if kind == "lstm" else (second,)
    # On GPUs these networks run in 16 bits under autocast.
    input, states, weights = as_products_read(input), *([*map(as_products_read, each)] for each in (states, weights))
    directions = 2 if both else 1
    each = len(weights) // layers
    last: list[Sequence[Tensor]] = []
    for layer in range(layers):
        begun = [state[layer * directions : (layer + 1) * directions] for state in states]
        own = list(weights[layer * each : (layer + 1) * each])
        input, *ended = (LSTM_LAYER if kind == "lstm" else RNN_LAYER)(input, begun, own, kind, biased, batch_first)
        last.append(ended)
        if dropout and train and layer < layers - 1:
            input = functional.dropout(input, dropout)
    return input, *(torch.cat(list(found)) if layers > 1 else found[0] for found in zip(*last, strict=True))
