"""Values that are one parameter, viewed or cast: each phase may gather them by itself."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.graph import Graph
from autopar.ir.plan import Decisions
from autopar.ir.roles import CASTS


def derived_parameters(graph: Graph, decisions: Decisions) -> frozenset[str]:
    """Return the operators that only view or cast one parameter or buffer whose gathered copy is not kept."""
    found: set[str] = set()
    for op in graph.ops:
        if op.kind == "buffer":
            found.add(op.name)
        elif op.kind == "parameter":
            if decisions.parameters[op.target].gather != "once":
                found.add(op.name)
        elif len(op.refs) == 1 and op.refs[0].op in found and (op.target in CASTS or is_view(op.target)):
            found.add(op.name)
    return frozenset(found)


def is_view(target: str) -> bool:
    """Return whether an operator's result shares memory with its first argument, as its schema says."""
    overload = _overload(target)
    if target == "aten._unsafe_view.default":
        return True
    returns = overload._schema.returns if overload is not None else ()
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _overload(target: str) -> Any:
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    return getattr(packet, overload, None) if packet is not None else None
