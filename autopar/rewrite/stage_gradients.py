"""Gradients of a staged program: the term that each stage gives, and what is done once all micro-batches are summed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from autopar._torch import LazyGraphModule
from autopar.ir.plan import Bucket
from autopar.rewrite.buckets import MergeCollectives
from autopar.rewrite.derived import is_view
from autopar.rewrite.marks import COLLECTIVES, mark, role
from autopar.rewrite.partition import is_cut
from autopar.rewrite.passes import run_passes
from autopar.rewrite.programs import LAST
from autopar.rewrite.schedule import IssueEarly, SinkWaits
from autopar.rewrite.stage_homes import Home, Homes
from autopar.rewrite.two_level import RunInLevels

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default
_CASTS = frozenset({torch.ops.aten._to_copy.default, _CLONE, torch.ops.prims.convert_element_type.default})


@dataclass(frozen=True)
class Gradient:
    """One gradient that the program returns."""

    name: str
    """Of the parameter's (or input's) operator."""

    target: str
    base: fx.Node
    """Before it is brought to the parameter's layout."""

    chain: tuple[fx.Node, ...]
    """What brings it there, in order."""

    @classmethod
    def of(cls, name: str, target: str, result: fx.Node) -> Gradient:
        """Return the gradient with its last redistribution split off."""
        chain = []
        while result.op == "call_function" and mark(result).gradient and len(result.all_input_nodes) == 1:
            chain.append(result)
            result = result.all_input_nodes[0]
        return cls(name, target, result, tuple(reversed(chain)))


def split_terms(graph: fx.Graph, gradients: Sequence[Gradient], homes: Homes) -> dict[str, dict[int, fx.Node]]:
    """Return the term of each stage, by gradient; a sum over several stages becomes one sum for each.

        t0 (stage 0)  t2 (stage 2)  add(t2, t0)  →  view
    becomes
        stage 0: view(t0)        stage 2: view(t2)

    so that terms meet once a step instead of once a micro-batch. The graph and `homes` are edited.
    """
    found = {}
    results: dict[fx.Node, int] = {}
    for each in gradients:
        results[each.base] = results.get(each.base, 0) + 1
    for each in gradients:
        tree = _tree(each.base, homes) if results[each.base] == 1 else set()
        stages = _stages(_leaves(each.base, tree), homes)
        if len(stages) <= 1:
            stage = stages[0] if stages else homes.stage_of[mark(each.base).origin]
            for node in tree - homes.shared:
                homes.of[node] = Home("backward", stage)
            found[each.name] = {stage: each.base}
        else:
            found[each.name] = _split(graph, each.base, tree, stages, homes)
    return found


def _tree(base: fx.Node, homes: Homes) -> set[fx.Node]:
    """Return the sums, views, casts and redistributions that end in a gradient and in nothing else."""
    found: set[fx.Node] = set()
    todo = [base]
    while todo:
        node = todo.pop()
        alone = not homes.readers(node) if node is base else all(user in found for user in homes.readers(node))
        if alone and (node is base or node not in homes.given) and node not in homes.shared and _is_linear(node):
            found.add(node)
            todo += node.all_input_nodes
    return found


def _is_linear(node: fx.Node) -> bool:
    """Return whether the operator gives the sum of what it gives for the terms of a sum."""
    if node.op != "call_function" or mark(node).phase != "backward":
        return False
    inputs = node.all_input_nodes
    if node.target is _ADD:
        shapes = {tuple(each.meta["val"].shape) for each in (*inputs, node)}
        dtypes = {each.meta["val"].dtype for each in (*inputs, node)}
        return len(inputs) == len(node.args) == 2 and not node.kwargs and len(shapes) == len(dtypes) == 1
    if len(inputs) != 1 or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if role(node) == "start":
        return "reduce" not in COLLECTIVES[cast("Any", node.target)] or node.args[1] == "sum"
    return role(node) != "operator" or node.target in _CASTS or is_view(str(node.target))


def _leaves(base: fx.Node, tree: Collection[fx.Node]) -> list[fx.Node]:
    if base not in tree:
        return [base]
    found = [each for node in tree for each in node.all_input_nodes if each not in tree]
    return sorted(set(found))


