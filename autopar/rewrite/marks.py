"""What the passes know of each node of a local program, kept in `node.meta`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autopar.ir.graph import Phase
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.level_ops import LEVELS

Role = Literal["operator", "start", "wait", "move"]
"""The program's own operator; issue of a collective; wait for it; local copy or slice on the way to another layout."""

C10D = torch.ops._c10d_functional


def over_microbatches(value: torch.Tensor) -> torch.Tensor:
    """Stand for the sum of a value over all micro-batches of the step, until `microbatches.settle` says how it is made.

    Returns:
        The one micro-batch's term.
    """
    return value


WAIT = C10D.wait_tensor.default

COLLECTIVES = {
    C10D.all_reduce.default: "all_reduce",
    C10D.all_reduce_.default: "all_reduce",
    C10D.all_reduce_coalesced.default: "all_reduce",
    C10D.all_reduce_coalesced_.default: "all_reduce",
    C10D.all_gather_into_tensor.default: "all_gather",
    C10D.all_gather_into_tensor_coalesced.default: "all_gather",
    C10D.reduce_scatter_tensor.default: "reduce_scatter",
    C10D.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    C10D.all_to_all_single.default: "all_to_all",
    LEVELS.all_reduce.default: "all_reduce",
    LEVELS.all_reduce_.default: "all_reduce",
    LEVELS.all_gather.default: "all_gather",
    LEVELS.reduce_scatter.default: "reduce_scatter",
    LEVELS.all_to_all.default: "all_to_all",
    LEVELS.exchange.default: "all_to_all",
    EXPERTS.exchange.default: "all_to_all",
}
"""Operators that issue a collective, by the name the plan gives it; the group is their last argument."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a node comes from."""

    origin: str
    """Name of the operator of the captured program it belongs to."""

    phase: Phase
    role: Role = "operator"
    moves: str = ""
    """Of a redistribution: what is moved, in the user's names."""

    gathers_parameter: bool = False
    gradient: bool = False
    """Whether a redistribution brings a gradient to its parameter's layout."""


def mark(node: fx.Node) -> Mark:
    """Return the mark of a node; placeholders and get_attr nodes count as forward operators."""
    found: Mark = node.meta.get("autopar") or Mark(node.name, "forward")
    return found


def role(node: fx.Node) -> Role:
    """Return what a node is there for."""
    return "operator" if node.op == "placeholder" else mark(node).role


def is_own(node: fx.Node) -> bool:
    """Return whether a node is an operator of the captured program itself, the same on every rank."""
    return node.op == "call_function" and mark(node).origin == node.name
