"""One operator of the program on local shapes: itself, localised, or the lowering its strategy names."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.rewrite.site import Site

_ATEN = torch.ops.aten
_SIZES = {_ATEN.view.default: 1, _ATEN._unsafe_view.default: 1, _ATEN.expand.default: 1, _ATEN.reshape.default: 1, _ATEN.slice_backward.default: 0}
_RESHAPED = {_ATEN.view.default: _ATEN.reshape.default, _ATEN._unsafe_view.default: _ATEN.reshape.default}


def emit(site: Site, node: fx.Node) -> Any:
    """Append an operator to the site's graph; return its node, or the tuple of nodes that are its outputs."""
    args = list(site.args)
    if site.mesh.axes and _SIZES.get(node.target):
        args[1] = list(site.local_output())
    target = _RESHAPED.get(node.target, node.target) if site.mesh.axes else node.target
    return site.graph.create_node(node.op, target, tuple(args), site.kwargs, name=node.name)
