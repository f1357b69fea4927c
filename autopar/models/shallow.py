"""Whether a model with few layers stands for one with many: what makes the capture of deep models quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

FEW = 3
"""Layers of the model that stands for deeper ones: one at each border, and one between them."""

WORTH = 8
"""Layers from which it saves anything to capture fewer."""

_INDEX = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})
"""Attributes that only say the number of a layer. Where forward computes with it, captured layers differ."""


@dataclass(frozen=True, slots=True)
class Shallow:
    """A model like another one, with fewer layers."""

    model: nn.Module
    rows: Mapping[str, int]
    """Paths of its rows of layers, and how many layers each has in the other model."""


def shallow(deep: nn.Module, few: nn.Module) -> Shallow | None:
    """Return `few` if it is `deep` with fewer layers of equal modules in some rows, and nothing else differs."""
    rows: dict[str, int] = {}
    if not _alike("", deep, few, rows) or not rows:
        return None
    return Shallow(few, rows)


def _alike(path: str, deep: nn.Module, few: nn.Module, rows: dict[str, int]) -> bool:
    if _own(deep) != _own(few):
        return False
    ours, theirs = dict(deep.named_children()), dict(few.named_children())
    if isinstance(deep, nn.ModuleList) and len(ours) > len(theirs) == FEW:
        kinds = [_whole(each) for each in (*deep, *theirs.values())]
        if any(kind != kinds[0] for kind in kinds):
            return False
        rows[path] = len(ours)
        return True
    if ours.keys() != theirs.keys():
        return False
    return all(_alike(f"{path}.{name}".lstrip("."), ours[name], theirs[name], rows) for name in ours)


def _whole(module: nn.Module) -> list[tuple[str, object]]:
    """Return what a module and all in it are."""
    return [(path, _own(each)) for path, each in module.named_modules()]


def _own(module: nn.Module) -> object:
    """Return what a module itself is: its class, its plain attributes, sizes of its own tensors."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if key not in _INDEX and isinstance(value, bool | int | float | str | tuple | torch.dtype | None)
    }
    tensors = {
        name: each is not None and (each.shape, each.dtype, each.requires_grad)
        for name, each in (*module._parameters.items(), *module._buffers.items())
    }
    return type(module), sorted(plain.items(), key=lambda item: item[0]), tensors
