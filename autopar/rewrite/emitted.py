"""The collectives that a program issues, read from the program itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.tasks import axis_of, inner_of
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.level_ops import LEVELS
from autopar.rewrite.marks import COLLECTIVES, mark
from autopar.rewrite.programs import Emitted


def emitted(gm: fx.GraphModule, axes: Collection[str]) -> Iterator[Emitted]:
    """Yield the collectives of a program whose nodes carry their local values.

    Raises:
        RewriteError: a collective names a group that is no mesh axis.
    """
    for node in gm.graph.nodes:
        op = COLLECTIVES.get(node.target) if node.op == "call_function" else None
        if op is None:
            continue
        axis = axis_of(str(node.args[-1]))
        if axis not in axes:
            raise RewriteError(
                f"{node.name} works on group {node.args[-1]!r}, and the mesh has the axes {sorted(axes)}"
            )
        found = mark(node)
        yield Emitted(op, axis, message_bytes(node), found.phase, found.moves, _inner(node))


def message_bytes(node: fx.Node) -> int:
    """Return the bytes of the larger of the local buffers of a collective.

    Of rows that go to experts these are as many as a rank has: what a rank gets depends on the data.
    """
    exchanges = node.target in {EXPERTS.exchange.default, LEVELS.exchange.default}
    sent = node.all_input_nodes[:1] if exchanges else node.all_input_nodes
    return max(_bytes(node.meta["val"]), sum(_bytes(each.meta["val"]) for each in sent))


def _inner(node: fx.Node) -> int:
    """Return the ranks inside the inner level of a collective in two levels, 1 of a flat one."""
    flat = getattr(node.target, "namespace", "") != LEVELS.name
    return 1 if flat else inner_of(str(node.args[-3]))


def _bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        raise RewriteError(f"a collective moves {type(value).__name__}, no tensor")
    return math.prod(value.shape) * value.element_size()
