"""What a model only returns, made of totals over its samples (a perplexity, a ratio of counts): left to the caller.

    loss = mse(x, y); psnr = -10 * log10(loss.detach()); spread = values.std()

Micro-batches give terms of the loss, and the logarithm of a term is no term of the logarithm. As nothing is trained on
it, the program returns the totals, and what is made of them is computed once the step has them whole. So it is with
what is made of a few numbers a sample and is no sum of samples (a deviation, a median, a correlation): the program
returns these numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import PlainAOTInput
from autopar.capture.call import ResultSpec
from autopar.capture.composed import compose_reductions
from autopar.capture.lower import reference
from autopar.ir.graph import Output

_SMALL = 4096
"""Elements of a total, or of rows of all samples, at most: every rank gets them whole."""

_TERMWISE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("detach", "alias", "clone", "neg", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze",
                 "sum", "mean", "select", "slice", "permute", "expand")
)  # fmt: skip
"""What is the same of terms, added up, and of their sum."""

_RELAID = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("detach", "alias", "clone", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute",
                 "transpose", "_to_copy", "t")
)  # fmt: skip
"""The same elements, laid out anew."""

_ADDED = frozenset(getattr(torch.ops.aten, name) for name in ("sum", "mean", "count_nonzero"))
"""Reductions of samples to sums, of which micro-batches give terms."""

_EXTREME = frozenset(
    {torch.ops.aten.amax.default, torch.ops.aten.amin.default, torch.ops.aten.max.default, torch.ops.aten.min.default}
)
"""Reductions of samples to what is the largest, or least, of terms: nothing but copies is the same of these."""

_PICKED = frozenset({torch.ops.aten.select, torch.ops.aten.slice})
_ORDERED = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("sort", "argsort", "topk", "cumsum", "cumprod", "cummax", "cummin", "flip", "roll", "softmax",
                 "_softmax", "_log_softmax", "logcumsumexp")
)  # fmt: skip
"""Operators that keep the samples and may make of each something that depends on the others."""

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
    results = [at for at, each in enumerate(outputs) if each.kind == "output"]
    free = [at for at in results if end.args[0][at] is not None and outputs[at].name not in trained]
    needed = _ancestors(node for at, node in enumerate(end.args[0]) if node is not None and at not in free)
    given_alone = of_inputs_alone(joint.graph)
    if compose_reductions(joint.graph, _of_batch(joint.graph, batch), needed, given_alone, _SMALL):
        pairs = zip(outputs, end.args[0], strict=True)
        outputs = [each if node is None else replace(each, ref=reference(node)) for each, node in pairs]
    given: list[fx.Node | None] = list(end.args[0])
    left = _left(joint.graph, needed, batch)
    gone = [at for at in free if given[at] in left]
    if not gone:
        return list(outputs), result
    made = [(outputs[at], given[at]) for at in range(len(given)) if at not in gone]
    have = {node: each.name for each, node in made if each.kind == "output" and node is not None}
    totals = [node for node in joint.graph.nodes if node not in left and any(user in left for user in node.users)]
    for number, node in enumerate(each for each in totals if each not in have):
        have[node] = f"{outputs[gone[0]].name}.total{number}"
        given_back = _returned(joint.graph, node, next(user for user in node.users if user in left))
        made.append((Output("output", have[node], reference(given_back)), given_back))
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
    """Return the nodes of metrics, from the first on that is not made of its terms, or rows, as of the whole.

    What is left is computed of whole values: right whatever stays. What stays is that which each micro-batch computes.
    """
    of_batch = _of_batch(graph, batch)
    able: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in needed and node.op == "call_function" and _is_plain(node) and _is_small(node):
            read = node.all_input_nodes
            if all(each in able or _is_source(each, of_batch) for each in read) and (read or not _values(node)[0].ndim):
                able.add(node)
    for node in reversed(list(graph.nodes)):
        if any(user.op != "output" and user not in able for user in node.users):
            able.discard(node)  # something that stays reads it
    left: set[fx.Node] = set()
    joined: set[fx.Node] = set()
    extreme: set[fx.Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if any(each in joined for each in read) or (node in of_batch and _joins_rows(node, batch)):
            joined.add(node)
        is_extreme = node in of_batch and node.target in _EXTREME and not _has_rows(node, batch)
        if is_extreme or any(each in extreme for each in read):
            extreme.add(node)
        if node not in able or not read:
            continue
        of_extremes = any(each in extreme for each in read) and not _is_copy(node)
        if of_extremes or any(each in left for each in read) or _needs_whole(node, joined, batch):
            left.add(node)
    numbers = (node for node in able if not node.all_input_nodes)
    return left | {node for node in numbers if node.users and all(user in left for user in node.users)}


def _returned(graph: fx.Graph, node: fx.Node, reader: fx.Node) -> fx.Node:
    """Return what the program returns for a value: of an input a copy, as for inputs that the model returns itself."""
    if node.op != "placeholder":
        return node
    with graph.inserting_before(reader):
        made = graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta = {**reader.meta, "val": node.meta["val"].clone()}
    return made


def _is_source(node: fx.Node, of_batch: Collection[fx.Node]) -> bool:
    """Return whether a metric may be made of a value or an input: every rank gets it whole."""
    return node in of_batch and isinstance(node.meta["val"], torch.Tensor) and _is_small(node)


def _has_rows(node: fx.Node, batch: int) -> bool:
    return any(batch in each.shape for each in _values(node))


def _joins_rows(node: fx.Node, batch: int) -> bool:
    """Return whether samples come together in a value: none of its dimensions is theirs any more."""
    read = node.all_input_nodes
    relaid = getattr(node.target, "overloadpacket", None) in _RELAID
    return not relaid and not _has_rows(node, batch) and any(_has_rows(each, batch) for each in read)


def _needs_whole(node: fx.Node, joined: Collection[fx.Node], batch: int) -> bool:
    """Return whether an operator makes something else of terms, or of a micro-batch's rows, than of the whole."""
    packet = getattr(node.target, "overloadpacket", None)
    rows = [each for each in node.all_input_nodes if _has_rows(each, batch)]
    if node.target is operator.getitem:
        return False  # as what it is part of
    if not rows:
        return not _is_termwise(node)
    if _has_rows(node, batch):
        mixes = packet in _ORDERED and _works_along_rows(node, batch)
        return mixes or any(each in joined for each in node.all_input_nodes)
    if packet in _PICKED:
        return _works_along_rows(node, batch)
    return packet not in _ADDED and packet not in _RELAID and node.target not in _EXTREME


