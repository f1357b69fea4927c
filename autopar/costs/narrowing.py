"""Which products compute in a narrower type than their operands have, and what is cast for them.

    x → norm → [cast] → mm(., w) → ...      backward: dy → [cast] → mm(., w'), mm(dy', x')

Software that computes in fp8 (Transformer Engine, torchao) does so in the linear layers of a model's blocks: in their
three products, while embedding, head and attention stay as they are. A value is cast once for all products that read
it. Not priced: weights, which are cast once a step, and scales.
"""

from __future__ import annotations

import re

from autopar.costs.liveness import base_of
from autopar.ir.graph import Graph, once_per_graph
from autopar.ir.roles import gradient_like, parameter_like

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
        operands = op.refs[1:] if op.target == _BIASED else op.refs
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
