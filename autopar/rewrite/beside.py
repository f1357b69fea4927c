"""Operators put beside others in a local program, with what they make on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from autopar._torch import pytree


def beside(node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Insert an operator before `node`, with the value that it makes on fake tensors."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = {key: value for key, value in node.meta.items() if key not in {"val", "local_shape"}}
    values = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
    with _mode(new.all_input_nodes), torch.no_grad():
        new.meta["val"] = target(*values[0], **values[1])
    return new


def _mode(nodes: Iterable[fx.Node]) -> Any:
    values = (each for node in nodes for each in pytree.tree_leaves(node.meta["val"]))
    fake: Any = next(each for each in values if isinstance(each, torch.Tensor))
    return fake.fake_mode
