"""Which attributes a forward read while Dynamo traced it, out of the guards that Dynamo would set for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from autopar.ir.reads import ABSENT, Read, Step, held, holder, is_plain

_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(?:'([^']*)'|(\d+))\]")

_START = re.compile(r"L\['self'\](?:\._modules\['_export_root'\])?")
"""How Dynamo names the module that is traced."""

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its mode, by which programs are chosen otherwise, and tables."""


def reads(guarded: Iterable[str], prefix: str, traced: nn.Module, model: nn.Module) -> tuple[Read, ...]:
    """Return the plain values that the model was read for, by the names of guards on a module which has it at `prefix`.

    `traced` is the copy that was. Where that was given another value than the model has (no caches of keys and
    values), there is nothing to tell.
    """
    found: dict[tuple[Step, ...], Read] = {}
    for path in dict.fromkeys(_paths(guarded, prefix)):
        owner, rest = holder(model, path)
        value = held(vars(owner), type(owner), rest)
        if value is ABSENT or not is_plain(value) or rest[0][1] in _OF_TORCH:
            continue
        read = Read(path, list(value) if isinstance(value, list) else value)
        if read.same(_value(traced, path)):
            found[path] = read
    return tuple(found.values())


def _value(model: nn.Module, path: tuple[Step, ...]) -> object:
    owner, rest = holder(model, path)
    return held(vars(owner), type(owner), rest)


def _paths(guarded: Iterable[str], prefix: str) -> Iterator[tuple[Step, ...]]:
    """Yield the steps from the model to what guards look at, as far as they are attributes and items."""
    inside = ((False, "_modules"), (True, prefix))
    for name in guarded:
        start = _START.match(name)
        if start is None:
            continue
        steps: list[Step] = []
        at = start.end()
        while (step := _STEP.match(name, at)) is not None:
            attribute, key, number = step.groups()
            if steps and steps[-1] == (False, "__dict__") and key is not None:
                attribute = steps.pop() and key
            steps.append((False, attribute) if attribute else (True, key if number is None else int(number)))
            at = step.end()
        if at == len(name) and tuple(steps[:2]) == inside and len(steps) > 2 and not any(map(_is_special, steps)):
            yield tuple(steps[2:])


def _is_special(step: Step) -> bool:
    """Return whether a step goes to what Python keeps for itself: classes, tables."""
    is_item, key = step
    return not is_item and str(key).startswith("__")
