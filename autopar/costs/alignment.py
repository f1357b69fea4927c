"""Where matrices' rows start in memory: GPUs multiply those slowly that do not start at multiples of 16 bytes.

x [t, e] @ w [v, e].T → y [t, v]: v lies innermost in the result.
dy.T [v, t] @ x [t, e] → dw [v, e]: v lies innermost in dy, which is read across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.roles import order_of
from cost_models.compute import ALIGNED_ELEMENTS

Across = tuple[bool, ...]
"""Of each matrix that a product reads: whether its columns lie in memory one behind the other, not its rows."""

_OPERANDS = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""By product of two matrices, the place of the left one; the right one follows."""

_SLOW_FROM = 256
"""Sizes below which a product takes no longer for its rows: what it reads bounds it, and the rewriter pads none."""

_TURNED = (1, 0)
"""The order of a transposed matrix's dims."""


@once_per_graph
def read_across(graph: Graph) -> dict[str, Across]:
    """Return the products that read a matrix across its rows, and which of the two."""
    found: dict[str, Across] = {}
    for op in graph.ops:
        if op.target not in _OPERANDS:
            continue
        at = _OPERANDS[op.target]
        across = tuple(_is_transposed(graph, ref.op) for ref in op.refs[at : at + 2])
        if any(across):
            found[op.name] = across
    return found


def _is_transposed(graph: Graph, name: str) -> bool:
    op, turned = graph.by_name[name], False
    while (order := order_of(op)) is not None and len(order) == len(_TURNED):
        turned ^= order == _TURNED
        op = graph.by_name[op.refs[0].op]
    return turned


def aligned_elements(op: Op, ins: Sequence[tuple[int, ...]], across: Across | None) -> int:
    """Return by how many elements all matrices' rows of a product are aligned: 1, 2, 4 or 8, which is as good as more.

    `ins`: the local shapes of what it reads.
    """
    if op.target not in _OPERANDS:
        return ALIGNED_ELEMENTS
    at = _OPERANDS[op.target]
    left, right = ins[at], ins[at + 1]
    of_left, of_right = across or (False, False)
    if min(*left, *right) < _SLOW_FROM:
        return ALIGNED_ELEMENTS
    innermost = left[0] if of_left else left[1], right[0] if of_right else right[1], right[1]
    return math.gcd(ALIGNED_ELEMENTS, *innermost)
