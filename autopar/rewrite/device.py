"""The program on another device than it was captured on: kernels of that device, and new tensors made there.

Capture always happens on CPU tensors, so that a plan is the same on a laptop and on the cluster. What is particular to
the CPU in the result is replaced here; all other operators have kernels everywhere.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.own_attention import BLOCK_ATTENTION, BLOCK_ATTENTION_BACKWARD
from autopar.rewrite.aligned import AlignedProducts
from autopar.rewrite.beside import beside
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.marks import mark
from autopar.rewrite.mixed_norms import MixedNorms
from autopar.rewrite.passes import Pass
from autopar.rewrite.random_ops import seeded

_ATEN = torch.ops.aten
_FORWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH = _ATEN._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward.default
_CUDNN = _ATEN._scaled_dot_product_cudnn_attention.default
_CUDNN_BACKWARD = _ATEN._scaled_dot_product_cudnn_attention_backward.default
_EFFICIENT = _ATEN._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = _ATEN._scaled_dot_product_efficient_attention_backward.default
_DROPPING = seeded(str(BLOCK_ATTENTION))
_DROPPING_FLASH, _DROPPING_EFFICIENT = seeded(str(_FLASH)), seeded(str(_EFFICIENT))
_FORWARDS = (_FORWARD, BLOCK_ATTENTION, _DROPPING)
_BACKWARDS = (_BACKWARD, BLOCK_ATTENTION_BACKWARD)
_FLASHES, _EFFICIENTS = (_FLASH, _DROPPING_FLASH), (_EFFICIENT, _DROPPING_EFFICIENT)
_STATE, _OF_MASK = 2, 3
"""Which result of the CPU's kernel in blocks says what was drawn (GPUs have others, and read theirs), and which of its
backward is the gradient of the mask."""

_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 16
"""Elements that rows of an attention bias start at a multiple of, or the memory-efficient kernel refuses it."""

_PADDED = 32
"""The memory-efficient kernel's sums have rows of a multiple of so many queries, infinite beyond the last."""

_FLASH_HEAD = 256
"""Elements of the largest heads that flash attention takes."""

_FLASH_CAPABILITY = (8, 0)
"""Compute capability from which on GPUs run flash attention: Ampere's."""

_CUDNN_HEAD = 128
"""Elements of the largest heads whose attention cuDNN trains on every GPU that has its kernels."""

_CUDNN_CAPABILITIES, _CUDNN_VERSION = frozenset({(9, 0), (10, 0)}), 90900
"""GPUs on which, and cuDNN from which, torch takes its attention before flash (torch's sdp_utils.cpp): on an H200 it
takes 0.71 of the time (benchmarks/results/single_gpu.jsonl), for FlashAttention-2 has no instruction of Hopper."""

_SMALL_HEAD, _SMALL = 192, frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})
"""Elements of the largest heads that flash attention trains where shared memory is little (torch's sdp_utils.cpp)."""


def kernels_for(device: str) -> tuple[Pass, ...]:
    """Return the passes that give a local program, as captured on the CPU, the kernels of a type of device.

    These may lay their results out in memory otherwise: what follows from them is propagated anew.
    """
    if device == "cpu":
        return ()
    return (GpuAttention(_flash_head(device), cudnn=_prefers_cudnn(device)), MixedNorms(), AlignedProducts())


def places_for(device: str) -> tuple[Pass, ...]:
    """Return the passes by which a program makes its tensors on a type of device."""
    return () if device == "cpu" else (MakeOn(device),)


def _flash_head(device: str) -> int:
    """Return the largest heads that this rank's device runs flash attention for, or most do if there is none to ask."""
    if device != "cuda" or not torch.cuda.is_available():
        return _FLASH_HEAD
    capability = torch.cuda.get_device_capability()
    if capability < _FLASH_CAPABILITY:
        return 0
    return _SMALL_HEAD if capability in _SMALL else _FLASH_HEAD


