"""Collectives that fail while a program runs, told by the name that the plan has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.runtime.errors import CollectiveError, collective_failed, operation_missing

_LACKS = ("not support", "not implemented", "unsupported", "no backend type associated")
"""What torch's backends say of operations that they do not have, in lower case."""


def told(error: Exception, program: Callable[..., Sequence[Any]], rank: int, backend: str) -> CollectiveError | None:
    """Return the error that names the collective in which a compiled program failed; `None` if it was in none.

    Where a program has no lines of its own (Inductor's), nothing can be told.
    """
    code = getattr(program, "__code__", None)
    names: dict[int, str] = getattr(program, "collectives", {})
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is code and step.tb_lineno in names:
            name = names[step.tb_lineno]
            lacks = isinstance(error, NotImplementedError) or any(each in str(error).lower() for each in _LACKS)
            return operation_missing(name, backend, str(error)) if lacks else collective_failed(name, rank, str(error))
        step = step.tb_next
    return None
