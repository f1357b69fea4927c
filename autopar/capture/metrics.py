"""What a model only returns, made of totals over its samples (a perplexity, a ratio of counts): left to the caller.

    loss = mse(x, y); psnr = -10 * log10(loss.detach())

Micro-batches give terms of the loss, and the logarithm of a term is no term of the logarithm. As nothing is trained on
it, the program returns the totals, and what is made of them is computed once the step has them whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import PlainAOTInput
from autopar.capture.call import ResultSpec
from autopar.capture.lower import reference
from autopar.ir.graph import Output

_SMALL = 4096
"""Elements of a total, at most: every rank gets it whole."""

_TERMWISE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("detach", "alias", "clone", "neg", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze",
                 "sum", "mean", "select", "slice", "permute", "expand")
)  # fmt: skip
"""What is the same of terms, added up, and of their sum."""

_SCALED = frozenset(getattr(torch.ops.aten, name) for name in ("mul", "div"))
"""The same where they have one operand that is a term."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """How metrics are made of a step's outputs."""

    program: fx.GraphModule
    """Takes the totals, returns the metrics."""

    takes: tuple[int, ...]
    """Number among the graph's user outputs of every total."""

    kept: tuple[int, ...]
    """For every result that the graph returns itself, its number among the model's."""

    made: tuple[int, ...]
    """For every metric, its number among the model's results."""

    def complete(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the model's results, of the graph's user outputs; a total that is missing stands for its metrics."""
        found = dict(zip(self.kept, outputs, strict=False))
        totals = [outputs[place] for place in self.takes]
        absent = next((each for each in totals if not isinstance(each, torch.Tensor)), None)
        if absent is None:
            with torch.no_grad():
                made = self.program(*[each.detach() for each in totals])
        else:
            made = [absent] * len(self.made)
        found |= dict(zip(self.made, made, strict=True))
        return [found[place] for place in range(len(found))]


def leave_metrics(
    joint: fx.GraphModule, outputs: Sequence[Output], result: ResultSpec, trained: Collection[str], batch: int
) -> tuple[list[Output], ResultSpec]:
    """Take out of a training program what is made of totals and only returned; return its outputs and result anew.

    `outputs` describe the joint graph's, in order, `trained` are the names of those that gradients start from, and
    `batch` is the number of samples.
    """
    end = next(iter(joint.graph.find_nodes(op="output")))
    given: list[fx.Node | None] = list(end.args[0])
    results = [at for at, each in enumerate(outputs) if each.kind == "output"]
    free = [at for at in results if given[at] is not None and outputs[at].name not in trained]
    needed = _ancestors(node for at, node in enumerate(given) if node is not None and at not in free)
    left = _left(joint.graph, needed, batch)
    gone = [at for at in free if given[at] in left]
    if not gone:
        return list(outputs), result
    made = [(outputs[at], given[at]) for at in range(len(given)) if at not in gone]
    have = {node: each.name for each, node in made if each.kind == "output" and node is not None}
    totals = [node for node in joint.graph.nodes if node not in left and any(user in left for user in node.users)]
    for number, node in enumerate(each for each in totals if each not in have):
        have[node] = f"{outputs[gone[0]].name}.total{number}"
        made.append((Output("output", have[node], reference(node)), node))
    numbers = {each.name: number for number, each in enumerate(o for o, _ in made if o.kind == "output")}
    metrics = Metrics(
        program=_program(joint, left, totals, [given[at] for at in gone]),
        takes=tuple(numbers[have[node]] for node in totals),
        kept=tuple(results.index(at) for at in results if at not in gone),
        made=tuple(results.index(at) for at in gone),
    )
    end.args = (tuple(node for _, node in made),)
    for node in reversed(list(joint.graph.nodes)):
        if node in left:
            joint.graph.erase_node(node)
    return [each for each, _ in made], replace(result, metrics=metrics)


def _left(graph: fx.Graph, needed: Collection[fx.Node], batch: int) -> set[fx.Node]:
    """Return the nodes of metrics, from the first on that is not made of its terms as of their sum."""
    of_batch = _of_batch(graph, batch)

    def is_total(node: fx.Node) -> bool:
        return node.op == "call_function" and node in of_batch and _is_small(node, batch)

    able: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in needed and node.op == "call_function" and _is_plain(node) and _is_small(node, batch):
            read = node.all_input_nodes
            if all(each in able or is_total(each) for each in read) and (read or not node.meta["val"].ndim):
                able.add(node)
    for node in reversed(list(graph.nodes)):
        if any(user.op != "output" and user not in able for user in node.users):
            able.discard(node)  # something that stays reads it
    left: set[fx.Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if node in able and read and (any(each in left for each in read) or not _is_termwise(node)):
            left.add(node)
    numbers = (node for node in able if not node.all_input_nodes)
    return left | {node for node in numbers if node.users and all(user in left for user in node.users)}


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that they depend on."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _of_batch(graph: fx.Graph, batch: int) -> set[fx.Node]:
    """Return the nodes that depend on an input with a row for each sample."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta["desc"], PlainAOTInput) and node.meta["val"].shape[:1] == (batch,):
                found.add(node)
        elif any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _is_small(node: fx.Node, batch: int) -> bool:
    """Return whether a value is one tensor that every rank may have, and none with a row for each sample."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() <= _SMALL and batch not in value.shape


def _is_plain(node: fx.Node) -> bool:
    """Return whether an operator is the same wherever and whenever it runs."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags


def _is_termwise(node: fx.Node) -> bool:
    """Return whether an operator makes of terms the terms of what it makes of their sum."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in {torch.ops.aten.add, torch.ops.aten.sub}:
        return isinstance(node.args[1], fx.Node)
    if packet in _SCALED:
        return not isinstance(node.args[1], fx.Node) and not node.kwargs
    if packet is torch.ops.aten._to_copy:
        return bool(node.meta["val"].is_floating_point())
    return packet in _TERMWISE


def _program(
    joint: fx.GraphModule, left: Collection[fx.Node], totals: Sequence[fx.Node], results: Sequence[fx.Node | None]
) -> fx.GraphModule:
    """Return what makes the metrics of the totals."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in totals}
    for node in joint.graph.nodes:
        if node in left:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results if node is not None))
    graph.lint()
    return fx.GraphModule(joint, graph)
