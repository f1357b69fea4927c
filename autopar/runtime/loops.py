"""Loops over a compiled model's parameters by hand, where a rank of a pipeline has those of its own stages only."""

from __future__ import annotations

import dis
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from autopar.runtime.errors import wrapped_again

if TYPE_CHECKING:
    from autopar.runtime.module import Runner

_REDUCTIONS = frozenset(
    {"norm", "vector_norm", "isfinite", "isnan", "isinf", "sum", "nansum", "mean", "max", "amax", "min", "amin"}
    | {"dot", "vdot", "item", "tolist", "std", "var", "allclose", "equal"}
)
"""Methods that make numbers of a parameter, for a sum over all of them most likely."""

_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})

_WARNED: WeakSet[nn.Module] = WeakSet()


def warn_of_sums(model: nn.Module, runner: Runner) -> None:
    """Warn, once, where the loop that goes over these parameters makes numbers of each: ranks would add up their own.

    Told by the names that the loop's body looks up, in the frame that asks for the first parameter.
    """
    if runner.pipeline is None or runner.pipeline.depth == 1 or model in _WARNED:
        return
    frame = _caller()
    if frame is None:
        return
    found = sorted(_looked_up(frame) & _REDUCTIONS)
    if found:
        _WARNED.add(model)
        text = _sums_of_stages(type(model).__name__, found)
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")
"""Where torch wraps models that are to be trained by many ranks."""


def refuse_wrappers(kind: str) -> None:
    """Raise where another way to train on many ranks asks for the parameters of a compiled model.

    DistributedDataParallel fails on them in torch's words, or takes other ranks' stages for copies of this one's.

    Raises:
        UsageError: a wrapper of torch asks.
    """
    frame = _caller()
    if frame is not None and str(frame.f_globals.get("__name__")).startswith(_WRAPPERS):
        raise wrapped_again(kind)


_MODULE = "autopar.runtime.compiled_class"


def _caller() -> FrameType | None:
    """Return the frame that asks a model for its parameters."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, _MODULE, nn.Module.__module__):
        frame = frame.f_back
    return frame


def _looked_up(frame: FrameType) -> set[Any]:
    """Return the names of attributes that the body of the loop looks up which a frame is at the head of."""
    instructions = list(dis.get_instructions(frame.f_code))
    at = max((i for i, each in enumerate(instructions) if each.offset <= frame.f_lasti), default=0)
    head = instructions[at]
    if head.opname != "FOR_ITER":
        return set()
    body = (each for each in instructions[at:] if each.offset < head.argval)
    return {each.argval for each in body if each.opname in _ATTRIBUTES}


def _sums_of_stages(kind: str, found: list[str]) -> str:
    return (
        f"this loop over the parameters of {kind} makes numbers of each ({', '.join(found)}), and of this plan's "
        "pipeline stages each rank has its own: what is added up over parameters is another number on every rank. "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), ...) returns the norm of all gradients, "
        "autopar.sum_over_parameters(model, function) any other sum, on all ranks"
    )
