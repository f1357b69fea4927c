"""Ranges and squeezes on parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.rewrite.lowerings.places import aten, own_part
from autopar.rewrite.site import Site


def part_of_range(site: Site) -> fx.Node:
    """Emit the whole range and take this rank's part: it is small, and so exactly the whole's numbers."""
    space, packet, overload = site.op.target.split(".")
    target: Any = getattr(getattr(getattr(torch.ops, space), packet), overload)
    layout, meta = site.strategy.outputs[0], site.op.outputs[0]
    if layout is None or meta is None:
        raise ValueError(f"{site.op.name} makes no tensor")
    return own_part(site, site.call(target, *site.args, **site.kwargs), layout, meta.shape)


def squeeze(site: Site) -> fx.Node:
    """Emit a squeeze as the view it is of the whole: a dimension that is 1 on this rank alone stays."""
    return site.call(aten.reshape.default, site.args[0], list(site.local_output()))
