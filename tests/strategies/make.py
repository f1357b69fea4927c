"""Tensors and calls for tests: random, and the same at each run."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.strategies.one_op import Case

_SEED = itertools.count()


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return random numbers, others at each call."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(next(_SEED)))


def p(*shape: int) -> torch.Tensor:
    """Return random positive numbers below 1."""
    return 0.05 + 0.9 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(next(_SEED)))


def i(high: int, *shape: int) -> torch.Tensor:
    """Return random places below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(next(_SEED)))


def b(*shape: int) -> torch.Tensor:
    """Return random truth values."""
    return i(2, *shape).bool()


def c(target: str, *args: Any, shapes_only: bool = False, **kwargs: Any) -> Case:
    """Return a call of `aten.TARGET`, or of another library's operator named in full."""
    name = target if target.startswith(("prims.", "transformers.", "autopar_ops.")) else f"aten.{target}"
    return Case(name, args, kwargs, shapes_only)
