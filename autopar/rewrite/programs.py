"""What the rewriter hands to the runtime: one rank's forward and backward programs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.ir.graph import Phase
from autopar.ir.placement import Layout
from autopar.ir.tensor import TensorMeta
from autopar.rewrite.absent import without_tangents
from autopar.rewrite.inplace import ComputeIntoDead, ReduceIntoDead
from autopar.rewrite.naming import NameCollectives
from autopar.rewrite.passes import Pass, run_passes
from autopar.rewrite.random_ops import next_seed, step_seed

LAST: tuple[Pass, ...] = (
    ComputeIntoDead(),
    ReduceIntoDead(),
    NameCollectives(),
)
"""Passes on each finished program; nothing moves after them."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """One collective that a program issues."""

    op: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`."""

    axis: str
    bytes: int
    """Of the larger of its local buffers."""

    phase: Phase
    tensor: str
    """What is moved: a parameter's name, or an operator's name and module path."""

    inner: int = 1
    """Ranks inside the inner of two levels; 1: it is flat."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses the border of a program: its name, global shape and layout."""

    name: str
    """Of an output its path in the return value; else the operator's name in the captured graph."""

    meta: TensorMeta | None
    layout: Layout


@dataclass(frozen=True, slots=True)
class Saved:
    """Where the runtime finds a value that backward reads."""

    source: Literal["input", "output", "value"]
    """A placeholder of forward, one of its user outputs, or one of the values it returns last."""

    index: int
    """Place among those."""

    name: str


@dataclass(frozen=True, slots=True)
class Seeding:
    """How the random operators of a step are given their seed."""

    next_seed: Callable[[], int] = next_seed
    """Draws a seed from torch's default generator; ranks that differ in its state get different ones."""

    step_seed: Callable[..., AbstractContextManager[None]] = step_seed
    """Context in which a step's forward or backward runs with a seed; see `random_ops.step_seed`."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """One rank's share of a step.

    `forward` takes every placeholder of the captured graph but the tangents, in order, and
    returns one flat tuple: user outputs, new values of buffers, values saved for backward.
    `backward` takes what `saved` names, in order, then the tangents; it returns the gradients.
    Group names in both are names of mesh axes.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    mutations: tuple[Value, ...]
    """Buffers that forward gives new values; `name` is the buffer's operator."""

    saved: tuple[Saved, ...]
    tangents: tuple[Value, ...]
    gradients: tuple[Value, ...]
    """What backward returns, `None` where `meta` is; `name` is the operator of the parameter or input."""

    emitted: tuple[Emitted, ...]
    draft: fx.GraphModule | None = None
    """`backward` before `LAST`: what a backward without some tangents is made from."""

    applied: tuple[str, ...] = ()
    """Passes that acted, with how often."""

    @property
    def seeding(self) -> Seeding | None:
        """Return how each step is given its seed; `None` if the programs draw no random numbers of their own."""
        programs = [each for each in (self.forward, self.backward) if each is not None]
        nodes = (node for program in programs for node in program.graph.nodes)
        return Seeding() if any(getattr(node.target, "namespace", "") == "autopar" for node in nodes) else None

    def backward_without(self, absent: Collection[str]) -> fx.GraphModule | None:
        """Return backward for a step in which the tangents of these names are zero, with the same placeholders."""
        if self.backward is None or not absent:
            return self.backward
        made = without_tangents(self.draft or self.backward, absent)
        run_passes(made, LAST)
        return made
