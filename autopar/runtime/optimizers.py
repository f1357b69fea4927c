"""Optimizers made before the parameters were placed, as when planning waits for the first call."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_REPLACED: WeakKeyDictionary[torch.Tensor, torch.Tensor] = WeakKeyDictionary()
_HOOKS: list[Any] = []


def replace_in_optimizers(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let every optimizer that holds parameter `old` hold `new` from its next step on."""
    _REPLACED[old] = new
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_follow))


def _follow(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Exchange the parameters of an optimizer that is about to step."""
    del args, kwargs
    for group in optimizer.param_groups:
        group["params"] = [_newest(each) for each in group["params"]]
    for held in [each for each in optimizer.state if each in _REPLACED]:
        del optimizer.state[held]  # made for whole tensors, before the first step of the new ones


def _newest(parameter: torch.Tensor) -> torch.Tensor:
    """Return what stands for a parameter by now; it may have been replaced more than once."""
    while parameter in _REPLACED:
        parameter = _REPLACED[parameter]
    return parameter
