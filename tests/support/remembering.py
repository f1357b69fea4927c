"""Programs that many tests plan or compile, captured once a process.

A capture takes longer than a small model's plan, rewriting and steps together, and tests of many wishes for one
model ask for the same program again and again. `autopar.capture.capture` itself is what it always is: its own tests,
and whoever calls it, capture anew.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch
from torch import nn

import autopar.api
import autopar.api.compiling
from autopar.capture import Captured

_MOST = 64
"""Programs that are kept; the oldest goes first."""

_captured_for = autopar.api.captured_for
_known: dict[bytes, tuple[Captured, str]] = {}


def remember_programs() -> None:
    """Let `autopar.plan` and `autopar.compile` take a program that this process has captured before."""
    autopar.api.captured_for = _remembered
    autopar.api.compiling.captured_for = _remembered


def _remembered(model: nn.Module, example_inputs: Any, precision: str, **how: bool) -> Captured:
    """Return the program of a model whose every attribute, hook and value equals those of one known, or capture it.

    It is captured anew if a compilation has written into it, as it may into a program of its own, and always for models
    that hold tensors outside of their parameters and buffers: these are read when the program runs.
    """
    key = _key(model, example_inputs, precision, how)
    if key is None:
        return _captured_for(model, example_inputs, precision, **how)
    if key in _known:
        found, code = _known[key]
        if found.joint.code == code:
            return found
    found = _captured_for(model, example_inputs, precision, **how)
    if not found.constants:
        _known[key] = found, found.joint.code
        if len(_known) > _MOST:
            del _known[next(iter(_known))]
    return found


class _Writer(pickle.Pickler):
    """Writes what is asked for, equal tensors alike wherever they lie."""

    def __init__(self, to: io.BytesIO) -> None:
        super().__init__(to)
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def persistent_id(self, found: Any) -> Any:
        """Return a tensor's number if it was there before, else all that a capture can see of it."""
        if not isinstance(found, torch.Tensor):
            return None
        if type(found) not in (torch.Tensor, nn.Parameter) or found.layout != torch.strided:
            raise pickle.PicklingError(f"a tensor of type {type(found).__name__}")
        if id(found) in self._tensors:
            return self._tensors[id(found)]
        self._tensors[id(found)] = len(self._tensors)
        storage = self._storages.setdefault(found.untyped_storage()._cdata, len(self._storages))
        form = (type(found), found.dtype, found.device, found.shape, found.stride(), found.storage_offset())
        told = (form, found.requires_grad, found.is_leaf, storage, vars(found))
        if found.is_meta:
            return told
        return *told, found.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _key(*asked: Any) -> bytes | None:
    """Return what tells programs apart; none if what is asked for cannot be written down (classes in functions)."""
    state = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    written = io.BytesIO()
    try:
        _Writer(written).dump((asked, state))
    except (AttributeError, TypeError, pickle.PicklingError, RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(written.getvalue()).digest()
