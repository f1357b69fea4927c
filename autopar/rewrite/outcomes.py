"""What an operator makes of tensors of given shapes and strides, found once and made again for each equal call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensorMode, fake_on, is_plain_fake, storage_key

_KNOWN_OF = frozenset({"aten", "autopar", "autopar_experts", "autopar_ops", "prims", "_c10d_functional"})
"""Namespaces whose results depend on nothing but what is given: a user's operator may read what it likes."""

_MOST = 100_000
"""Calls that are remembered; then all are forgotten."""


@dataclass(frozen=True, slots=True)
class _Made:
    """One tensor among the results of a call."""

    given: int | None
    """Which tensor among the arguments it shares its memory with, none if it has its own."""

    itself: bool
    """Whether it is that argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


_known: dict[tuple[Any, ...], Any] = {}
"""By operator and form of its arguments, what is made: a `_Made`, or a tuple or list of them."""


def called(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode) -> Any:
    """Return what a node's operator makes of fake tensors, as the mode says where it was not asked before.

    Programs repeat their layers, and ranks each other's programs: a fake tensor's own dispatch takes most of a
    rewriting otherwise. Fresh results have memory of their own, views share that of the argument they are views of.
    """
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _KNOWN_OF or target._schema.is_mutable:
        return _asked(target, args, kwargs, mode)
    tensors: list[torch.Tensor] = []
    try:
        described = _key(args, tensors), _key(tuple(kwargs.items()), tensors)
    except _Unknown:
        return _asked(target, args, kwargs, mode)
    memories = [storage_key(each) for each in tensors]
    shared = tuple((memories.index(storage_key(each)), each.untyped_storage().nbytes()) for each in tensors)
    key = target, torch.get_default_dtype(), *described, shared
    known = _known.get(key)
    if known is not None:
        return _again(known, tensors, mode)
    made = _asked(target, args, kwargs, mode)
    try:
        outcome = _outcome(made, tensors, set())
    except _Unknown:
        return made
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = outcome
    return made


def _asked(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode) -> Any:
    with mode:
        return target(*args, **kwargs)


class _Unknown(Exception):  # noqa: N818
    """What is given or made is nothing that can be described."""


def _key(given: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what tells arguments apart, and append their tensors; numbers of unlike types are not equal."""
    if isinstance(given, torch.Tensor):
        if not is_plain_fake(given):
            raise _Unknown
        tensors.append(given)
        return (*_form(given), given.device)
    if isinstance(given, tuple | list):
        return (type(given), *(_key(each, tensors) for each in given))
    if given is None or type(given) in _PLAIN:
        return (type(given), given)
    raise _Unknown


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _outcome(made: Any, tensors: Sequence[torch.Tensor], fresh: set[int]) -> Any:
    """Return the description of what was made; `fresh` notes memory that no argument has."""
    if isinstance(made, tuple | list):
        if type(made) not in (tuple, list):
            raise _Unknown
        return type(made)(_outcome(each, tensors, fresh) for each in made)
    if not isinstance(made, torch.Tensor) or not is_plain_fake(made):
        raise _Unknown
    shape, stride, offset, dtype = _form(made)
    given = next((i for i, each in enumerate(tensors) if storage_key(each) == storage_key(made)), None)
    if given is None:
        alone = torch.empty_strided(shape, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
        if offset or made.untyped_storage().nbytes() != alone or storage_key(made) in fresh:
            raise _Unknown
        fresh.add(storage_key(made))
    elif tensors[given].dtype != dtype:
        raise _Unknown
    same = next((i for i, each in enumerate(tensors) if each is made), None)
    return _Made(given if same is None else same, same is not None, shape, stride, offset, dtype, made.device)


def _again(outcome: Any, tensors: Sequence[torch.Tensor], mode: FakeTensorMode) -> Any:
    """Return the results that a description tells of, made anew of these arguments."""
    if isinstance(outcome, tuple | list):
        return type(outcome)(_again(each, tensors, mode) for each in outcome)
    if outcome.given is None:
        return fake_on(mode, outcome.device, outcome.shape, outcome.stride, outcome.dtype)
    base = tensors[outcome.given]
    if outcome.itself:
        return base
    return fake_on(
        mode, outcome.device, outcome.shape, outcome.stride, outcome.dtype, base.untyped_storage(), outcome.offset
    )
