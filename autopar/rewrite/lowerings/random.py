"""Random numbers: the same on ranks that hold the same part, others on ranks that hold other parts."""

from __future__ import annotations

import operator
import zlib

from torch import fx

from autopar.ir.placement import Shard
from autopar.rewrite.random_ops import seeded
from autopar.rewrite.site import Site


def salt(site: Site) -> int:
    """Return a number for this operator and this rank's part of its result: what the seed of the step is mixed with."""
    part = ",".join(
        f"{axis.name}={at}" if any(isinstance(layout[i], Shard) for layout in site.strategy.outputs if layout) else ""
        for i, (axis, at) in enumerate(zip(site.mesh.axes, site.coordinate, strict=True))
    )
    return zlib.crc32(f"{site.op.name}|{part}".encode())


def drawn(site: Site) -> fx.Node | tuple[fx.Node, ...]:
    """Emit the operator drawing from a state made for it alone."""
    made = site.call(seeded(site.op.target), salt(site), *site.args, **site.kwargs)
    if len(site.op.outputs) == 1:
        return made
    return tuple(site.call(operator.getitem, made, i) for i in range(len(site.op.outputs)))
