"""Whether a model with few layers stands for one with many: what makes the capture of deep models quick."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.repetition import Repetition, repetition_of
from autopar.models.layer_work import does_the_same, layer_work

WORTH = 8
"""Layers from which it saves anything to capture fewer."""

_INDEX = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})
"""Attributes that only say the number of a layer. Where forward computes with it, captured layers differ."""

_DEPTHS = ("layers", "n_layer", "depth")
"""How the names of settings end that say how many layers there are."""


@dataclass(frozen=True, slots=True)
class Shallow:
    """A model like another one, with fewer layers."""

    model: nn.Module
    rows: Mapping[str, Repetition]
    """Paths of its rows of layers, and how many layers each has in the other model."""


@dataclass(frozen=True, slots=True)
class ShorterModels:
    """Models that may stand for `deep`, the shortest first, each made when it is asked for.

    `settings` is what `deep` was built from by `build`: an object whose attributes (and those of settings in it) say
    how many layers there are, and what each of them is. A second model has more layers at the borders of its rows, for
    what differs there in the program though the modules are the same. None stands for a model whose forward does more
    by number of layer than its modules tell.
    """

    deep: nn.Module
    inputs: Any
    settings: Any
    build: Callable[[Any], nn.Module]

    def __iter__(self) -> Iterator[Shallow]:
        rows = _rows(self.deep)
        work = layer_work(self.deep, self.inputs, rows) if rows else None
        for wanted in (rows, {path: row.with_margins() for path, row in rows.items()}):
            used = {path: row for path, row in wanted.items() if row.more > 0}
            if not used or work is None:
                return
            try:
                few = self.build(_with_fewer(self.settings, used.values()))
            except Exception:  # noqa: BLE001 - settings that do not stand being changed: the whole model is captured
                return
            found = shallow(self.deep, few, used)
            less = layer_work(found.model, self.inputs, rows) if found is not None else None
            if found is None or less is None or not does_the_same(work, less, found.rows):
                return
            yield found


def shallow(deep: nn.Module, few: nn.Module, rows: Mapping[str, Repetition]) -> Shallow | None:
    """Return `few` if it is `deep` with the fewest layers that stand for some of `rows`, and nothing else differs."""
    found: dict[str, Repetition] = {}
    if not _alike("", deep, few, rows, found) or not found:
        return None
    return Shallow(few, found)


def _rows(model: nn.Module) -> dict[str, Repetition]:
    """Return the rows of layers that repeat, by path, without rows that are in a layer of another."""
    found: dict[str, Repetition] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{row}.") for row in found)
        if isinstance(module, nn.ModuleList) and len(module) >= WORTH and not inside:
            row = repetition_of([_whole(each) for each in module])
            if row is not None:
                found[path] = row
    return found


def _with_fewer(settings: Any, rows: Iterable[Repetition]) -> Any:
    """Return a copy of settings in which what says the layers of a row, or one thing of each, says it of the fewest."""
    by_layers: dict[int, Repetition] = {}
    for row in rows:
        by_layers.setdefault(row.layers, row)
    less = copy.deepcopy(settings)
    for part in _parts(less):
        for name, value in list(vars(part).items()):
            if isinstance(value, int) and value in by_layers and name.endswith(_DEPTHS):
                setattr(part, name, by_layers[value].few)
            elif isinstance(value, list | tuple) and len(value) in by_layers and not name.startswith("_"):
                setattr(part, name, type(value)(by_layers[len(value)].kept(value)))
    return less


def _parts(settings: Any) -> Iterator[Any]:
    """Yield settings and the configurations of transformers in them (of a tower, say)."""
    yield settings
    for value in vars(settings).values():
        if hasattr(value, "model_type") and hasattr(value, "__dict__"):
            yield from _parts(value)


def _alike(
    path: str, deep: nn.Module, few: nn.Module, rows: Mapping[str, Repetition], found: dict[str, Repetition]
) -> bool:
    if _own(deep) != _own(few):
        return False
    ours, theirs = dict(deep.named_children()), dict(few.named_children())
    if path in rows and len(theirs) == rows[path].few:
        found[path] = rows[path]
        return rows[path].kept([_whole(each) for each in ours.values()]) == [_whole(each) for each in theirs.values()]
    if ours.keys() != theirs.keys():
        return False
    return all(_alike(f"{path}.{name}".lstrip("."), ours[name], theirs[name], rows, found) for name in ours)


def _whole(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Return what a module and all in it are."""
    return tuple((path, _own(each)) for path, each in module.named_modules())


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
