"""One operator of the program on local shapes: itself, or the lowering that its strategy names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.rewrite.localise import localise
from autopar.rewrite.lowerings import lowering_of
from autopar.rewrite.site import Site

_ATEN = torch.ops.aten
_RESHAPE = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
"""Views of whole tensors that local strides may forbid."""


def emit(site: Site, node: fx.Node) -> Any:
    """Append an operator to the site's graph; return its node, or the tuple of nodes that are its outputs.

    `site` holds the arguments with the sizes of the whole tensors, `node` is the operator in the captured graph.
    Without mesh axes the operator stays as it was.
    """
    if not site.mesh.axes:
        return site.graph.create_node(node.op, node.target, site.args, site.kwargs, name=node.name)
    args, kwargs = localise(site.op, site.args, site.kwargs, site.strategy, site.mesh)
    if any(site.tags):
        return lowering_of(site.op.target)(replace(site, args=args, kwargs=kwargs))
    target = _ATEN.reshape.default if node.target in _RESHAPE else node.target
    return site.graph.create_node(node.op, target, args, kwargs, name=node.name)
