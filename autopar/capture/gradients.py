"""Gradients in another type than their parameters': summed and reduced in float32 while parameters are of 16 bits."""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import Graph, Op
from autopar.ir.roles import gradient_like
from autopar.ir.tensor import TensorMeta


def gradients_in_float32(graph: Graph) -> Graph:
    """Return the graph in which operators that make nothing but gradients make them in float32.

    That is what products do that add to a float32 sum in place (Megatron-LM's `gradient_accumulation_fusion`). For
    prices alone: the graph is not one that runs.
    """
    ends = gradient_like(graph)
    ops = tuple(_long(op) if op.name in ends and op.kind == "call" else op for op in graph.ops)
    return dataclasses.replace(graph, ops=ops)


def _long(op: Op) -> Op:
    return dataclasses.replace(op, outputs=tuple(_float32(meta) for meta in op.outputs))


def _float32(meta: TensorMeta | None) -> TensorMeta | None:
    if meta is None or not meta.is_floating or meta.item_bytes >= 4:
        return meta
    return dataclasses.replace(meta, dtype="float32")
