"""Collectives that the plan runs level by level: inside the fast links, across them, and inside again."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.ir.plan import Collective
from autopar.ir.tasks import axis_of, level_name
from autopar.rewrite.emitted import message_bytes
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.level_ops import LEVELS
from autopar.rewrite.marks import C10D, COLLECTIVES, Mark, mark

_IN_LEVELS: dict[Any, Any] = {
    C10D.all_reduce.default: LEVELS.all_reduce.default,
    C10D.all_reduce_coalesced.default: LEVELS.all_reduce.default,
    C10D.all_gather_into_tensor.default: LEVELS.all_gather.default,
    C10D.all_gather_into_tensor_coalesced.default: LEVELS.all_gather.default,
    C10D.reduce_scatter_tensor.default: LEVELS.reduce_scatter.default,
    C10D.reduce_scatter_tensor_coalesced.default: LEVELS.reduce_scatter.default,
    C10D.all_to_all_single.default: LEVELS.all_to_all.default,
    EXPERTS.exchange.default: LEVELS.exchange.default,
}

Kind = tuple[str, str, int]
"""Of a collective: operation, mesh axis, bytes of the larger of its local buffers. Equal ones have one price."""


def in_two_levels(collectives: Sequence[Collective]) -> dict[Kind, tuple[int, int]]:
    """Return, of those collectives that the plan runs in two levels, the ranks inside the inner one, and the chunks."""
    return {(each.op, each.axis, each.bytes): (each.inner, each.chunks) for each in collectives if each.inner > 1}


@dataclass(frozen=True, slots=True)
class RunInLevels:
    """Issue collectives as a chain over process groups inside and across the fast links, as the plan says.

        all_reduce(a, "sum", "dp")
    becomes, with 4 ranks a node,
        autopar_levels.all_reduce([a], "sum", 1, "dp:inner4", "dp:outer4", "dp")

    The chain is issued where the flat collective was, and waited for where that was.
    """

    forms: Mapping[Kind, tuple[int, int]]

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of collectives changed."""
        changed = 0
        for node in list(gm.graph.nodes) if self.forms else ():
            if node.op != "call_function" or node.target not in _IN_LEVELS:
                continue
            stream = str(node.args[-1])
            form = self.forms.get((COLLECTIVES[node.target], axis_of(stream), message_bytes(node)))
            if form is not None:
                _in_levels(node, stream, *form)
                changed += 1
        return changed


def _in_levels(node: fx.Node, stream: str, inner: int, chunks: int) -> None:
    arguments: Any = node.args
    values, *settings, _ = arguments
    groups = (level_name(stream, "inner", inner), level_name(stream, "outer", inner), stream)
    alone = isinstance(values, fx.Node)
    match COLLECTIVES[node.target]:  # type: ignore[index]
        case "all_reduce":
            settings = [*settings, chunks]
        case "all_to_all" if node.target is not EXPERTS.exchange.default:
            if len({size for sizes in settings for size in sizes}) > 1:
                raise RewriteError(f"{node.name} exchanges parts of unequal size, which has no form in two levels")
            settings = []
    node.target = _IN_LEVELS[node.target]
    node.args = ([values] if alone else values, *settings, *groups)
    if alone:
        with node.graph.inserting_after(node):
            part = node.graph.call_function(operator.getitem, (node, 0))
        part.meta["val"] = node.meta["val"]
        part.meta["autopar"] = Mark(mark(node).origin, mark(node).phase)
        node.meta["val"] = [node.meta["val"]]
        node.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
