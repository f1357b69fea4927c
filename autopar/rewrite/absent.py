"""Backward for a step in which some outputs got no gradient: all that only their tangents reach is left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import LazyGraphModule

_ADD = torch.ops.aten.add.Tensor


def without_tangents(backward: fx.GraphModule, absent: Collection[str]) -> fx.GraphModule:
    """Return the backward program that takes `absent` tangents for zero; it has the same placeholders.

    Backward is linear in the tangents, so an operator whose inputs of that kind are all zero makes
    zeros. An addition of zero is left out; elsewhere a zero beside a value is made.
    Gradients that are zero become `None`, as if the output had not been computed.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node | None] = {}
    linear: set[fx.Node] = set()
    zero: set[fx.Node] = set()
    tangents = _tangents(backward)
    for node in backward.graph.nodes:
        if node.op == "output":
            results = [None if each is None or each in zero else copies[each] for each in node.args[0]]
            graph.output(tuple(results))
            continue
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
            if node in tangents:
                linear.add(node)
            if node.name in absent:
                zero.add(node)
            continue
        inputs = [each for each in node.all_input_nodes if each in linear]
        if inputs:
            linear.add(node)
        if inputs and all(each in zero for each in inputs):
            zero.add(node)
        elif (kept := _other_term(node, zero)) is not None:
            copies[node] = copies[kept]
        else:
            copies[node] = graph.node_copy(node, _Values(graph, node, copies, zero))
    made = LazyGraphModule(backward, graph)
    graph.eliminate_dead_code()
    graph.lint()
    made.recompile()
    return made


def _tangents(backward: fx.GraphModule) -> set[fx.Node]:
    return {node for node in backward.graph.find_nodes(op="placeholder") if node.meta.get("tangent")}


def _other_term(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
    """Return the term that a sum with zero equals, if shape and dtype stay the same."""
    if node.target is not _ADD or node.kwargs or len(node.args) != 2:
        return None
    terms = [each for each in node.args if isinstance(each, fx.Node) and each not in zero]
    if len(terms) != 1 or not any(isinstance(each, fx.Node) and each in zero for each in node.args):
        return None
    before, after = terms[0].meta["val"], node.meta["val"]
    return terms[0] if before.shape == after.shape and before.dtype == after.dtype else None


@dataclass(frozen=True)
class _Values:
    """Finds the inputs of one copied operator; a zero among them is made, on the device of another."""

    graph: fx.Graph
    reader: fx.Node
    copies: Mapping[fx.Node, fx.Node | None]
    zero: Collection[fx.Node]

    def __call__(self, node: fx.Node) -> Any:
        known = self.copies.get(node)
        if node not in self.zero and known is not None:
            return known
        beside = next(each for each in self.reader.all_input_nodes if each not in self.zero)
        value = node.meta["val"]
        made = self.graph.call_function(
            torch.ops.aten.new_zeros.default,
            (self.copies[beside], list(value.shape)),
            {"dtype": value.dtype, "pin_memory": False},
        )
        made.meta = {"val": value}
        return made
