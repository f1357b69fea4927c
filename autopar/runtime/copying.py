"""Copies of a tree of modules that hold the same tensors, with or without what takes part in the modules' calls."""

from __future__ import annotations

from collections import OrderedDict
from types import MethodType

from torch import nn


def copy_tree(module: nn.Module, memo: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of the tree of modules that holds the same tensors; shared modules stay shared."""
    if id(module) in memo:
        return memo[id(module)]
    made: nn.Module = object.__new__(type(module))
    memo[id(module)] = made
    made.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers"):
        made.__dict__[table] = dict(module.__dict__[table])
    made.__dict__["_modules"] = {
        name: None if child is None else copy_tree(child, memo) for name, child in module._modules.items()
    }
    return made


_OF_A_CALL = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Tables of a module by which hooks take part in its calls."""


_ADDED_HOOKS = (*_OF_A_CALL, "_backward_hooks", "_backward_pre_hooks")
"""Tables by which hooks act on a module's calls, and on the backward of these."""


def hooks_of(module: nn.Module) -> set[int]:
    """Return the numbers of a module's hooks, which no two hooks share."""
    return {key for table in _ADDED_HOOKS for key in module.__dict__[table]}


def without_own_calls(copied: nn.Module) -> nn.Module:
    """Return a copied module without its own hooks and its own `forward`, both of which the captured program runs.

    Hooks that the user adds to the copy act on it alone, around the program.
    """
    for table in _OF_A_CALL:
        copied.__dict__[table] = OrderedDict()
    copied.__dict__.pop("forward", None)
    return copied


def with_own_calls(copied: nn.Module, model: nn.Module) -> nn.Module:
    """Return a copied module with the hooks of `model`, and its `forward` if that is the instance's own."""
    for table in _OF_A_CALL:
        copied.__dict__[table] = model.__dict__[table]
    own = model.__dict__.get("forward")
    if own is not None:
        bound_to_it = isinstance(own, MethodType) and own.__self__ is model
        copied.__dict__["forward"] = MethodType(own.__func__, copied) if bound_to_it else own
    return copied
