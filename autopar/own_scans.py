"""A scan over a sequence as one operator: `autopar_ops::scan`, of the kinds in `ir/scan.py`.

    tensors of a call   →   the output; backward: gradient of the output, tensors   →   gradients of the tensors

Torch would unroll it over the steps or chunks of the sequence. The operator calls the function that the model calls,
so whatever kernel that has on a device is used; backward runs it again and differentiates what it did.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from autopar._torch import TorchFunctionMode
from autopar.ir.scan import ScanCall

_LIBRARY: Any = torch.library.Library("autopar_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("scan(Tensor[] reads, str call) -> Tensor")
_LIBRARY.define("scan_backward(Tensor grad_out, Tensor[] reads, str call) -> Tensor[]")


@cache
def function_at(path: str) -> Callable[..., Any]:
    """Return the function that was at `module:name` when first asked for: another may stand for it in traces."""
    module, _, name = path.partition(":")
    holder: Any = importlib.import_module(module)
    found: Callable[..., Any] = reduce(getattr, name.split("."), holder)
    return found


def outputs_of(made: Any) -> tuple[Any, ...]:
    """Return what a scan's function returned as a tuple."""
    return tuple(made) if isinstance(made, tuple | list) else (made,)


class _PicksOnce(TorchFunctionMode):
    """Takes a tensor apart once where a loop picks its places one by one.

    The gradient of `x[:, i]` is as large as `x`, so that of a loop over it grows with the square of its steps; the
    gradient of taking apart puts them together once. Numbers are the same: what is not added are zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[tuple[int, int], tuple[Tensor, int, tuple[Tensor, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and (at := _place(args[1])) is not None:
            tensor, (dim, place) = args[0], at
            _, version, parts = self._parts.get((id(tensor), dim), (None, -1, ()))
            if version != tensor._version:
                parts = tensor.unbind(dim)
                self._parts[id(tensor), dim] = (tensor, tensor._version, parts)
            return parts[place]
        return func(*args, **(kwargs or {}))


def _place(index: Any) -> tuple[int, int] | None:
    """Return the dimension and the place that `[:, :, i]` picks; `None` of other indices."""
    index = index if isinstance(index, tuple) else (index,)
    picked = [(dim, each) for dim, each in enumerate(index) if type(each) is int]
    rest = len(index) - len(picked)
    if len(picked) != 1 or sum(isinstance(each, slice) and each == slice(None) for each in index) != rest:
        return None
    return picked[0]


def _computed(reads: Sequence[Tensor], call: ScanCall) -> Tensor:
    """Return the output of a call; types are those of what it reads, as in kernels, whatever autocast is around."""
    args, kwargs = call.arguments(reads)
    with torch.autocast(reads[0].device.type, enabled=False):
        out: Tensor = outputs_of(function_at(call.function)(*args, **kwargs))[0]
    return out.to(getattr(torch, call.dtype))


def _scan(reads: Sequence[Tensor], call: str) -> Tensor:
    return _computed(reads, ScanCall.read(call)).contiguous()


def _scan_backward(grad_out: Tensor, reads: Sequence[Tensor], call: str) -> list[Tensor]:
    read = [each.detach().requires_grad_() for each in reads]
    with torch.enable_grad(), _PicksOnce():
        made = _computed(read, ScanCall.read(call))
        found = torch.autograd.grad(made, read, grad_out, materialize_grads=True)
    return [each.contiguous() for each in found]


def _shaped(reads: Sequence[Tensor], call: str) -> Tensor:
    told = ScanCall.read(call)
    return reads[0].new_empty(told.shape([each.shape for each in reads]), dtype=getattr(torch, told.dtype))


def _like_read(grad_out: Tensor, reads: Sequence[Tensor], call: str) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in reads]


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    reads, ctx.call = inputs
    ctx.save_for_backward(*reads)


def _differentiated(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    found = torch.ops.autopar_ops.scan_backward(grad_out, list(ctx.saved_tensors), ctx.call)
    return list(found), None


for _name, _impl, _fake in (("scan", _scan, _shaped), ("scan_backward", _scan_backward, _like_read)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_ops::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("autopar_ops::scan", _differentiated, setup_context=_saved, lib=_LIBRARY)

SCAN: Any = torch.ops.autopar_ops.scan.default
