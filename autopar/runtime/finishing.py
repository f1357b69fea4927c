"""What is done with a stage's summed gradients: each reduction is issued as soon as its sums are complete.

The program from sums to gradients is cut at its waits. What leads to one collective, or to several that travel
together, is a part of its own, which runs when the last micro-batch has added to all that it takes, so that the
reduction is under way while the rest of that micro-batch computes. Waits, and what follows them, come at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import LazyGraphModule

_WAIT = torch.ops._c10d_functional.wait_tensor.default

Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class _Part:
    run: Run
    takes: tuple[str, ...]
    gives: tuple[fx.Node, ...]


class Finishing:
    """One stage's finishing program, run part by part."""

    def __init__(
        self, gm: fx.GraphModule, takes: Sequence[str], gives: Sequence[str], compile_boxed: Callable[..., Run]
    ) -> None:
        """Cut and compile `gm`, which takes the sums of the gradients `takes` and returns the gradients `gives`."""
        self.takes = tuple(takes)
        self._gives = tuple(gives)
        name_of = dict(zip(gm.graph.find_nodes(op="placeholder"), takes, strict=True))
        (output,) = gm.graph.find_nodes(op="output")
        results = tuple(output.args[0])
        early = _early(gm.graph)
        self._parts: list[_Part] = []
        for nodes in _connected(early):
            given = [node for node in nodes if node in name_of]
            ends = [node for node in nodes if node not in name_of and any(user not in nodes for user in node.users)]
            if ends:
                run = compile_boxed(_cut(gm, given, nodes, ends))
                self._parts.append(_Part(run, tuple(name_of[node] for node in given), tuple(ends)))
        self._of = {name: part for part in self._parts for name in part.takes}
        made = [node for part in self._parts for node in part.gives]
        late = [node for node in gm.graph.nodes if node.op not in {"placeholder", "output"} and node not in early]
        plain = [node for node in name_of if node in results or any(user in late for user in node.users)]
        self._last_takes = (*made, *plain)
        self._name_of = name_of
        self._plain = {name_of[node] for node in plain}
        self._last = compile_boxed(_cut(gm, self._last_takes, [*self._last_takes, *late], results))
        self._held: dict[str, torch.Tensor] = {}
        self._made: dict[fx.Node, torch.Tensor] = {}

    def reset(self) -> None:
        """Forget what a step that failed left behind."""
        self._held.clear()
        self._made.clear()

    def give(self, name: str, value: torch.Tensor) -> None:
        """Take a sum that is complete, and issue the reduction that waited for it last."""
        self._held[name] = value
        part = self._of.get(name)
        if part is not None and all(each in self._held for each in part.takes):
            self._made.update(zip(part.gives, part.run([self._held[each] for each in part.takes]), strict=True))
            for each in part.takes:
                if each not in self._plain:
                    del self._held[each]

    def end(self) -> Mapping[str, torch.Tensor]:
        """Wait for the reductions; return the gradients in their parameters' layout."""
        held, made = self._held, self._made
        args = [made[node] if node in made else held[self._name_of[node]] for node in self._last_takes]
        self._held, self._made = {}, {}
        del held, made
        return dict(zip(self._gives, self._last(args), strict=True))


def _early(graph: fx.Graph) -> list[fx.Node]:
    """Return what depends on no wait, placeholders included."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        computes = node.op == "call_function" and node.target is not _WAIT and node.all_input_nodes
        if node.op == "placeholder" or (computes and all(each in found for each in node.all_input_nodes)):
            found[node] = None
    return list(found)


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes in groups that share no value, each in order, groups in the order of their first collective."""
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        merged = [node]
        for each in {id(group[before]): group[before] for before in node.all_input_nodes if before in group}.values():
            merged += each
        for member in merged:
            group[member] = merged
    order = {node: place for place, node in enumerate(nodes)}
    found = {id(each): sorted(each, key=order.__getitem__) for each in group.values()}
    return sorted(found.values(), key=lambda each: order[each[-1]])


def _cut(
    gm: fx.GraphModule, given: Sequence[fx.Node], nodes: Sequence[fx.Node], ends: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return the program that makes `ends` of `given` by `nodes`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[each] for each in ends))
    graph.lint()
    return LazyGraphModule(gm, graph)
