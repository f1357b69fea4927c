"""Whether the parts that micro-batches cut from a value are alike, whatever parameters and buffers hold.

A value that is whole in every micro-batch comes of parameters, buffers, constants and ranges. All micro-batches run the
program of the first, so the parts that they would cut from it must be equal. That is tried: with random numbers for all
that is not known, parts that are equal are so by the way in which the value is made (Schwartz 1980, Zippel 1979: an
identity that holds at a random point holds with probability one).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopar.rewrite.marks import role
from autopar.rewrite.random_ops import draws

BLANK = frozenset(
    {torch.ops.aten.new_zeros.default, torch.ops.aten.new_ones.default, torch.ops.aten.new_full.default,
     torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default, torch.ops.aten.full_like.default,
     torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format,
     torch.ops.aten.empty_strided.default}
)  # fmt: skip
"""Operators whose result does not depend on the values of what they read, or on none: what is in new memory counts for
nothing."""

_MOST_ELEMENTS = 1 << 24

_c10d = torch.ops._c10d_functional
_SUMMED = frozenset({_c10d.all_reduce.default, _c10d.wait_tensor.default})
"""What gives equal elements where it reads such on every rank, and others elsewhere: this rank's own stand for it."""


class Values:
    """Values of nodes at one random point, each computed once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}
        self._generator = torch.Generator().manual_seed(0)

    def parts(self, source: fx.Node, made: Iterable[fx.Node], dim: int, count: int) -> list[torch.Tensor] | None:
        """Return the `count` parts of a value along a dimension; `None` if it is too large or cannot be computed.

        `made` is all that it comes of, in program order.
        """
        needed = [node for node in made if node not in self._known]
        values = [each.meta.get("val") for each in needed]
        elements = sum(value.numel() for value in values if isinstance(value, torch.Tensor))
        if elements > _MOST_ELEMENTS or any(draws(each.target) for each in needed):
            return None
        try:
            for node in needed:
                self._known[node] = self._value(node)
            return list(self._known[source].chunk(count, dim))
        except Exception:  # noqa: BLE001  kernels that find random numbers no places, or need other ranks
            return None

    def _value(self, node: fx.Node) -> Any:
        if is_table(node):
            return self._random(node.meta["val"])
        if node.target in BLANK:
            return torch.zeros((), dtype=node.meta["val"].dtype).expand(node.meta["val"].shape)
        given: Any = fx.node.map_aggregate((node.args, node.kwargs), self._given)
        args, kwargs = given
        if node.target in _SUMMED:
            return args[0]
        if node.target is _c10d.reduce_scatter_tensor.default:
            return args[0].chunk(args[2])[0]
        if node.target is _c10d.all_gather_into_tensor.default:
            return torch.cat([_as_on(rank, args[0]) for rank in range(args[1])])
        target: Any = node.target
        return target(*args, **kwargs)

    def _given(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._known[arg]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        """Return random values, the same along dimensions in which memory repeats; integers are places of any table."""
        pairs = zip(like.shape, like.stride(), strict=True)
        shape = [1 if not stride else size for size, stride in pairs]
        if like.is_floating_point() or like.is_complex():
            made = (0.5 + torch.rand(shape, generator=self._generator)).to(like.dtype)
        else:
            made = torch.randint(0, 2, shape, generator=self._generator).to(like.dtype)
        return made.expand(like.shape)


def has_gathered(made: Iterable[fx.Node]) -> bool:
    """Return whether a value comes of other ranks' parts: they are taken to differ, so that unequal says little."""
    return any(node.target is _c10d.all_gather_into_tensor.default and not is_table(node) for node in made)


def _as_on(rank: int, part: torch.Tensor) -> torch.Tensor:
    """Return what another rank may hold where this one has `part`: equal where it is, and of other values.

    Raises:
        TypeError: places and counts, of which no others are known to be valid.
    """
    if not (part.is_floating_point() or part.is_complex()):
        raise TypeError(f"{part.dtype} of another rank")
    return part + rank * part.square() / 8


def is_table(node: fx.Node) -> bool:
    """Return whether a node's value is not computed: a parameter, buffer or constant, perhaps moved among ranks."""
    if node.op != "call_function":
        return True
    moved = role(node) in {"move", "start", "wait"} and bool(node.all_input_nodes)
    return moved and all(map(is_table, node.all_input_nodes))


def are_alike(parts: list[torch.Tensor]) -> bool:
    """Return whether parts are equal, but for rounding where they are numbers with a point."""
    first = parts[0]
    if not (first.is_floating_point() or first.is_complex()):
        return all(torch.equal(part, first) for part in parts)
    near = 16 * torch.finfo(first.dtype).eps
    largest = first.abs().nan_to_num(0, 0, 0).max().item() if first.numel() else 0.0
    return all(torch.allclose(part, first, rtol=near, atol=near * largest, equal_nan=True) for part in parts)
