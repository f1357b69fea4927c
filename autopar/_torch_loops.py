"""What torch's functions that training loops call ask of private ones of torch: norms, states of checkpoints."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils import clip_grad

_BEHIND = "_autopar_behind"
"""Attribute of a function put before one of torch's: that one."""

_Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function that stands before another out of that."""


def norm_of_many() -> Callable[..., Any]:
    """Return torch's own function for the norm of many tensors, whatever was put before it."""
    return _own(clip_grad._get_total_norm)


def put_before_norm_of_many(make: _Make) -> None:
    """Let `torch.nn.utils` take the norm of many tensors by `make(torch's own function)` from now on; once is enough.

    `clip_grad_norm_` looks the function up at every call, wherever it was imported; `get_total_norm` is that function,
    so that a name bound to it before remains torch's own.
    """
    if _put_before(clip_grad, "_get_total_norm", make):
        setattr(torch.nn.utils, "get_total_norm", clip_grad._get_total_norm)  # noqa: B010


def clipping_call() -> Mapping[str, Any] | None:
    """Return the variables of torch's `clip_grad_norm_` where it is what asks for a norm, `None` where another does."""
    frame = sys._getframe(1)
    for _ in range(4):  # through the wrappers of no_grad
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is inspect.unwrap(clip_grad.clip_grad_norm_).__code__:
            return frame.f_locals
    return None


def put_before_optimizer_states(make: _Make, make_unflattening: _Make) -> None:
    """Let `torch.distributed.checkpoint` return states of optimizers, and read flattened ones, by what these make.

    Of torch's own `function(model, optimizers, info)`, and of `function(optimizer, state_dict, info)`, which returns
    what `optimizer.load_state_dict` takes; `info` has the user's `StateDictOptions`.
    """
    from torch.distributed.checkpoint import state_dict

    _put_before(state_dict, "_get_optim_state_dict", make)
    _put_before(state_dict, "_unflatten_optim_state_dict", make_unflattening)


def _own(found: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(found, _BEHIND, found)


def _put_before(module: Any, name: str, make: _Make) -> bool:
    """Put what `make` makes of a module's function in its place, if nothing is there yet; return whether it was."""
    found = getattr(module, name)
    if _own(found) is not found:
        return False
    made = make(found)
    setattr(made, _BEHIND, found)
    setattr(module, name, made)
    return True
