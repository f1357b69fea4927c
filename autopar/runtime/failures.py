"""Collectives that fail while a program runs, told by the name that the plan has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from autopar._torch import group_named
from autopar.runtime.errors import CollectiveError, collective_failed, operation_missing

_LACKS = ("not support", "not implemented", "unsupported", "no backend type associated")
"""What torch's backends say of operations that they do not have, in lower case."""


def told(
    error: Exception,
    program: Callable[..., Any],
    rank: int,
    backend: str,
    groups: Mapping[str, str] | None = None,
) -> CollectiveError | None:
    """Return the error that names the collective in which a compiled program failed; `None` if it was in none.

    With `groups`, the name of the process group of each axis, it names the ranks that the collective is done with.
    Where a program has no lines of its own (Inductor's), nothing can be told.
    """
    code = getattr(program, "__code__", None)
    names: dict[int, str] = getattr(program, "collectives", {})
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is code and step.tb_lineno in names:
            name = names[step.tb_lineno]
            lacks = isinstance(error, NotImplementedError) or any(each in str(error).lower() for each in _LACKS)
            if lacks:
                return operation_missing(name, backend, str(error))
            return collective_failed(name, rank, str(error), _others(name, groups or {}))
        step = step.tb_next
    return None


def _others(name: str, groups: Mapping[str, str]) -> tuple[int, ...]:
    """Return the other ranks of a collective's group, by the axis in its name."""
    group = groups.get(name.rpartition("@")[2].partition(" ")[0])
    if group is None:
        return ()
    return tuple(each for each in dist.get_process_group_ranks(group_named(group)) if each != dist.get_rank())
