"""Calls that are all tensors, given in one way: their tensors in the program's order, without a look at structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar._torch import is_dtensor
from autopar.runtime.pipeline import StagedBound
from autopar.runtime.step import Bound


class Reader:
    """Reads the tensors of calls that are all tensors, given in one way, without looking at their structure."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = None if list(order) == list(range(len(order))) else list(order)
        self._count = len(order)

    @classmethod
    def of(cls, bound: Bound | StagedBound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reader | None:
        """Return the reader for calls given as this one is; `None` if it has arguments that are no tensors."""
        if not all(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values())):
            return None
        stand_ins = [torch.empty(0) for _ in range(len(args) + len(kwargs))]
        named = dict(zip(kwargs, stand_ins[len(args) :], strict=True))
        seen = bound.flatten(tuple(stand_ins[: len(args)]), named)
        places = {id(each): i for i, each in enumerate(stand_ins)}
        return cls([places[id(each)] for each in seen]) if len(seen) == len(stand_ins) else None

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor] | None:
        """Return the tensors in the program's order; `None` if something else, or a DTensor, is among them."""
        given = (*args, *kwargs.values())
        for each in given:
            if not isinstance(each, torch.Tensor) or is_dtensor(each):
                return None
        return given if self._order is None else [given[i] for i in self._order]
