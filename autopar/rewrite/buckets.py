"""Collectives that the plan lets travel together."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.plan import Bucket
from autopar.ir.tasks import axis_of
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.marks import COLLECTIVES, Mark, mark
from autopar.rewrite.schedule import made_of

_C10D = torch.ops._c10d_functional
_COALESCED: dict[Any, Any] = {
    _C10D.all_reduce.default: _C10D.all_reduce_coalesced.default,
    _C10D.reduce_scatter_tensor.default: _C10D.reduce_scatter_tensor_coalesced.default,
    _C10D.all_gather_into_tensor.default: _C10D.all_gather_into_tensor_coalesced.default,
}


@dataclass(frozen=True, slots=True)
class MergeCollectives:
    """Issue the collectives of a bucket as one: reductions behind the last of them, gathers where the first is read.

        a = mm(..)  all_reduce(a)  b = mm(..)  all_reduce(b)
    becomes
        a = mm(..)  b = mm(..)  all_reduce_coalesced([a, b])
    """

    buckets: tuple[Bucket, ...]

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of collectives merged.

        Raises:
            RewriteError: the program has no such collective, or waits for one before the last is issued.
        """
        alone: dict[tuple[str, str, str], fx.Node] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in _COALESCED:
                alone.setdefault((COLLECTIVES[node.target], axis_of(str(node.args[-1])), mark(node).moves), node)
        for bucket in self.buckets:
            keys = [(bucket.op, bucket.axis, name) for name in bucket.tensors]
            missing = [name for *_, name in keys if (bucket.op, bucket.axis, name) not in alone]
            if missing:
                kind = "gathers no parameter" if bucket.op == "all_gather" else "reduces no gradient of"
                raise RewriteError(f"the program {kind} {', '.join(missing)}, and a bucket names it")
            _merge([alone[key] for key in keys], bucket)
        return sum(len(bucket.tensors) for bucket in self.buckets)


def _merge(members: list[fx.Node], bucket: Bucket) -> None:
    gathers = bucket.op == "all_gather"
    place = min(members) if gathers else max(members)
    if any(user < place for member in members for user in member.users):
        raise RewriteError(f"one of the bucket {bucket} is waited for before the last of them is there")
    if any(member.args[1:] != place.args[1:] or member.target is not place.target for member in members):
        raise RewriteError(f"those of the bucket {bucket} are reduced in different ways")
    if gathers:
        # What gathers read is cut, viewed or cast from parameters: it can run as early as wanted.
        for node in sorted({each for member in members for each in made_of(member)}):
            if place < node:
                place.prepend(node)
    graph = place.graph
    with graph.inserting_before(place):
        values = [member.args[0] for member in members]
        merged = graph.call_function(_COALESCED[place.target], (values, *place.args[1:]))
        parts = [graph.call_function(operator.getitem, (merged, index)) for index in range(len(members))]
    origin = mark(place)
    merged.meta["val"] = [member.meta["val"] for member in members]
    merged.meta["autopar"] = Mark(
        origin.origin, origin.phase, "start", str(bucket), origin.gathers_parameter, origin.gradient
    )
    for part, member in zip(parts, members, strict=True):
        part.meta["val"] = member.meta["val"]
        part.meta["autopar"] = Mark(mark(member).origin, origin.phase)
        member.replace_all_uses_with(part)
        graph.erase_node(member)
