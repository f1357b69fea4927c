"""Embedding bags of equal size as look-ups and sums, for which every split has a rule.

`torch.nn.functional.embedding_bag` on indices [bags, size] hands its kernel one list of indices and where each bag
begins: of these a rank's part would begin elsewhere. As `embedding(...)` [bags, size, width] and a sum over `size` the
bags are a dimension like any other; the rows that are looked up are then held, which the kernel would not do.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_SIGNATURE = inspect.signature(functional.embedding_bag)


def open_bags(graph: fx.GraphModule) -> int:
    """Replace embedding bags of equal size in a graph of Dynamo's by look-ups and sums; return how many.

    Bags that differ in size, take maxima, clip norms, count frequencies or have sparse gradients stay as they are.
    """
    opened = 0
    for node in graph.graph.find_nodes(op="call_function", target=functional.embedding_bag):
        given = _SIGNATURE.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        call: dict[str, Any] = given.arguments
        indices = call["input"].meta.get("example_value")
        if not isinstance(indices, torch.Tensor) or indices.dim() != 2 or call["mode"] not in {"sum", "mean"}:
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
    """Return the sum or mean of each bag's rows [bags, width]; indices equal to `padding` do not count."""
    place = None if padding is None else padding % table.shape[0]
    rows = functional.embedding(indices, table, place)
    counted = None if place is None else indices != place
    if weights is not None:
        rows = rows * weights[..., None]
    if counted is not None:
        rows = rows * counted[..., None]
    if mode == "sum":
        return rows.sum(1)
    return rows.mean(1) if counted is None else rows.sum(1) / counted.sum(1, keepdim=True).clamp(min=1)