def _stages(leaves: Sequence[fx.Node], homes: Homes) -> list[int]:
    return sorted({homes.of[leaf].stage for leaf in leaves if leaf in homes.of})


def _split(
    graph: fx.Graph, base: fx.Node, tree: Collection[fx.Node], stages: Sequence[int], homes: Homes
) -> dict[int, fx.Node]:
    order = sorted(tree)
    terms = {}
    for stage in stages:
        made: dict[fx.Node, fx.Node | None] = {}
        behind = base
        for node in order:
            inputs = [_term(each, made, tree, stage, stages[-1], homes) for each in node.all_input_nodes]
            there = [each for each in inputs if each is not None]
            if not there:
                made[node] = None
            elif len(there) < len(inputs):
                made[node] = there[0]
            else:
                swapped = dict(zip(node.all_input_nodes, there, strict=True))
                with graph.inserting_after(behind):
                    behind = graph.node_copy(node, swapped.__getitem__)
                made[node] = behind
                homes.of[behind] = Home("backward", stage)
        term = made[base]
        if term is not None:
            terms[stage] = term
    for node in order:
        del homes.of[node]
    return terms


def _term(
    node: fx.Node,
    made: Mapping[fx.Node, fx.Node | None],
    tree: Collection[fx.Node],
    stage: int,
    last: int,
    homes: Homes,
) -> fx.Node | None:
    if node in tree:
        return made[node]
    home = homes.of.get(node)
    return node if (home.stage if home is not None else last) == stage else None


def finish_program(
    gm: fx.GraphModule,
    gradients: Sequence[Gradient],
    zeros: Sequence[Gradient],
    buckets: Sequence[Bucket],
    in_levels: RunInLevels,
    device: str,
) -> fx.GraphModule:
    """Return the program from accumulated gradients to those in the parameters' layout.

    Gradients `zeros` have no term here: the program makes them, behind the others.
    """
    graph = fx.Graph()
    starts = []
    for each in gradients:
        starts.append(graph.placeholder(each.name))
        starts[-1].meta = {**each.base.meta, "autopar": replace(mark(each.base), role="operator", gradient=False)}
    results = [_finished(graph, each, start) for each, start in zip(gradients, starts, strict=True)]
    results += [_zero(graph, each, device) for each in zeros]
    graph.output(tuple(results))
    made = LazyGraphModule(gm, graph)
    graph.lint()
    run_passes(made, (IssueEarly(), SinkWaits(), MergeCollectives(_own_buckets(made, buckets)), in_levels, *LAST))
    return made


def _finished(graph: fx.Graph, gradient: Gradient, value: fx.Node) -> fx.Node:
    copies = {gradient.base: value}
    for node in gradient.chain:
        value = copies[node] = graph.node_copy(node, copies.__getitem__)
        value.meta["autopar"] = replace(mark(node), moves=gradient.target)
    if gradient.chain and is_cut(gradient.chain[-1]):
        copy = graph.call_function(_CLONE, (value,), {"memory_format": torch.contiguous_format})
        made = torch.empty_like(value.meta["val"], memory_format=torch.contiguous_format)
        copy.meta = {**value.meta, "val": made}
        return copy
    return value


def _zero(graph: fx.Graph, gradient: Gradient, device: str) -> fx.Node:
    value = (gradient.chain[-1] if gradient.chain else gradient.base).meta["val"]
    kwargs = {"dtype": value.dtype, "device": torch.device(device)}
    node = graph.call_function(torch.ops.aten.zeros.default, (list(value.shape),), kwargs)
    node.meta = {"val": torch.empty_like(value), "autopar": replace(mark(gradient.base), role="operator")}
    return node


def _own_buckets(gm: fx.GraphModule, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the buckets of those gradients that the program reduces, where they still are several."""
    here = {mark(node).moves for node in gm.graph.nodes if role(node) == "start" and mark(node).gradient}
    reductions = [each for each in buckets if each.op != "all_gather"]
    own = [replace(each, tensors=tuple(name for name in each.tensors if name in here)) for each in reductions]
    return tuple(each for each in own if len(each.tensors) > 1)