def _prefers_cudnn(device: str) -> bool:
    """Return whether torch would take cuDNN's attention on this rank's device; its backward adds in any order."""
    if device != "cuda" or not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return False
    allowed = torch.cuda.get_device_capability() in _CUDNN_CAPABILITIES and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return bool(allowed and (torch.backends.cudnn.version() or 0) >= _CUDNN_VERSION)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class MakeOn:
    """Let operators that name a device make their tensors on this one.

    arange(8, device=cpu)   →   arange(8, device=cuda)
    """

    device: str

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators changed."""
        there = torch.device(self.device)
        changed = 0
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.kwargs.get("device", there) != there:
                node.update_kwarg("device", there)
                changed += 1
        return changed


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """Replace the CPU's attention kernels by the GPU's.

    In 16-bit types without a mask these are cuDNN's where torch prefers them, else flash; otherwise memory-efficient.
    All make the same values up to rounding; what forward passes to backward differs in shape and is theirs alone.
    Of unlike lengths, flash attention's causal mask ends at the last key, the CPU's begins at the first. The
    memory-efficient kernel has no groups of queries: it is given a copy of keys and values for each query head.
    Kernels that drop scores draw from the seed that the CPU's is given, other numbers.
    """

    flash_head: int = _FLASH_HEAD
    """Elements of the largest heads that the device runs flash attention for; 0: it does not."""

    cudnn: bool = False
    """Whether attention that drops nothing is cuDNN's."""

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators replaced."""
        made: dict[fx.Node, fx.Node] = {}
        for target in _FORWARDS:
            for node in gm.graph.find_nodes(op="call_function", target=target):
                made[self._forward(node)] = node
        gradients = [each for kernel in _BACKWARDS for each in gm.graph.find_nodes(op="call_function", target=kernel)]
        for node in gradients:
            _backward(node, _maker(node))
        for node in (*made.values(), *gradients):
            gm.graph.erase_node(node)
        for new, node in made.items():
            if node.target is not _FORWARD:
                _drop_state(new)
        return len(made) + len(gradients)

    def _forward(self, node: fx.Node) -> fx.Node:
        """Put the GPU's forward kernel in place of the CPU's, which then has no users; return it."""
        salt = node.args[:1] if node.target is _DROPPING else ()
        query, key, value, dropout, causal, mask, scale = _read(node, 3, skip=len(salt))
        args: tuple[Any, ...]
        flash = query.meta["val"].shape[-1] <= self.flash_head and _takes_flash(query, key, mask, causal=causal)
        if flash and self.cudnn and not dropout and _takes_cudnn(query, key, value):
            args = (query, key, value, None, True, dropout, causal)
            new = beside(node, _CUDNN, args, {"scale": scale})
        elif flash:
            args = (*salt, query, key, value, dropout, causal)
            new = beside(node, _FLASHES[len(salt)], args, {"scale": scale})
        else:
            key, value = (_for_each_head(node, each, query) for each in (key, value))
            bias = _aligned(node, query, key, mask)
            args = (*salt, query, key, value, bias, True, dropout, causal)
            new = beside(node, _EFFICIENTS[len(salt)], args, {"scale": scale})
        _take_over(node, new)
        if new.target is _CUDNN:
            _flatten_sums(new)
        if new.target in _EFFICIENTS:
            _cut_moved_sums(new, query.meta["val"].shape[2])
        return new


def _backward(node: fx.Node, maker: fx.Node) -> None:
    in_blocks = node.target is BLOCK_ATTENTION_BACKWARD
    grad, query, key, value, out, sums, *_, dropout, causal, mask, scale = _read(node, 7 if in_blocks else 6)
    trains = in_blocks and any(user.users for user in _readers(node, _OF_MASK))
    for user in [] if trains else _readers(node, _OF_MASK):
        user.graph.erase_node(user)
    lengths = (query.meta["val"].shape[2], key.meta["val"].shape[2])
    if maker.target is _CUDNN:
        seed, offset = (_element(maker, index) for index in (6, 7))
        sums = beside(node, _ATEN.unsqueeze.default, (sums, -1), {})
        of = (grad, query, key, value, out, sums, seed, offset, None, None, None, *lengths, dropout, causal)
        _take_over(node, beside(node, _CUDNN_BACKWARD, of, {"scale": scale}))
        return
    if maker.target in _FLASHES:
        seed, offset = (_element(maker, index) for index in (6, 7))
        args: tuple[Any, ...] = (
            grad,
            query,
            key,
            value,
            out,
            sums,
            None,
            None,
            *lengths,
            dropout,
            causal,
            seed,
            offset,
        )
        _take_over(node, beside(node, _FLASH_BACKWARD, args, {"scale": scale}))
        return
    seed, offset = (_element(maker, index) for index in (2, 3))
    groups = query.meta["val"].shape[1] // key.meta["val"].shape[1]
    key, value = (_for_each_head(node, each, query) for each in (key, value))
    bias, sums = _aligned(node, query, key, mask), _padded(node, sums)
    wanted = [True, True, True, trains]
    args = (grad, query, key, value, bias, out, sums, seed, offset, dropout, wanted, causal)
    new = beside(node, _EFFICIENT_BACKWARD, args, {"scale": scale})
    if groups > 1:
        _sum_groups(node, new, groups)
    if trains and mask is not None:
        _sum_to_mask(node, new, mask)
    _take_over(node, new)


def _flatten_sums(maker: fx.Node) -> None:
    """Let who reads the sums of cuDNN's forward kernel read them as the CPU's has them, without a last dim of 1."""
    for sums in _readers(maker, 1):
        with maker.graph.inserting_after(sums):
            flat = maker.graph.call_function(_ATEN.squeeze.dim, (sums, -1))
        flat.meta = {**sums.meta, "val": sums.meta["val"].squeeze(-1)}
        sums.replace_all_uses_with(flat, delete_user_cb=lambda user, flat=flat: user is not flat)  # type: ignore[misc]


def _cut_moved_sums(maker: fx.Node, length: int) -> None:
    """Cut the sums of a forward kernel to its queries if they are moved before backward: moves know no others.

    sums[:, :, :32] → view → ...   becomes   sums[:, :, :32] → slice[:, :, :20] → view → ...
    """
    if length % _PADDED == 0:
        return
    for sums in [each for each in maker.users if each.target is operator.getitem and each.args[1] == 1]:
        moves = [reader for reader in sums.users if reader.target not in _BACKWARDS]
        with maker.graph.inserting_after(sums):
            cut = maker.graph.call_function(_ATEN.slice.Tensor, (sums, 2, 0, length))
        cut.meta = {**sums.meta, "val": sums.meta["val"][:, :, :length]}
        for move in moves:
            move.replace_input_with(sums, cut)
        if not moves:
            maker.graph.erase_node(cut)


def _padded(node: fx.Node, sums: fx.Node) -> fx.Node:
    rest = -sums.meta["val"].shape[2] % _PADDED
    return beside(node, _ATEN.constant_pad_nd.default, (sums, [0, rest], math.inf), {}) if rest else sums


def _for_each_head(node: fx.Node, shared: fx.Node, query: fx.Node) -> fx.Node:
    """Return keys or values with as many heads as queries have, each again for every query of its group."""
    batch, heads, length, width = shared.meta["val"].shape
    groups = query.meta["val"].shape[1] // heads
    if groups == 1:
        return shared
    apart = beside(node, _ATEN.unsqueeze.default, (shared, 2), {})
    each = beside(node, _ATEN.expand.default, (apart, [batch, heads, groups, length, width]), {})
    return beside(node, _ATEN.reshape.default, (each, [batch, heads * groups, length, width]), {})


def _sum_groups(old: fx.Node, new: fx.Node, groups: int) -> None:
    """Let who reads the gradients of shared keys and values read the sums over their groups."""
    for user in list(old.users):
        if user.target is not operator.getitem or user.args[1] not in (1, 2):
            continue
        gradient = beside(user, operator.getitem, (new, user.args[1]), {})
        batch, heads, length, width = gradient.meta["val"].shape
        apart = beside(user, _ATEN.reshape.default, (gradient, [batch, heads // groups, groups, length, width]), {})
        user.replace_all_uses_with(beside(user, _ATEN.sum.dim_IntList, (apart, [2]), {}))
        user.graph.erase_node(user)


def _readers(node: fx.Node, index: int) -> list[fx.Node]:
    """Return what reads one of a kernel's results."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def _sum_to_mask(old: fx.Node, new: fx.Node, mask: fx.Node) -> None:
    """Let who reads the gradient of a mask read that of all scores, summed where the mask is the same."""
    shape, scores = mask.meta["val"].shape, new.meta["val"][_OF_MASK].shape
    wide = (1,) * (len(scores) - len(shape)) + tuple(shape)
    alike = [dim for dim, (mine, whole) in enumerate(zip(wide, scores, strict=True)) if mine == 1 != whole]
    for user in _readers(old, _OF_MASK):
        gradient = beside(user, operator.getitem, (new, _OF_MASK), {})
        if alike:
            gradient = beside(user, _ATEN.sum.dim_IntList, (gradient, alike, True), {})
        user.replace_all_uses_with(beside(user, _ATEN.reshape.default, (gradient, list(shape)), {}))
        user.graph.erase_node(user)


