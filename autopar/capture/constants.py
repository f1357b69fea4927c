"""Values of tensors that forward makes of nothing but numbers: Python may ask for them, as they are the same always.

    positions = torch.arange(12)[None]
    if (positions.diff() != 1).any(): ...      # no: no input, parameter or random number is part of it

Dynamo has shapes of tensors only, and calls every such question one about data. What is asked for is computed here,
from the graph as far as it has been traced, on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopar._torch import TorchDispatchMode, is_fake, pytree, storage_key

_LARGEST = 1 << 27
"""Numbers of the largest tensor that is computed for an answer: positions of a batch of as many tokens, a GiB."""

_MOST = 1000
"""Operators that are computed for an answer."""

_WRITES = frozenset(
    {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior}
    | {operator.ixor, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul}
    | {operator.ilshift, operator.irshift}
)
_UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def value_of(node: fx.Node) -> torch.Tensor | None:
    """Return the value of a tensor in a graph of Dynamo's that nothing but numbers makes; `None` for any other.

    Whatever has written to it or to what it was made of by now is computed, too.
    """
    needed = _needed(node)
    if needed is None:
        return None
    values: dict[fx.Node, Any] = {}
    last = {read: each for each in needed for read in each.all_input_nodes}
    try:
        with torch.no_grad(), _Determined():  # type: ignore[no-untyped-call]
            for each in needed:
                args, kwargs = fx.map_arg((each.args, each.kwargs), lambda read: values[read])
                if each.op == "call_method":
                    values[each] = getattr(args[0], str(each.target))(*args[1:], **kwargs)
                else:
                    values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
                for read in each.all_input_nodes:
                    if last[read] is each and read is not node:
                        values.pop(read, None)
    except Exception:  # noqa: BLE001 - drawn, undefined, or no operator of real tensors
        return None
    found = values[node]
    return found if isinstance(found, torch.Tensor) and not is_fake(found) else None


def _needed(node: fx.Node) -> list[fx.Node] | None:
    """Return what has to be computed for a node, in order; `None` where an input is part of it, or it is too large."""
    needed: set[fx.Node] = set()
    if not _add([node], needed):
        return None
    writes = [each for each in node.graph.nodes if is_write(each)]
    while True:
        held = set().union(*(_storages(each) for each in needed))
        late = [each for each in writes if each not in needed and held & _storages(each.args[0])]
        if not late:
            return [each for each in node.graph.nodes if each in needed]
        if not _add(late, needed):
            return None


def _add(wanted: Iterable[fx.Node], needed: set[fx.Node]) -> bool:
    """Add nodes and all that they read; return whether these are few and small enough, and none an input."""
    waiting = list(wanted)
    while waiting:
        each = waiting.pop()
        if each in needed:
            continue
        if each.op not in {"call_function", "call_method"} or len(needed) == _MOST:
            return False
        if any(isinstance(made, torch.Tensor) and made.numel() > _LARGEST for made in _made(each)):
            return False
        needed.add(each)
        waiting += each.all_input_nodes
    return True


def is_write(node: fx.Node) -> bool:
    """Return whether a node changes its first argument."""
    if not node.args or node.op not in {"call_function", "call_method"}:
        return False
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = called.endswith("_") and not called.endswith("__")
    return by_name or node.target in _WRITES or node.kwargs.get("inplace") is True


def _storages(node: Any) -> set[int]:
    made = _made(node) if isinstance(node, fx.Node) else ()
    return {storage_key(each) for each in made if isinstance(each, torch.Tensor)}


def _made(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves(node.meta.get("example_value"))


class _Determined(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to draw numbers, and to read memory that nothing was written to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn or func.overloadpacket.__name__ in _UNDEFINED:
            raise RuntimeError(f"{func} has no value that is known")
        return func(*args, **(kwargs or {}))
