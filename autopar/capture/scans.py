"""Scans over a sequence as one operator, where torch would unroll them over its steps or chunks.

    torch_chunk_gated_delta_rule(q, k, v, g, beta)   →   scan([q, k, v, g, beta], "gated_delta_rule ...")

Functions are known by their names and arguments (`ir/scan.py`), wherever a loaded module or the model holds them.
Calls that ask for the last state, or give tensors that are not known there, stay as they are. Kernels that compute a
whole layer, scan, convolution and products, are none that a part of could be computed: where a machine has them, layers
are captured as without.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopar._torch_tracing import seen_by_nobody
from autopar.ir.scan import SCANS, Scan, ScanCall
from autopar.own_scans import SCAN, function_at, outputs_of

_KINDS: Mapping[str, str] = {name: kind for kind, scan in SCANS.items() for name in scan.functions}
_PLAIN = (bool, int, float, str, types.NoneType)
_STEPS = 2

_WHOLE_LAYERS = frozenset({"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"})
"""Functions of transformers around such kernels, which return nothing where these are not installed."""

_ASKING_FOR_THEM = ("use_fast_path", "use_mem_eff_path")
"""What layers of mamba_ssm are told to take them by."""


@contextmanager
def scans_as_operators(model: nn.Module) -> Iterator[None]:
    """Let what is traced call an operator where it calls the function of a scan."""
    with ExitStack() as stack:
        for owner, name, value in [*_whole_layers(model)]:
            stack.enter_context(patch.object(owner, name, value))
        for owner, name, function in list(_held(model)):
            stack.enter_context(patch.object(owner, name, _operator(function)))
        yield


def _whole_layers(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yield who takes kernels of whole layers, by which name, and what to have there instead."""
    for module in list(sys.modules.values()):
        known = vars(module) if isinstance(module, types.ModuleType) else {}
        for name in _WHOLE_LAYERS:
            if hasattr(known.get(name), "__wrapped__"):
                yield module, name, known[name].__wrapped__
    for layer in model.modules():
        for name in _ASKING_FOR_THEM:
            if vars(layer).get(name) is True:
                yield layer, name, False


def _held(model: nn.Module) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield who holds a scan's function, under which name: modules of Python that use it, layers that chose one."""
    for module in list(sys.modules.values()):
        known = vars(module) if isinstance(module, types.ModuleType) else {}
        for name in _KINDS:
            if _is_scan(known.get(name)):
                yield module, name, known[name]
    for layer in model.modules():
        for name, value in vars(layer).items():
            if _is_scan(value):
                yield layer, name, value


def _is_scan(value: Any) -> bool:
    """Return whether a value is the function of a scan, which others than its owner can find."""
    if not isinstance(value, types.FunctionType) or value.__name__ not in _KINDS:
        return False
    try:
        return function_at(f"{value.__module__}:{value.__qualname__}") is value
    except (ImportError, AttributeError):  # made inside of a function
        return False


@lru_cache(maxsize=64)
def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as an operator, made once: Dynamo remembers it."""
    scan = SCANS[_KINDS[function.__name__]]
    signature = inspect.signature(function)

    @wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Any:
        positional = tuple(signature.parameters)[: len(args)]
        found = _call(function, scan, positional, signature.bind(*args, **kwargs))
        if found is None:
            return function(*args, **kwargs)
        call, reads = found
        out = SCAN(reads, call.text)
        return (out, *[None] * scan.beside) if scan.beside else out

    known: Callable[..., Any] = torch.compiler.allow_in_graph(operator)  # type: ignore[no-untyped-call]
    return known


def _call(
    function: Callable[..., Any], scan: Scan, positional: tuple[str, ...], bound: inspect.BoundArguments
) -> tuple[ScanCall, list[Tensor]] | None:
    """Return a call of a scan and the tensors it reads; `None` where it is more than `ir/scan.py` knows."""
    given: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for name, value in _by_name(bound):
        if isinstance(value, Tensor):
            if scan.dims(name, value.dim()) is None or not value.is_floating_point():
                return None
            given[name] = value
        elif (name in scan.states and value) or not _is_plain(value):
            return None
        else:
            settings[name] = value
    shapes, dtypes = tuple(tuple(each.shape) for each in given.values()), tuple(each.dtype for each in given.values())
    path = f"{function.__module__}:{function.__qualname__}"
    ranks = tuple(map(len, shapes))
    call = ScanCall(_KINDS[function.__name__], path, tuple(given), ranks, positional, settings, "float32")
    dtype = _dtype(call.text, shapes, dtypes)
    return None if dtype is None else (call.computed_in(dtype), list(given.values()))


def _by_name(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """Yield arguments by name, those included that a function takes by `**kwargs`."""
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value))


@lru_cache(maxsize=256)
def _dtype(text: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return the type of the output, by a call of a few steps that computes nothing; `None` if it has another form.

    A kernel that cannot be called so is taken to give what it is given first.
    """
    call = ScanCall.read(text)
    sizes = call.sizes(shapes) | {"s": _STEPS}
    short = [
        [_size(dim, sizes, size) for dim, size in zip(dims, shape, strict=True)]
        for dims, shape in zip(call.forward.inputs, shapes, strict=True)
    ]
    try:
        with torch.no_grad(), seen_by_nobody():
            reads = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in zip(short, dtypes, strict=True)]
            args, kwargs = call.arguments(reads)
            made = outputs_of(function_at(call.function)(*args, **kwargs))
    except Exception:  # noqa: BLE001  whatever a kernel says of tensors that it is not for
        return str(dtypes[0]).removeprefix("torch.")
    out, *beside = made
    as_known = isinstance(out, Tensor) and tuple(out.shape) == call.shape(short)
    if not as_known or len(beside) != call.scan.beside or any(each is not None for each in beside):
        return None
    return str(out.dtype).removeprefix("torch.")


def _size(dim: tuple[str, ...], sizes: Mapping[str, int], size: int) -> int:
    return sizes["s"] if dim == ("s",) else size
