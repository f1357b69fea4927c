"""What runs in 16 bits under a precision policy, and under torch.autocast on a GPU, in a capture on the CPU.

    with policy("bf16"):                     # or autocast_as_on_gpu(torch.bfloat16), by the lists of CUDA devices
        captured = capture(model, inputs)    # parameters stay in float32, casts are operators of the program

A policy is torch.autocast with the products of experts. Torch's lists lack these (pytorch issue 174763), and so models
whose parameters are in float32 would multiply by experts, most of what a mixture computes, in float32 too, and gather
twice the bytes (ADR 0017).

GPUs cast products to 16 bits as CPUs do. They run norms, softmax, sums, powers and losses in float32 besides, which the
CPU's list leaves in the type of what they read. Autocast's cache casts a parameter once for a forward: so does a
program, in which equal casts are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from autopar._torch import kernels_under_autocast_of_cpu, without_autocast_of_cpu

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types that products compute in under the precision policies that are not float32's."""

_SHORT = frozenset({torch.bfloat16, torch.float16})

_IN_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "cosine_similarity", "cumprod", "dist", "renorm", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
"""Operators that read everything in float32: `AT_FORALL_FP32` of aten/src/ATen/autocast_mode.h, those left out that are
in the CPU's list too or that differentiable programs do not have."""

_INTO_FLOAT32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum")
"""Operators that are asked for a result in float32 (`AT_FORALL_FP32_SET_OPT_DTYPE`): most read 16 bits as they are."""

_OF_HALVES = {
    "softmax.int": torch.ops.aten._softmax.default,
    "log_softmax.int": torch.ops.aten._log_softmax.default,
}
"""Those whose kernels read float16 and write float32 (`half_to_float`), and cast bfloat16 before."""

_OF_EXPERTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Products of each expert's tokens with its weights; the latter is there once transformers is imported."""


def policy(precision: str) -> AbstractContextManager[None]:
    """Return a context in which models compute on the CPU as a plan's precision has it; `fp32` changes nothing."""
    return _autocast(AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()


@contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    """Compute under torch.autocast on the CPU, products of experts too; their gradients follow from these."""
    libraries = []
    try:
        for name in _OF_EXPERTS:
            namespace, _, packet = name.partition(".")
            operator = getattr(getattr(torch.ops, namespace), packet, None)
            if operator is not None:
                libraries.append(kernels_under_autocast_of_cpu(namespace))
                libraries[-1].impl(packet, _casting(operator.default, partial(_short, dtype=dtype)))
        with torch.autocast("cpu", dtype=dtype):
            yield
    finally:
        for library in libraries:
            library._destroy()


@contextmanager
def autocast_as_on_gpu(dtype: torch.dtype) -> Iterator[None]:
    """Capture under autocast to `dtype`, by the lists of CUDA devices."""
    library = kernels_under_autocast_of_cpu()
    try:
        for name in _IN_FLOAT32:
            library.impl(name, _casting(_overload(name), _long))
        for name in _INTO_FLOAT32:
            library.impl(name, _asking(_overload(name), _OF_HALVES.get(name)))
        with torch.autocast("cpu", dtype=dtype):
            yield
    finally:
        library._destroy()


def as_products_read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type that the autocast around casts products' operands to; itself where there is none."""
    if not torch.is_autocast_enabled("cpu"):
        return tensor
    found: torch.Tensor = _short(tensor, torch.get_autocast_dtype("cpu"))
    return found


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(operator: Any, cast: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the operator, on what `cast` makes of each value that it reads."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast_of_cpu():
            return operator(*(cast(each) for each in args), **{name: cast(each) for name, each in kwargs.items()})

    return run


def _asking(operator: Any, of_halves: Any | None) -> Callable[..., Any]:
    """Return the operator, asked for float32 where it reads 16 bits and nothing else is asked for."""

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_autocast_of_cpu():
            if first.dtype not in _SHORT or kwargs.get("dtype") is not None:
                return operator(first, *args, **kwargs)
            if of_halves is not None and first.dtype == torch.float16:
                return of_halves(first, args[0] if args else kwargs["dim"], True)
            return operator(first, *args, **{**kwargs, "dtype": torch.float32})

    return run


def _short(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of float32 or of 16 bits in `dtype`, anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in _SHORT | {torch.float32} else value


def _long(value: Any) -> Any:
    """Return a tensor of 16 bits in float32, anything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _SHORT else value
