"""Running a captured program on real values, for comparison with the model it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured


@dataclass(frozen=True)
class Ran:
    """What one run of the joint graph gave."""

    result: Any
    """The model's return value, rebuilt."""

    gradients: Mapping[str, torch.Tensor | None]
    """By parameter name or input path."""

    mutations: Mapping[str, torch.Tensor]
    """New values by buffer name or input path."""


def run(
    captured: Captured, model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Ran:
    """Run the joint graph on the model's own values; scalar outputs get the tangent 1, others 0."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    inputs = captured.call.flatten(args, kwargs or {})
    values: list[torch.Tensor] = []
    for each in captured.placeholders:
        match each.kind:
            case "parameter":
                values.append(parameters[each.target].detach())
            case "buffer":
                values.append(buffers[each.target].clone())
            case "constant":
                values.append(captured.constants[each.name])
            case "input":
                values.append(inputs[each.index].detach())
            case "tangent":
                meta = captured.graph.by_name[each.name].outputs[0]
                assert meta is not None
                values.append(torch.full(meta.shape, 0.0 if meta.shape else 1.0, dtype=getattr(torch, meta.dtype)))
    with torch.no_grad():
        found = captured.joint(*values)
    names = {each.name: each.target for each in captured.placeholders}
    outputs = captured.graph.outputs
    assert len(found) == len(outputs)
    return Ran(
        captured.result.rebuild([value for value, each in zip(found, outputs, strict=True) if each.kind == "output"]),
        {names[e.name]: value for value, e in zip(found, outputs, strict=True) if e.kind == "gradient"},
        {names[e.name]: value for value, e in zip(found, outputs, strict=True) if e.kind == "mutation"},
    )
