"""Shapes and dtypes of the tensors that a call brings to a rank, as planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.tensor import TensorMeta
from autopar.runtime.call_errors import input_not_graded, input_on_meta
from autopar.runtime.errors import input_differs
from autopar.runtime.program import Call


@dataclass(frozen=True)
class Expected:
    """What each tensor of a call must be; `local` is in the order of `call.tensors`."""

    call: Call
    local: Sequence[tuple[torch.Size, torch.dtype]]
    """Of this rank's part."""

    def matches(self, tensors: Sequence[torch.Tensor], *, grad: bool) -> bool:
        """Return whether `mismatch` has nothing to say."""
        return all(
            tensor.shape == shape
            and tensor.dtype is dtype
            and not tensor.is_meta
            and (not grad or not tensor.requires_grad or wanted.requires_grad)
            for tensor, (shape, dtype), wanted in zip(tensors, self.local, self.call.tensors, strict=True)
        )

    def mismatch(self, tensors: Sequence[torch.Tensor], *, grad: bool) -> Exception | None:
        """Return the error for the first tensor of another shape or dtype than planned, or without values.

        With `grad` also for one that is to get a gradient which the program does not compute.
        """
        for tensor, (shape, dtype), wanted in zip(tensors, self.local, self.call.tensors, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                got = TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                return input_differs(wanted.path, wanted.meta, tuple(shape), got)
            if tensor.is_meta:
                return input_on_meta(wanted.path)
            if grad and tensor.requires_grad and not wanted.requires_grad:
                return input_not_graded(wanted.path)
        return None

    def differ_in_form_alone(self, tensors: Sequence[torch.Tensor], *, parts: bool) -> bool:
        """Return whether nothing but the shapes of tensors, or that some are to get a gradient, is not as planned.

        What ranks bring in `parts` has no more rows than planned: one that brings more brings the whole, most likely.
        """
        return all(
            tensor.dtype is dtype
            and not tensor.is_meta
            and not (parts and shape and tensor.dim() == len(shape) and tensor.shape[0] > shape[0])
            for tensor, (shape, dtype) in zip(tensors, self.local, strict=True)
        )
