"""Gradients that a program computed once and for all: to differentiate them again is told of, not silently zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.runtime.call_errors import differentiated_twice


def once(gradients: Sequence[Any], kind: str) -> Sequence[Any]:
    """Return gradients that a backward hands over, of the model called `kind`.

    Under `create_graph=True` they raise when they are differentiated: the operators of a program know nothing of what
    its values came from.
    """
    if not torch.is_grad_enabled():
        return gradients
    # Autograd keeps a node only of what requires a gradient.
    given = [None if each is None else each.detach().requires_grad_() for each in gradients]
    made: Sequence[Any] = _Once.apply(kind, *given)  # type: ignore[no-untyped-call]
    return made


class _Once(torch.autograd.Function):
    """Hands gradients over, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, kind: str, *gradients: Any) -> Any:
        ctx.kind = kind
        return tuple(None if each is None else each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise differentiated_twice(ctx.kind)
