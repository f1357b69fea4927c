"""What each layer of a model does, seen in forward without values: whether few layers do what many do.

Modules that look the same may not do the same (the states of some layers are read, a layer computes by its number). So
operators of a forward pass on meta are noted with the layer that they run in and the layers that made what they read;
those of a deep model must be those of the short one with the layers between repeated.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar._torch import TorchDispatchMode, pytree
from autopar.ir.repetition import Repetition

_OUTSIDE = ("", 0)

_MARK = "_autopar_layer"
"""Attribute of a tensor: the layer that made it, by its row's path and its number there."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A tensor that an operator reads, and the layer that made it."""

    kind: tuple[Any, ...]
    layer: tuple[str, int]


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Operators of a forward pass in order, by the layer that they run in."""

    operators: dict[tuple[str, int], list[tuple[Any, ...]]] = field(default_factory=dict)

    def in_layer(self, layer: tuple[str, int], rows: Mapping[str, tuple[Repetition, int]]) -> list[Any]:
        """Return what a layer does, layers told by their distance or by their place in the row.

        `rows`: how each row repeats, and how many layers it has here.
        """
        return [
            tuple(_from(each, layer, rows) if isinstance(each, _Read) else each for each in operator)
            for operator in self.operators.get(layer, ())
        ]


def layer_work(model: nn.Module, inputs: Any, rows: Mapping[str, Repetition]) -> LayerWork | None:
    """Return what the layers of rows, told by their paths, do; `None` if it takes values to say."""
    try:
        own = copy.deepcopy(model)  # forward may leave something in a module
        noting = _Noting()
        with _unnoticed(), _telling_layers(own, rows, noting), torch.no_grad(), noting:
            own(**inputs) if isinstance(inputs, Mapping) else own(*inputs)
    except Exception:  # noqa: BLE001 - the model's own Python, on tensors that have no values
        return None
    return noting.found


def does_the_same(deep: LayerWork, few: LayerWork, rows: Mapping[str, Repetition]) -> bool:
    """Return whether a model does what one with few layers does, those between the border ones over and over."""
    ours = {path: (row, row.layers) for path, row in rows.items()}
    theirs = {path: (row, row.few) for path, row in rows.items()}
    pairs = [(_OUTSIDE, _OUTSIDE)]
    for path, row in rows.items():
        pairs += [((path, number), (path, row.stand_in(number))) for number in range(row.layers)]
    return all(deep.in_layer(one, ours) == few.in_layer(other, theirs) for one, other in pairs)


def _from(read: _Read, layer: tuple[str, int], rows: Mapping[str, tuple[Repetition, int]]) -> tuple[Any, ...]:
    """Return what is read, as it is equal in rows of any length."""
    path, number = read.layer
    row, layers = rows[path] if path else (Repetition(0), 0)
    if path == layer[0] and number >= row.before:
        return (*read.kind, "away", number - layer[1])
    if not path or number < row.before + row.period:
        return (*read.kind, path, number)
    if number >= layers - row.behind - row.period:
        return (*read.kind, path, number - layers)
    return (*read.kind, object())  # the midst of a row is equal to nothing


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators, with the layer that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = LayerWork()
        self.running = [_OUTSIDE]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, note it, and mark what it made."""
        flat, _ = pytree.tree_flatten((args, kwargs or {}))
        noted = [_read(each) if _is(each) else each for each in flat]
        made = _without_values(func, args, kwargs or {})
        for each in filter(_is, pytree.tree_leaves(made)):
            setattr(each, _MARK, self.running[-1])
        self.found.operators.setdefault(self.running[-1], []).append((str(func), *noted))
        return made


def _read(tensor: torch.Tensor) -> _Read:
    return _Read((tensor.shape, tensor.dtype), getattr(tensor, _MARK, _OUTSIDE))


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes of tensors on meta; a number that is read of one is any."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return torch.ones((), dtype=args[0].dtype).item()
    if func is torch.ops.aten._grouped_mm.default:  # its meta kernel knows one type
        short = [each.bfloat16() if _is(each) and each.is_floating_point() else each for each in args]
        return func(*short, **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Leave no warning, no line in a log, and the random numbers of others as they are."""
    below = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(below)


@contextmanager
def _telling_layers(model: nn.Module, rows: Mapping[str, Repetition], noting: _Noting) -> Iterator[None]:
    """Tell `noting` which layer of the rows runs."""
    handles = []
    for path in rows:
        for number, layer in enumerate(model.get_submodule(path).children()):
            place = (path, number)
            handles.append(layer.register_forward_pre_hook(lambda *_, place=place: noting.running.append(place)))
            handles.append(layer.register_forward_hook(lambda *_: noting.running.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
