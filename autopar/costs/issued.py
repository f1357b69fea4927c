"""One collective of a solved program, instance by instance."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.links import Message
from autopar.ir.graph import Graph, Ref, behind, once_per_graph
from autopar.ir.placement import Layout

Copy = tuple[str, int, Layout, str]
"""A value in another layout: operator, output, layout, and the phase where each phase has its own."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective of one instance."""

    message: Message
    phase: str
    tensor_rep: str
    overlapped: bool
    at: str
    """The operator that needs it first."""

    times: int = 1
    """How often in a step: for every micro-batch, or once."""

    finishes: bool = False
    """Whether it brings a gradient to its parameter's place, after the last micro-batch."""

    mergeable: bool = False
    """Whether this alone brings a parameter's gradient to its place, or a parameter together for use."""

    tensor: str = ""
    """What is moved, as the rewriter names it: a parameter, or an operator and its module."""

    behind: bool = False
    """Whether it alone moves a parameter for use, or a gradient to its place, by a collective that may travel with
    others: tables price it as part of a larger one."""

    source: Ref | None = None
    """The value that is moved; `None` of a collective inside the operator `at`."""

    copy: Copy | None = None
    """What it leads to, with the other steps of its route."""

    readers: tuple[str, ...] = ()
    """In backward, all operators that read the redistributed copy; of what an operator issues itself, that one."""


def is_shared(graph: Graph, issued: Issued) -> bool:
    """Return whether two micro-batches at once have one of a collective: it moves a parameter, or a gradient."""
    moved = issued.source
    return issued.behind or issued.finishes or (moved is not None and moved.op not in of_inputs(graph))


@once_per_graph
def of_inputs(graph: Graph) -> frozenset[str]:
    """Return the inputs, and the operators that depend on any."""
    return behind(graph, "input")
