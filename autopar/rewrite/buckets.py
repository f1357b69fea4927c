"""Reductions of gradients that the plan lets travel together."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.plan import Bucket
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.marks import Mark, mark

_C10D = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class MergeReductions:
    """Issue the reductions of a bucket as one, when the last of its gradients is there.

        a = mm(..)  all_reduce(a)  b = mm(..)  all_reduce(b)
    becomes
        a = mm(..)  b = mm(..)  all_reduce_coalesced([a, b])
    """

    buckets: tuple[Bucket, ...]

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of reductions merged.

        Raises:
            RewriteError: the program has no such reduction, or waits for one before the last is issued.
        """
        alone = {
            mark(node).moves: node
            for node in gm.graph.find_nodes(op="call_function", target=_C10D.all_reduce.default)
            if mark(node).gradient
        }
        for bucket in self.buckets:
            missing = [name for name in bucket.gradients if name not in alone]
            if missing:
                raise RewriteError(f"the program reduces no gradient of {', '.join(missing)}, and a bucket names it")
            _merge([alone[name] for name in bucket.gradients], str(bucket))
        return sum(len(bucket.gradients) for bucket in self.buckets)


def _merge(members: list[fx.Node], moves: str) -> None:
    last = max(members)
    if any(user < last for member in members for user in member.users):
        raise RewriteError(f"a gradient of the bucket {moves} is waited for before the last of them is there")
    _, reduce, group = last.args
    if any(member.args[1:] != last.args[1:] for member in members):
        raise RewriteError(f"gradients of the bucket {moves} are reduced in different ways")
    graph = last.graph
    with graph.inserting_before(last):
        values = [member.args[0] for member in members]
        merged = graph.call_function(_C10D.all_reduce_coalesced.default, (values, reduce, group))
        parts = [graph.call_function(operator.getitem, (merged, index)) for index in range(len(members))]
    origin = mark(last)
    merged.meta["val"] = [member.meta["val"] for member in members]
    merged.meta["autopar"] = Mark(origin.origin, origin.phase, "start", moves, gradient=True)
    for part, member in zip(parts, members, strict=True):
        part.meta["val"] = member.meta["val"]
        part.meta["autopar"] = Mark(mark(member).origin, origin.phase)
        member.replace_all_uses_with(part)
        graph.erase_node(member)
