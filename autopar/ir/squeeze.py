"""Decisions without mesh axes of size 1, along which there is nothing to decide."""

from __future__ import annotations

import dataclasses

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout
from autopar.ir.plan import Decisions
from autopar.ir.strategy import MeshStrategy


def squeeze(decisions: Decisions) -> Decisions:
    """Return the same decisions on a mesh that has no axis of size 1; the argument itself if it has none."""
    kept = tuple(i for i, axis in enumerate(decisions.mesh.axes) if axis.size > 1)
    if len(kept) == len(decisions.mesh.axes):
        return decisions

    def layout(old: Layout) -> Layout:
        return tuple(old[i] for i in kept)

    def strategy(old: MeshStrategy) -> MeshStrategy:
        return MeshStrategy(
            axes=tuple(old.axes[i] for i in kept),
            inputs=tuple(map(layout, old.inputs)),
            outputs=tuple(None if each is None else layout(each) for each in old.outputs),
        )

    return dataclasses.replace(
        decisions,
        mesh=Mesh(tuple(decisions.mesh.axes[i] for i in kept)),
        parameters={
            name: dataclasses.replace(each, placements=layout(each.placements))
            for name, each in decisions.parameters.items()
        },
        operators={
            name: dataclasses.replace(each, strategy=strategy(each.strategy))
            for name, each in decisions.operators.items()
        },
        outputs={name: layout(each) for name, each in decisions.outputs.items()},
    )
