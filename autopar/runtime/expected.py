"""Shapes and dtypes of the tensors that a call brings to a rank, as planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.tensor import TensorMeta
from autopar.runtime.errors import input_differs
from autopar.runtime.program import Call


@dataclass(frozen=True)
class Expected:
    """What each tensor of a call must be; `local` is in the order of `call.tensors`."""

    call: Call
    local: Sequence[tuple[torch.Size, torch.dtype]]
    """Of this rank's part."""

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors have the planned shapes and dtypes."""
        return all(
            tensor.shape == shape and tensor.dtype is dtype
            for tensor, (shape, dtype) in zip(tensors, self.local, strict=True)
        )

    def mismatch(self, tensors: Sequence[torch.Tensor]) -> Exception | None:
        """Return the error for the first tensor of another shape or dtype than planned."""
        for tensor, (shape, dtype), wanted in zip(tensors, self.local, self.call.tensors, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                got = TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                return input_differs(wanted.path, wanted.meta, tuple(shape), got)
        return None
