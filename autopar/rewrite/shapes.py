"""Local shapes of a program, found by running it on fake tensors, against those its layouts demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensorMode
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.in_memory import settled
from autopar.rewrite.marks import mark
from autopar.rewrite.outcomes import called


def propagate(gm: fx.GraphModule, names: Mapping[str, str], by: str) -> None:
    """Run the program on fake CPU tensors, leave each node's value in `meta["val"]`, compare its shape.

    Inputs that lie in memory otherwise than their kernel reads them are copied. `names` says how to name operators
    to people; `by` is what made the program.

    Raises:
        RewriteError: an operator refuses its local inputs, or makes another shape than its layout says.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[fx.Node, Any] = {}
    copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            values[node] = _start(node, mode)
        elif node.op == "get_attr":
            values[node] = mode.from_tensor(getattr(gm, str(node.target)))
        else:
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            try:
                with torch.no_grad():
                    args = settled(node, args, copies)
                    values[node] = called(node, args, kwargs, mode)
            except Exception as error:
                shown = [list(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
                raise RewriteError(f"{by}: {_name(node, names)} refuses its local inputs {shown}: {error}") from error
        node.meta["val"] = values[node]
        _check(node, names, by)


def _start(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a fake tensor of the placeholder's local shape, dimensions ordered in memory as they were captured."""
    seen = node.meta["val"]
    if not isinstance(seen, torch.Tensor):
        return seen
    shape = node.meta.get("local_shape", tuple(seen.shape))
    with mode:
        return torch.empty_strided(shape, strides_like(seen, shape), dtype=seen.dtype, device="cpu")


def strides_like(whole: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for `shape` that order the dimensions in memory as `whole` does."""
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda d: (whole.stride(d), -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _check(node: fx.Node, names: Mapping[str, str], by: str) -> None:
    wanted, value = node.meta.get("local_shape"), node.meta["val"]
    if wanted is not None and isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(wanted):
        raise RewriteError(
            f"{by}: {_name(node, names)} makes the local shape {list(value.shape)}, "
            f"and its layout says {list(wanted)} ({node.format_node()})"
        )


def _name(node: fx.Node, names: Mapping[str, str]) -> str:
    found = mark(node)
    return f"{names.get(found.origin, found.origin)} ({found.role} {node.name})"
