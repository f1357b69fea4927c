"""A referenced model with values, to be run: parameters as their modules draw them, example inputs at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.models import hf, zoo
from autopar.models.reference import resolve


def resolve_with_values(
    reference: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    overrides: Mapping[str, str] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]:
    """Return the model that a reference names in the CPU's memory, and an example batch; a seed gives equal ones.

    Token ids, images and labels of `zoo:` and `hf:` models are drawn within what the model can read. A user's factory
    gives both itself.

    Raises:
        UsageError: the reference names nothing, or a factory gives no inputs, or tensors without values.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    settings = dict(overrides or {})
    head, _, tail = reference.partition(":")
    if head == "zoo":
        shapes = zoo.build(tail, batch=batch, seq=seq, overrides=settings)[1]
        wanted: Any = zoo.settings_of(tail, settings)
        classes = getattr(wanted, "vocab", 0) or getattr(wanted, "classes", 0)
        model = wanted.model().train()
        return model, tuple(_drawn(each, classes, generator) for each in shapes)
    if head == "hf":
        made = hf.build(hf.load_config(tail, settings), device="cpu")
        specs = hf.inputs(made, batch, seq)
        drawn: dict[str, Any] = {name: spec.random(generator) for name, spec in specs.items()}
        return made, drawn | hf.plain_arguments(made)
    found = resolve(reference, batch=batch, seq=seq, overrides=settings)
    inputs = found.example_inputs
    if inputs is None:
        raise UsageError(f"{reference} gives a model alone; to be run it must return (model, example_inputs)")
    given = inputs.values() if isinstance(inputs, dict) else inputs
    empty = [name for name, each in _named(found.model, given) if each.is_meta]
    if empty:
        raise UsageError(
            f"{reference}: {', '.join(empty[:4])}{' ...' if len(empty) > 4 else ''} on the meta device, without "
            "values; to be run, the factory must return tensors in memory"
        )
    return found.model, inputs


def _drawn(like: torch.Tensor, values: int, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return torch.randint(max(values, 1), like.shape, generator=generator, dtype=like.dtype)


def _named(model: nn.Module, inputs: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    return [
        *model.named_parameters(),
        *model.named_buffers(),
        *((f"example input {place}", each) for place, each in enumerate(tensors)),
    ]
