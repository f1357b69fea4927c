"""Random numbers: the same on ranks that hold the same part, others on ranks that hold other parts."""

from __future__ import annotations

import operator
import zlib

from torch import fx

from autopar.ir.placement import Shard
from autopar.rewrite.random_ops import OF_STEP, seeded
from autopar.rewrite.site import Site


def salt(site: Site) -> int:
    """Return a number for this operator and this rank's part of its result: what the seed is mixed with.

    What all micro-batches share is the same in all of them, as it is drawn once on a single device.
    """
    part = ",".join(
        f"{axis.name}={at}" if any(isinstance(layout[i], Shard) for layout in site.strategy.outputs if layout) else ""
        for i, (axis, at) in enumerate(zip(site.mesh.axes, site.coordinate, strict=True))
    )
    return zlib.crc32(f"{site.op.name}|{part}".encode()) + (OF_STEP if site.once else 0)


def drawn(site: Site) -> fx.Node | tuple[fx.Node, ...]:
    """Emit the operator drawing from a state made for it alone."""
    made = site.call(seeded(site.op.target), salt(site), *site.args, **site.kwargs)
    if len(site.op.outputs) == 1:
        return made
    return tuple(site.call(operator.getitem, made, i) for i in range(len(site.op.outputs)))
