"""Embedding bags of equal size as look-ups and sums or maxima, for which every split has a rule.

`torch.nn.functional.embedding_bag` on indices [bags, size] hands its kernel one list of indices and where each bag
begins: of these a rank's part would begin elsewhere. As `embedding(...)` [bags, size, width] and a sum over `size` the
bags are a dimension like any other; the rows that are looked up are then held, which the kernel would not do.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_SIGNATURE = inspect.signature(functional.embedding_bag)


def open_bags(graph: fx.GraphModule) -> int:
    """Replace embedding bags of equal size in a graph of Dynamo's by look-ups and sums or maxima; return how many.

    Bags that differ in size, clip norms, count frequencies or have sparse gradients stay as they are.
    """
    opened = 0
    for node in graph.graph.find_nodes(op="call_function", target=functional.embedding_bag):
        given = _SIGNATURE.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        call: dict[str, Any] = given.arguments
        indices = call["input"].meta.get("example_value")
        if not isinstance(indices, torch.Tensor) or indices.dim() != 2:
            continue
        if call["sparse"] or call["scale_grad_by_freq"] or call["max_norm"] is not None:
            continue
        node.target = _bags
        names = ("input", "weight", "mode", "per_sample_weights", "padding_idx")
        node.args, node.kwargs = tuple(call[name] for name in names), {}
        opened += 1
    if opened:
        graph.recompile()
    return opened


def _bags(
    indices: torch.Tensor,
    table: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None,
    padding: int | None,
) -> torch.Tensor:
    """Return the sum, mean or maximum of each bag's rows [bags, width]; indices equal to `padding` do not count."""
    place = None if padding is None else padding % table.shape[0]
    rows = functional.embedding(indices, table, place)
    counted = None if place is None else indices != place
    if weights is not None:
        rows = rows * weights[..., None]
    if mode == "max":
        return _maxima(rows, counted)
    if counted is not None:
        rows = rows * counted[..., None]
    if mode == "sum":
        return rows.sum(1)
    return rows.mean(1) if counted is None else rows.sum(1) / counted.sum(1, keepdim=True).clamp(min=1)


def _maxima(rows: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """Return the maxima over each bag's rows that count, 0 of a bag without any."""
    if counted is None:
        return rows.max(1).values
    among = rows.masked_fill(~counted[..., None], -math.inf)
    return among.max(1).values.masked_fill(~counted.any(1, keepdim=True), 0)
