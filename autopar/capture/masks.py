"""Attention masks that no input changes: what they are for is told by their values.

Libraries build a mask out of positions and comparisons wherever they cannot see, while traced, that it
would be the plain causal one or none at all. As a tensor it is read and kept by every layer (256 MiB each for 8192
tokens in float32), and keeps kernels from leaving out what it masks. A mask made of constants alone is evaluated here:

    mask = where(j <= i, 0, -inf);  attention(q, k, v, attn_mask=mask)     →     attention(q, k, v, is_causal=True)
    mask = zeros;                   attention(q, k, v, attn_mask=mask)     →     attention(q, k, v)
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch import fx

from autopar.own_attention import BLOCK_ATTENTION, BLOCK_ATTENTION_BACKWARD

_ATEN = torch.ops.aten
_CAUSAL_AT = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: 4,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
    BLOCK_ATTENTION: 4,
    BLOCK_ATTENTION_BACKWARD: 8,
}
"""Attention operators that take a mask, and the place of their argument `is_causal`: behind dropout, and before the
mask where that is not given by name."""

_LARGEST = 2**28
"""Elements of the largest mask that is looked at: 16384 by 16384 positions, a GiB in float32."""


class Verdict(Enum):
    """What a mask says."""

    UNKNOWN = "depends on inputs, or on something else than order"
    CAUSAL = "a position sees itself and those before it"
    NONE = "every position sees every other"


def simplify_masks(joint: fx.GraphModule) -> int:
    """Replace constant masks that are causal or empty by the kernels' own argument; return how many."""
    known: dict[str, Verdict] = {}
    cut: list[fx.Node] = []
    changed = 0
    for node in joint.graph.nodes:
        place = _CAUSAL_AT.get(node.target) if node.op == "call_function" else None
        if place is None or (len(node.args) > place and node.args[place]):
            continue
        mask = node.args[place + 1] if len(node.args) > place + 1 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        chain = _constant_chain(mask)
        if chain is None:
            continue
        spelled = _spelled(chain)
        if spelled not in known:
            known[spelled] = _verdict(chain, mask)
        if known[spelled] is Verdict.UNKNOWN:
            continue
        causal = known[spelled] is Verdict.CAUSAL
        given = [*node.args, *[0.0, False][len(node.args) - place - 1 :]] if len(node.args) <= place else [*node.args]
        given[place] = causal
        node.args = tuple(given[: place + 1])
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "attn_mask"}
        cut += chain
        changed += 1
    for node in sorted(set(cut), reverse=True):
        if not node.users:
            joint.graph.erase_node(node)
    return changed


def _constant_chain(mask: fx.Node) -> list[fx.Node] | None:
    """Return the operators that make the mask, in order; `None` if one of them reads an input or draws numbers."""
    found = {mask: None}
    pending = [mask]
    while pending:
        node = pending.pop()
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op != "call_function" or drawn or _elements(node) > _LARGEST:
            return None
        for each in node.all_input_nodes:
            if each not in found:
                found[each] = None
                pending.append(each)
    return sorted(found)


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) else 0


def _spelled(chain: list[fx.Node]) -> str:
    """Return the chain as text in which nodes are numbered, so that each layer's own copy of it reads the same."""
    number = {node: f"%{i}" for i, node in enumerate(chain)}
    return "; ".join(
        str((node.target, fx.map_arg((node.args, node.kwargs), lambda each: number[each]))) for node in chain
    )


@torch.no_grad()
def _verdict(chain: list[fx.Node], mask: fx.Node) -> Verdict:
    values: dict[fx.Node, Any] = {}
    last = {each: node for node in chain for each in node.all_input_nodes}
    try:
        for node in chain:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for each in node.all_input_nodes:
                if last[each] is node:
                    values.pop(each, None)
    except RuntimeError:
        # What torch cannot evaluate here (an operator without a CPU kernel, too little memory) stays a mask.
        return Verdict.UNKNOWN
    made = values[mask]
    if not isinstance(made, torch.Tensor) or made.ndim < 2 or made.device.type != "cpu":
        return Verdict.UNKNOWN
    return _read(made)


def _read(mask: torch.Tensor) -> Verdict:
    """Return what a mask of numbers that are added to scores says: 0 keeps, the least number of its type drops."""
    if not mask.dtype.is_floating_point:
        return Verdict.UNKNOWN
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
        return Verdict.UNKNOWN
    if bool(seen.all()):
        return Verdict.NONE
    queries, keys = mask.shape[-2:]
    order = torch.ones(queries, keys, dtype=torch.bool).tril()
    return Verdict.CAUSAL if queries == keys and bool((seen == order).all()) else Verdict.UNKNOWN
