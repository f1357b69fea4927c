"""Kernels that read memory as it lies, without looking at strides, and what that asks of their inputs.

Eager operators copy such inputs before they call these kernels, and so the captured program gives them as they must
be. A rank's part of a value, or a gathered one, may lie otherwise; some kernels then refuse, others read wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import suggest_memory_format
from autopar.own_operators import CROSS_ENTROPY_BACKWARD
from autopar.rewrite.marks import mark

_ATEN = torch.ops.aten
_PLAIN = torch.contiguous_format

Wish = Callable[[torch.Tensor, tuple[Any, ...]], torch.memory_format | None]
"""From an input and all arguments to the format in which it must be copied first; `None` if it may stay as it is."""


def _whole(value: torch.Tensor, _args: tuple[Any, ...]) -> torch.memory_format | None:
    return None if value.is_contiguous() else _PLAIN


def _rows(value: torch.Tensor, _args: tuple[Any, ...]) -> torch.memory_format | None:
    return None if value.shape[-1] == 1 or value.stride(-1) == 1 else _PLAIN


def _pairs(value: torch.Tensor, _args: tuple[Any, ...]) -> torch.memory_format | None:
    """Wish for numbers that lie in pairs, as those of complex tensors do."""
    steps = [stride for size, stride in zip(value.shape[:-1], value.stride(), strict=False) if size > 1]
    return None if value.stride(-1) == 1 and all(step % 2 == 0 for step in steps) else _PLAIN


def _like(place: int) -> Wish:
    """Return the wish for the memory format that the kernel guesses from another argument."""

    def wish(value: torch.Tensor, args: tuple[Any, ...]) -> torch.memory_format | None:
        guessed = suggest_memory_format(args[place])
        wanted = guessed if args[place].is_contiguous(memory_format=guessed) else _PLAIN
        return None if value.is_contiguous(memory_format=wanted) else wanted

    return wish


_WISHES: Mapping[Any, Mapping[int, Wish]] = {
    _ATEN.native_group_norm.default: {0: _like(0), 1: _whole, 2: _whole},
    _ATEN.native_group_norm_backward.default: {0: _like(1), 1: _like(1), 2: _whole, 3: _whole, 4: _whole},
    _ATEN.native_layer_norm_backward.default: {3: _whole, 4: _whole},
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: dict.fromkeys((0, 1, 2), _rows),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: dict.fromkeys((0, 1, 2, 3, 4), _rows),
    _ATEN._scaled_dot_product_flash_attention.default: dict.fromkeys((0, 1, 2), _rows),
    _ATEN._scaled_dot_product_flash_attention_backward.default: dict.fromkeys((0, 1, 2, 3, 4), _rows),
    _ATEN._scaled_dot_product_efficient_attention.default: dict.fromkeys((0, 1, 2), _rows),
    _ATEN._scaled_dot_product_efficient_attention_backward.default: dict.fromkeys((0, 1, 2, 3, 5), _rows),
    _ATEN._weight_norm_interface.default: {0: _whole, 1: _whole},
    _ATEN._weight_norm_interface_backward.default: dict.fromkeys((0, 1, 2, 3), _whole),
    _ATEN._pdist_forward.default: {0: _whole},
    _ATEN._pdist_backward.default: {1: _whole},
    _ATEN.adaptive_max_pool3d_backward.default: {2: _whole},
    _ATEN.fractional_max_pool2d_backward.default: {4: _whole},
    _ATEN.fractional_max_pool3d_backward.default: {4: _whole},
    _ATEN._embedding_bag.default: {1: _whole, 2: _whole},
    _ATEN.nll_loss2d_backward.default: {1: _whole},
    CROSS_ENTROPY_BACKWARD: {1: _whole},
    _ATEN.view_as_complex.default: {0: _pairs},
}
"""By operator and argument; each was found by giving torch 2.13's CPU kernel the same values in other strides, but for
the attention kernels of GPUs, which refuse rows with gaps (aten/src/ATen/native/transformers/cuda)."""


def settled(node: fx.Node, args: tuple[Any, ...], copies: dict[tuple[fx.Node, torch.memory_format], fx.Node]) -> Any:
    """Return an operator's arguments as its kernel can read them; copies are added before it in the graph.

    `args` are the fake values of its arguments, `copies` those that the program has already, by what they copy.
    """
    found = list(args)
    for place, wish in _WISHES.get(node.target, {}).items():
        source = node.args[place] if place < len(args) else None
        if not isinstance(source, fx.Node):
            continue
        wanted = wish(args[place], args)
        if wanted is None:
            continue
        if (source, wanted) not in copies:
            with node.graph.inserting_before(node):
                copy = node.graph.call_function(_ATEN.clone.default, (source,), {"memory_format": wanted})
            copy.meta = {**node.meta, "autopar": replace(mark(node), role="operator")}
            copy.meta["val"] = _ATEN.clone.default(args[place], memory_format=wanted)
            copy.meta.pop("local_shape", None)
            copies[source, wanted] = copy
        found[place] = copies[source, wanted].meta["val"]
        node.update_arg(place, copies[source, wanted])
    return tuple(found)