def _is_copy(node: fx.Node) -> bool:
    """Return whether a node has the elements of what it reads, of the same type."""
    same = {each.dtype for each in (*_values(node), *_values(node.all_input_nodes[0]))}
    return getattr(node.target, "overloadpacket", None) in _RELAID and len(same) == 1


def _works_along_rows(node: fx.Node, batch: int) -> bool:
    """Return whether an operator works along a dimension of the batch's size."""
    shape = node.all_input_nodes[0].meta["val"].shape
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    dim = given.get("dim", given.get("dims", -1 if "sort" in str(node.target) or "topk" in str(node.target) else 0))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return not dims or any(not isinstance(each, int) or shape[each] == batch for each in dims)


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


def _values(node: fx.Node) -> list[torch.Tensor]:
    found = node.meta.get("val")
    found = list(found) if isinstance(found, tuple | list) else [found]
    return [each for each in found if isinstance(each, torch.Tensor)]


def of_inputs_alone(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that no parameter, buffer or gradient has a part in."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta["desc"], PlainAOTInput):
                found.add(node)
        elif node.op != "output" and all(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _is_small(node: fx.Node) -> bool:
    """Return whether every rank may have all of a value, or of each that an operator makes."""
    found = _values(node)
    return bool(found) and all(each.numel() <= _SMALL for each in found)


def _is_plain(node: fx.Node) -> bool:
    """Return whether an operator is the same wherever and whenever it runs."""
    target = node.target
    if target is operator.getitem:
        return True
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
