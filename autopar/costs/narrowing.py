"""Which products compute in a narrower type than their operands have, and what is cast for them.

    x → norm → [cast] → mm(., w) → ...      backward: dy → [cast] → mm(., w'), mm(dy', x')

Software that computes in fp8 (Transformer Engine, torchao) does so in the linear layers of a model's blocks: in their
three products, while embedding, head and attention stay as they are. A value is cast once for all products that read
it. What forward cast is kept for the weight gradients where the software keeps it, beside the value itself for as long
as others read that. Not priced: weights, which are cast once a step, and scales.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, Ref, once_per_graph
from autopar.ir.roles import base_of, gradient_like, is_view, parameter_like

_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten._grouped_mm.default"})
_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")
"""In the path of a module, a place in a list: of a layer, as in `layers.0.mlp`, and never of embedding and head."""

_BIASED = "aten.addmm.default"

Narrowed = tuple[bool, ...]
"""Of each tensor that a product reads: whether it is cast for it."""


@once_per_graph
def narrowed_products(graph: Graph) -> dict[str, Narrowed]:
    """Return the products with parameters, and those that make their gradients, of numbered layers."""
    base, weights, ends = base_of(graph), parameter_like(graph), gradient_like(graph)
    cast: set[tuple[str, int]] = set()
    found: dict[str, Narrowed] = {}
    for op in graph.ops:
        if op.target not in _PRODUCTS or not _NUMBERED.search(op.module):
            continue
        operands = _operands(op)
        if op.name not in ends and not any(ref.op in weights for ref in operands):
            continue
        reads = []
        for ref in op.refs:
            value = base[ref.op, ref.index]
            reads.append(ref in operands and ref.op not in weights and value not in cast)
            if ref in operands:
                cast.add(value)
        found[op.name] = tuple(reads)
    return found


@dataclass(frozen=True, slots=True)
class KeptNarrow:
    """A value that forward makes, and what it is cast to for products: positions, inclusive."""

    read_until: int
    """Where the value itself is read for the last time: to be cast, or by others than these products."""

    first: int
    last: int
    """From where to where its cast is held: the first and the last product that reads it."""

    share: float
    """Bytes of the cast over those of the value."""


@once_per_graph
def kept_narrow(graph: Graph) -> dict[tuple[str, int], KeptNarrow]:
    """Return the values whose cast is read in backward, of those that forward makes and the caller does not get.

    Transformer Engine saves the cast input (`save_for_backward` in transformer_engine/pytorch/module/linear.py,
    layernorm_linear.py, grouped_linear.py); torchao saves the input as it is (`float8_linear.py`), and casts it again.
    """
    base, weights, narrowed = base_of(graph), parameter_like(graph), narrowed_products(graph)
    returned = {base[each.ref.op, each.ref.index] for each in graph.outputs if each.ref is not None}
    casts: dict[tuple[str, int], list[int]] = {}
    others: dict[tuple[str, int], int] = {}
    for position, op in enumerate(graph.ops):
        cast = _operands(op) if op.name in narrowed else ()
        for ref in op.refs:
            value = base[ref.op, ref.index]
            if ref in cast and ref.op not in weights:
                casts.setdefault(value, []).append(position)
            elif not is_view(op):
                others[value] = position
    found = {}
    for value, at in casts.items():
        maker = graph.by_name[value[0]]
        meta = maker.outputs[value[1]]
        made = maker.kind == "call" and maker.phase == "forward" and value not in returned
        if made and meta is not None and meta.item_bytes > 1 and graph.ops[at[-1]].phase == "backward":
            found[value] = KeptNarrow(max(at[0], others.get(value, 0)), at[0], at[-1], 1 / meta.item_bytes)
    return found


def _operands(op: Op) -> tuple[Ref, ...]:
    """Return what a product multiplies, without the bias that it adds."""
    return op.refs[1:] if op.target == _BIASED else op.refs
