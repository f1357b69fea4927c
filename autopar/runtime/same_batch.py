"""Whether all ranks bring the same batch to a call, as each is to: looked at in some calls, of some of its elements."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar._torch import is_dtensor, pytree
from autopar.runtime.call_errors import not_compared, other_batches, waits_alone
from autopar.runtime.ranks import Ranks
from autopar.warning import warn

_LOOKED_AT = 1024
"""Elements of each tensor that are compared, evenly spaced."""

_PATIENCE_S = 15.0
"""Seconds after which a rank that waits for the others with a form that is new to it says so."""

_ROUNDING = 1e-2
"""Relative difference by which numbers that ranks compute by themselves, of frozen models say, may differ."""

_COMPARED = (bool, int, str, type(None))
"""Types of plain values that are compared; floats may be of rounding, and others have no text of their own."""

Seen = Sequence[tuple[str, tuple[str, tuple[int, ...]] | str, torch.Tensor | None]]
"""Of each argument its name, its form, and numbers of it; no numbers where only the form is to be the same."""


class SameBatch:
    """Compares the arguments of calls over all ranks: of the first two calls of a mode, then of every second, fourth...

    What differs from the start is found in the first calls; what drifts apart later, such as the order in which a
    sampler draws, is found when the calls have doubled. So its cost vanishes.
    """

    def __init__(self, ranks: Ranks, *, parts: bool) -> None:
        self._ranks = ranks
        self._parts = parts
        """Whether each rank brings its own part: forms are to be the same then, and numbers are not."""
        self._calls: dict[Any, int] = {}
        self._compared = False

    def look(self, mode: Any, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare this call of a mode with the other ranks', if it is its turn; all ranks must call this.

        Raises:
            RanksDisagreeError: ranks bring different batches; on all ranks.
        """
        self._calls[mode] = count = self._calls.get(mode, 0) + 1
        self._compared = not count & (count - 1)
        if self._compared:
            self._compare(model, args, kwargs)

    def look_again(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare a call of a form that is new here, unless that was done: others may have met this form before.

        Raises:
            RanksDisagreeError: ranks bring different batches; on all ranks, or others never come.
        """
        if self._compared:
            return
        forms = [f"{name} {_word(form)}" for name, form, _ in seen(_named(model, args), kwargs, numbers=False)]
        told = threading.Timer(_PATIENCE_S, warn, [waits_alone(self._ranks.rank, forms, _PATIENCE_S)])
        told.daemon = True
        told.start()
        try:
            self._compare(model, args, kwargs)
        finally:
            told.cancel()

    def _compare(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._ranks.world_size == 1:
            return
        mine = seen(_named(model, args), kwargs, numbers=not self._parts)
        try:
            found = difference(self._ranks.from_first(mine), mine)
            told = [(rank, each) for rank, each in enumerate(self._ranks.gather(found)) if each]
        except RuntimeError as error:
            raise not_compared(str(error)) from error
        if told:
            raise other_batches(*told[0], len(told), parts=self._parts)


def _named(model: nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments by the names that forward has for them, or by their places."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]
    return {names[i] if i < len(names) else str(i): each for i, each in enumerate(args)}


def seen(args: Mapping[str, Any], kwargs: Mapping[str, Any], *, numbers: bool) -> Seen:
    """Return what is compared of a call's arguments, positional ones by name and others."""
    leaves = pytree.tree_flatten_with_path({**args, **kwargs})[0]
    return [(_name(path), *_of(each, numbers=numbers)) for path, each in leaves]


def difference(one: Seen, other: Seen) -> str:
    """Return in which argument two ranks differ, and how; empty if in none."""
    names = [[name for name, _, _ in each] for each in (one, other)]
    if names[0] != names[1]:
        return f"arguments {', '.join(names[1]) or '(none)'} and not {', '.join(names[0]) or '(none)'}"
    for (name, form, here), (_, other_form, there) in zip(one, other, strict=True):
        if form != other_form:
            return f"argument {name} as {_word(other_form)} and not {_word(form)}"
        if here is not None and there is not None and not _alike(here, there):
            return f"other values of argument {name}"
    return ""


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _of(value: Any, *, numbers: bool) -> tuple[tuple[str, tuple[int, ...]] | str, torch.Tensor | None]:
    if not isinstance(value, torch.Tensor):
        return (repr(value) if isinstance(value, _COMPARED) else type(value).__name__), None
    form = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if not numbers or value.is_meta or is_dtensor(value) or value.layout is not torch.strided:
        return form, None
    flat = value.detach().reshape(-1)
    step = max(1, -(-flat.numel() // _LOOKED_AT))
    kind = torch.float64 if value.is_floating_point() else value.dtype
    return form, flat[::step].cpu().to(kind)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.nan_to_num(), other.nan_to_num()
    return bool((one - other).norm() <= _ROUNDING * torch.maximum(one.norm(), other.norm()))


def _word(form: tuple[str, tuple[int, ...]] | str) -> str:
    return form if isinstance(form, str) else f"{form[0]}{list(form[1])}"