def _read(node: fx.Node, tensors: int, *, skip: int = 0) -> tuple[Any, ...]:
    """Return the tensors a kernel of the CPU reads, then dropout, whether it is causal, its mask and its scale."""
    given = node.args[skip:]
    given = (*given, *(0.0, False)[max(0, len(given) - tensors) :]) if len(given) < tensors + 2 else given
    mask = given[tensors + 2] if len(given) > tensors + 2 else node.kwargs.get("attn_mask")
    return (*given[: tensors + 2], mask, node.kwargs.get("scale"))


def _drop_state(maker: fx.Node) -> None:
    """Erase what reads the state of the CPU's kernel; nothing computes with it any more."""
    for user in _readers(maker, _STATE):
        if not user.users:
            maker.graph.erase_node(user)


def _takes_flash(query: fx.Node, key: fx.Node, mask: fx.Node | None, *, causal: bool) -> bool:
    value, length = query.meta["val"], key.meta["val"].shape[2]
    if mask is not None or (causal and value.shape[2] != length):
        return False
    return value.dtype in _HALF and value.shape[-1] % 8 == 0


def _takes_cudnn(query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    (_, _, length, width), keys = query.meta["val"].shape, key.meta["val"].shape[2]
    return bool(width == value.meta["val"].shape[-1] and width <= _CUDNN_HEAD and min(length, keys) > 1)


def _maker(node: fx.Node) -> fx.Node:
    """Return the forward kernel whose result this gradient is of."""
    sums = node.args[5]
    todo: list[fx.Node] = [sums] if isinstance(sums, fx.Node) else []
    while todo:
        each = todo.pop()
        if each.target in (*_FLASHES, *_EFFICIENTS, _CUDNN):
            return each
        todo += each.all_input_nodes
    raise RewriteError(f"{node.name} is the gradient of no attention kernel of the program")


def _aligned(node: fx.Node, query: fx.Node, key: fx.Node, mask: fx.Node | None) -> fx.Node | None:
    """Return the mask as the memory-efficient kernel takes it: of the scores' shape, its rows aligned."""
    if mask is None:
        return None
    batch, heads, length, _ = query.meta["val"].shape
    keys = key.meta["val"].shape[2]
    rest = -keys % _ALIGNED
    shape = mask.meta["val"].shape
    if shape[-1] != keys or mask.meta["val"].stride(-1) != 1 or (not rest and _has_gaps(mask.meta["val"])):
        mask = beside(node, _ATEN.expand.default, (mask, [*shape[:-1], keys]), {})
        mask = beside(node, _ATEN.clone.default, (mask,), {"memory_format": torch.contiguous_format})
    if rest:
        mask = beside(node, _ATEN.constant_pad_nd.default, (mask, [0, rest]), {})
        mask = beside(node, _ATEN.slice.Tensor, (mask, -1, 0, keys), {})
    return beside(node, _ATEN.expand.default, (mask, [batch, heads, length, keys]), {})


def _has_gaps(mask: torch.Tensor) -> bool:
    """Return whether any row of a mask starts elsewhere than the memory-efficient kernel reads from."""
    return any(step % _ALIGNED for size, step in zip(mask.shape[:-1], mask.stride(), strict=False) if size > 1)


def _element(maker: fx.Node, index: int) -> fx.Node:
    """Return an element of what a kernel makes, read beside it, so that it is saved for backward."""
    for user in maker.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with maker.graph.inserting_after(maker):
        found = maker.graph.call_function(operator.getitem, (maker, index))
    found.meta["autopar"], found.meta["val"] = mark(maker), maker.meta["val"][index]
    return found


def _take_over(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of one kernel's results read the other's, whose own shapes they then have."""
    old.replace_all_uses_with(new)
    for user in new.users:
        if user.target is operator.getitem:
            user.meta["val"] = new.meta["val"][user.args[1]]
            user.meta.pop("local_shape", None)
