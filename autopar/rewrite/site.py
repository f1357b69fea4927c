"""Where a lowering writes: one operator of the program, on local shapes.

A lowering replaces an operator whose local form differs from the global one
(a loss over vocabulary shards, BatchNorm over batch shards). It is a function
of a `Site` that emits local operators and collectives and returns the node, or
the tuple of nodes, that stand for the operator's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.ir.placement import local_shape
from autopar.ir.strategy import MeshStrategy
from autopar.ir.tensor import TensorMeta
from autopar.rewrite.marks import over_microbatches


@dataclass
class Site:
    """One operator being written on the local shapes of one rank."""

    graph: fx.Graph
    op: Op
    args: tuple[Any, ...]
    """The operator's arguments: local fx nodes for tensors, size arguments already local."""

    kwargs: dict[str, Any]
    strategy: MeshStrategy
    mesh: Mesh
    coordinate: tuple[int, ...]
    """This rank's index along each axis."""

    metas: tuple[TensorMeta, ...]
    """Global shape and dtype of each tensor read, in `Op.refs` order."""

    once: bool = False
    """Whether all micro-batches of a step share what it makes; see `drawn_once`."""

    issued: list[tuple[str, int, str]] = field(default_factory=list)
    """Collectives emitted so far: operation, axis, reduction."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Return, for each axis, the lowering that its strategy names; empty where the plain operator is right."""
        return tuple(each.lowering for each in self.strategy.axes)

    def axes(self, tag: str) -> tuple[int, ...]:
        """Return the mesh axes whose strategy names the lowering `tag`."""
        return tuple(axis for axis, each in enumerate(self.tags) if each == tag)

    def local_input(self, index: int) -> tuple[int, ...]:
        """Return the local shape of the tensor read at `index`."""
        return local_shape(self.metas[index].shape, self.strategy.inputs[index], self.mesh.sizes)

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        """Return the local shape of output `index`."""
        meta, layout = self.op.outputs[index], self.strategy.outputs[index]
        if meta is None or layout is None:
            raise ValueError(f"output {index} of {self.op.name} is no tensor")
        return local_shape(meta.shape, layout, self.mesh.sizes)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit one local operator and return its node."""
        return self.graph.call_function(target, args, kwargs)

    def all_reduce(self, value: fx.Node, axis: int, reduce: str = "sum") -> fx.Node:
        """Emit an all-reduce of `value` over mesh axis `axis`, and the wait for it; return the reduced value.

        The axis name stands for the process group; the runtime puts the group's name there.
        """
        if self.mesh.axes[axis].in_time:
            joined = self.call(over_microbatches, value)
            joined.meta["reduce"] = reduce
            return joined
        self.issued.append(("all_reduce", axis, reduce))
        started = self.call(torch.ops._c10d_functional.all_reduce.default, value, reduce, self.mesh.axes[axis].name)
        return self.call(torch.ops._c10d_functional.wait_tensor.default, started)
