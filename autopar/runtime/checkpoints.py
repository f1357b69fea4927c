"""Optimizers in `torch.distributed.checkpoint`, where a rank has the parameters of some pipeline stages only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from autopar._torch_loops import put_before_optimizer_states
from autopar.runtime.module import runner_of
from autopar.runtime.optimizer_errors import optimizer_state_not_flat


def keep_optimizer_states(model: nn.Module) -> None:
    """Let torch make and read states of optimizers of a model with stages only as they can be saved, from now on."""
    if _staged(model):
        put_before_optimizer_states(_flat_only, _with_empty_groups)


def _staged(model: nn.Module) -> bool:
    runner = runner_of(model)
    return runner is not None and runner.pipeline is not None and runner.pipeline.depth > 1


def _flat_only(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function that refuses states in which a group has the names of its parameters in one list.

    Every rank saves such a list under one name, that of its own stages: one of them is kept, and loaded by all.
    """

    @functools.wraps(own)
    def state_of(model: Any, optimizers: Any, info: Any) -> Any:
        if info.handle_optim and not (info.flatten_optimizer_state_dict or info.full_state_dict) and _staged(model):
            raise optimizer_state_not_flat()
        return own(model, optimizers, info)

    return state_of


def _with_empty_groups(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function that leaves groups of which this rank has no parameter as the optimizer has them.

    Torch takes the settings of a group from those saved for its first parameter.
    """

    @functools.wraps(own)
    def unflattened(optimizer: Any, state_dict: Any, info: Any) -> Any:
        groups = optimizer.param_groups
        others = SimpleNamespace(param_groups=[each for each in groups if each["params"]], state=optimizer.state)
        found = own(others, state_dict, info)
        loaded = iter(found["param_groups"])
        found["param_groups"] = [next(loaded) if each["params"] else {**each, "params": []} for each in groups]
        return found

    return unflattened
