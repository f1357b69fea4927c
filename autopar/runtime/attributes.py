"""Attributes that a program was made for: whether the called model's are still what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from autopar.ir.reads import ABSENT, Read, Step, held, holder, is_plain
from autopar.runtime.stand_ins import StandIn

Held = Mapping[tuple[str, str], Any]
"""Values by the path of the module that has them, and the name of the attribute."""

AsCalled = Callable[[Held], AbstractContextManager[None]]
"""Makes a context in which the model that programs are captured from has these attributes, as the called one has."""

_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})


class Attributes:
    """Where one model has what a program read of it."""

    def __init__(self, model: nn.Module, reads: Sequence[Read]) -> None:
        known: dict[int, tuple[Mapping[str, Any], type, list[tuple[str, Any, Read, tuple[Step, ...]]]]] = {}
        for read in reads:
            owner, path = holder(model, read.path)
            # Of modules their tables: who holds those keeps no module alive.
            place = (str(path[0][1]), read.value, read, path)
            known.setdefault(id(owner), (vars(owner), type(owner), []))[2].append(place)
        self._tables = tuple(known.values())

    def same(self) -> bool:
        """Return whether all are what they were."""
        for table, kind, known in self._tables:
            for key, value, read, path in known:
                if table.get(key, ABSENT) is not value and not read.same(held(table, kind, path)):
                    return False
        return True

    def changed(self) -> Iterator[tuple[Read, Any]]:
        """Yield what is another value now, with that; `ABSENT` if there is none."""
        for table, kind, known in self._tables:
            for _, _, read, path in known:
                now = held(table, kind, path)
                if not read.same(now):
                    yield read, now


def own_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what modules hold in attributes of their own that a forward may go by: neither tensors nor modules."""
    return {
        (path, key): list(value) if isinstance(value, list) and is_plain(value) else value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_TORCH and not key.startswith("_autopar") and not _is_part(value)
    }


def _is_part(value: object) -> bool:
    return isinstance(value, torch.Tensor | nn.Module | StandIn) or isinstance(
        getattr(value, "__self__", None), nn.Module
    )


def changed(before: Held, now: Held, *, objects: bool) -> dict[tuple[str, str], Any]:
    """Return the attributes that are others by now, of those that are no plain values only with `objects`."""
    return {
        at: value
        for at, value in now.items()
        if (before.get(at, ABSENT) != value if is_plain(value) else objects and before.get(at, ABSENT) is not value)
    }


@contextmanager
def attributes_as(model: nn.Module, values: Held) -> Iterator[None]:
    """Let modules have other attributes for a while; paths that the model lacks are left out."""
    modules = dict(model.named_modules())
    changes = [(modules[path].__dict__, key, value) for (path, key), value in values.items() if path in modules]
    before = [table.get(key, ABSENT) for table, key, _ in changes]
    for table, key, value in changes:
        table[key] = value
    try:
        yield
    finally:
        for (table, key, _), value in zip(changes, before, strict=True):
            if value is ABSENT:
                del table[key]
            else:
                table[key] = value
