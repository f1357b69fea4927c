"""What an operator's price takes from the program around it, beside the shapes that it reads and makes."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.alignment import Across, read_across
from autopar.costs.expanded import Shares, index_shares
from autopar.costs.fusion import Fused, fused_traffic
from autopar.costs.narrowing import Narrowed, narrowed_products
from autopar.ir.graph import Graph, Op


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Of one operator; as it stands, it is one of which nothing is known."""

    fused: Fused | None = None
    """What of its traffic stays inside a kernel with its neighbours, where the device's software fuses."""

    narrowed: Narrowed | None = None
    """Of a product that computes in `device.narrow`, what is cast for it; None: it computes in its own type."""

    shares: Shares | None = None
    """How much of each tensor that it reads is in memory; None: all."""

    across: Across | None = None
    """Of each matrix that it reads, whether its columns lie in memory one behind the other; None: of none."""


ALONE = Surroundings()


def surroundings(graph: Graph, op: Op) -> Surroundings:
    """Return what is around an operator of a program."""
    return Surroundings(
        fused_traffic(graph).get(op.name),
        narrowed_products(graph).get(op.name),
        index_shares(graph).get(op.name),
        read_across(graph).get(op.name),
    )
