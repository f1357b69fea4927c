"""What an operator may do along one mesh axis, and along all of them.

A `Strategy` holds for one axis: which placement it needs of each tensor it
reads (`Op.refs` order) and which it then makes of each output. Run on such
local shards, the operator (or the named lowering of it) computes exactly its
part of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.placement import Layout, Placement, short


@dataclass(frozen=True, slots=True)
class Inner:
    """A collective that a lowering issues itself, inside the operator.

    Its message is the local shard of `Op.outputs[output]` (of the tensor read at
    `input`, if that is given) without the dimensions `without`, `times` over, in `dtype`.
    """

    op: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`."""

    dtype: str
    reduce: str = "sum"
    output: int = 0
    input: int | None = None
    without: tuple[int, ...] = ()
    times: int = 1


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator along one mesh axis, without redistribution."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    lowering: str = ""
    """Name of what the rewriter puts in place of the operator; empty: the operator itself, on local shapes."""

    inner: tuple[Inner, ...] = ()

    def __str__(self) -> str:
        text = f"{','.join(map(short, self.inputs))}->{','.join(map(short, self.outputs))}"
        return f"{text} ({self.lowering})" if self.lowering else text


@dataclass(frozen=True, slots=True)
class MeshStrategy:
    """One way to run an operator on the whole mesh: a strategy an axis, their placements nested."""

    axes: tuple[Strategy, ...]
    inputs: tuple[Layout, ...]
    """Layout needed of each tensor read."""

    outputs: tuple[Layout | None, ...]
    """Layout made of each output."""

    def __str__(self) -> str:
        return " | ".join(map(str, self.axes))
