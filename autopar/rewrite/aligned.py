"""Products of 16-bit matrices whose rows start at odd places in memory, for which GPUs have slow kernels only.

An H200 multiplies 16384 x 768 by 768 x 50257 in 13.2 ms and by 768 x 50304 in 2.1 ms; products whose rows or inner size
are 50257 take 8.4 and 9.0 for 2.0 ms (torch 2.11, benchmarks/results/single_gpu.jsonl). Units that load tiles want rows
that start at multiples of 16 bytes. With zeros beside it a product is the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.rewrite.beside import beside
from autopar.rewrite.marks import COLLECTIVES

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}
"""By product, the place of its left operand; the right one follows, and what is added comes first."""

_VIEWS = frozenset(
    {
        _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default,
        _ATEN.slice.Tensor, _ATEN.unsqueeze.default, _ATEN.detach.default, _ATEN.alias.default,
    }
)  # fmt: skip
"""What reads a product without copying it, as far as it is seen here."""

_HALF = (torch.bfloat16, torch.float16)

_ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that rows should start at a multiple of."""

_WORTH = 256
"""Products of fewer rows or columns than this take as long as the copies of their operands."""

_Padded = dict[tuple[fx.Node, int, int], fx.Node]


@dataclass(frozen=True, slots=True)
class AlignedProducts:
    """Pad the operands of large products with zeros where sizes keep their rows, or the result's, from being aligned.

    mm(x[16384, 768], w[768, 50257])   →   mm(x, pad(w)[768, 50264])[:, :50257]
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of products changed."""
        made: _Padded = {}
        # In the order of the program, so that a copy stands before all who read it.
        products = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _PRODUCTS]
        return sum(_aligned(node, _PRODUCTS[node.target], made) for node in products)


def _aligned(node: fx.Node, at: int, made: _Padded) -> bool:
    left, right = node.args[at], node.args[at + 1]
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left.meta["val"].dtype not in _HALF:
        return False
    rows, columns, inner = _missing(left.meta["val"], right.meta["val"])
    added = node.args[0] if at else None
    if not (rows or columns or inner) or (isinstance(added, fx.Node) and added.meta["val"].dim() != 1):
        return False
    m, n = left.meta["val"].shape[0], right.meta["val"].shape[1]
    args: list[Any] = [_padded(node, left, rows, inner, made), _padded(node, right, inner, columns, made)]
    if added is not None:
        wide = beside(node, _ATEN.constant_pad_nd.default, (added, [0, columns]), {}) if columns else added
        args.insert(0, wide)
    target: Any = node.target
    new = beside(node, target, tuple(args), dict(node.kwargs))
    for dim, size, more in ((0, m, rows), (1, n, columns)):
        new = beside(node, _ATEN.slice.Tensor, (new, dim, 0, size), {}) if more else new
    if not _can_be_read(node, new.meta["val"]):
        new = beside(node, _ATEN.clone.default, (new,), {"memory_format": torch.contiguous_format})
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _can_be_read(node: fx.Node, value: torch.Tensor) -> bool:
    """Return whether who reads a node, or a view of it, can read a value with gaps between its rows."""
    for user in node.users:
        if user.target in COLLECTIVES and not value.is_contiguous():
            return False
        target: Any = user.target
        if target not in _VIEWS or user.args[0] is not node:
            continue
        try:
            made = target(value, *user.args[1:], **user.kwargs)
        except (RuntimeError, ValueError):  # of kernels, of their stand-ins on fake tensors
            return False
        if not _can_be_read(user, made):
            return False
    return True


def _missing(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int, int]:
    """Return by how much rows, columns and inner size fall short of what is aligned; 0 where that slows nothing down.

    Those dims count that are innermost in memory, of an operand or of the result, whose columns are.
    """
    (m, inner), n = left.shape, right.shape[1]
    of_rows, of_columns = _lies_by_rows(left), _lies_by_rows(right)
    rows = -m % _ALIGNED if not of_rows and n >= _WORTH else 0
    columns = -n % _ALIGNED if m >= _WORTH else 0
    short = -inner % _ALIGNED if (of_rows or not of_columns) and min(m, n) >= _WORTH else 0
    return rows, columns, short


def _lies_by_rows(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 or matrix.stride(0) != 1


def _padded(node: fx.Node, matrix: fx.Node, rows: int, columns: int, made: _Padded) -> fx.Node:
    """Return an operand with so many more rows and columns of zeros, laid out in memory as it is."""
    if not rows and not columns:
        return matrix
    if not _lies_by_rows(matrix.meta["val"]):
        base = matrix.args[0] if matrix.target is _ATEN.t.default else beside(node, _ATEN.t.default, (matrix,), {})
        if isinstance(base, fx.Node):
            return beside(node, _ATEN.t.default, (_padded(node, base, columns, rows, made),), {})
    key = (matrix, rows, columns)
    if key not in made:
        made[key] = beside(node, _ATEN.constant_pad_nd.default, (matrix, [0, columns, 0, rows]), {})
    return made[key]
