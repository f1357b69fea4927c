"""Two micro-batches in one program: while one waits for a collective, the other computes.

    f(a)  reduce(a)  wait(a)  g(a)
becomes
    f(a)  reduce(a)  f(b)  reduce(b)  wait(a)  g(a)  wait(b)  g(b)

Megatron-LM and DeepSpeed (Domino) do this by hand to tensor and expert parallelism, whose collectives every operator
behind them reads: nothing else of one micro-batch could run meanwhile. What depends on no input (gathers of parameters,
tables) is there once for both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar._torch import LazyGraphModule, storage_key
from autopar.rewrite.derived import is_view
from autopar.rewrite.marks import mark, role
from autopar.rewrite.random_ops import OF_SECOND, OF_STEP
from autopar.rewrite.staged import Item

_ADD = torch.ops.aten.add.Tensor
_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.contiguous.default})


@dataclass(frozen=True)
class Interleaving:
    """How the programs of a stage are made to run two micro-batches; remembers what differs between these."""

    inputs: Collection[str]
    """Names of the starts that each micro-batch has its own of."""

    own_values: set[str] = field(default_factory=set)
    """Values, given by programs so far, that each micro-batch has its own of."""

    def __call__(
        self, gm: fx.GraphModule, takes: Sequence[Item], gives: Sequence[Item]
    ) -> tuple[fx.GraphModule, tuple[Item, ...], tuple[Item, ...]]:
        """Return the program of two micro-batches, what it takes and what it gives; programs come as they run.

        Waits have to be at the first use of what they wait for, and nothing may write into what others read yet.
        """
        own = self._own(gm.graph, takes)
        return _Pair(gm, tuple(takes), tuple(gives), own, self).write()

    def _own(self, graph: fx.Graph, takes: Sequence[Item]) -> set[fx.Node]:
        """Return the nodes that each micro-batch has its own of."""
        found = {
            node
            for node, item in zip(graph.find_nodes(op="placeholder"), takes, strict=True)
            if item.name in {"start": self.inputs, "value": self.own_values}.get(item.kind, ())
        }
        for node in graph.nodes:
            if node.op == "call_function" and (_draws(node) or any(each in found for each in node.all_input_nodes)):
                found.add(node)
        return found


def _draws(node: fx.Node) -> bool:
    """Return whether an operator draws other numbers in each micro-batch."""
    return getattr(node.target, "namespace", "") == "autopar" and int(node.args[0]) < OF_STEP  # type: ignore[arg-type]


@dataclass
class _Pair:
    gm: fx.GraphModule
    takes: tuple[Item, ...]
    gives: tuple[Item, ...]
    own: set[fx.Node]
    how: Interleaving

    graph: fx.Graph = field(init=False, default_factory=fx.Graph)
    first: dict[fx.Node, fx.Node] = field(init=False, default_factory=dict)
    second: dict[fx.Node, fx.Node] = field(init=False, default_factory=dict)
    """Of each node, its copies."""

    sums: dict[fx.Node, fx.Node | None] = field(init=False, default_factory=dict)
    """Of gradients that both micro-batches give one of, their sum."""

    joined: set[fx.Node] = field(init=False, default_factory=set)
    """What brings such sums to their places."""

    memory: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """What stands for the memory of the second micro-batch, by that of the first."""

    shared: set[int] = field(init=False)
    """Memory that both micro-batches see."""

    def __post_init__(self) -> None:
        """Note what memory is shared."""
        values = [node.meta.get("val") for node in self.gm.graph.nodes if node not in self.own]
        self.shared = {storage_key(each) for each in values if isinstance(each, torch.Tensor)}

    def write(self) -> tuple[fx.GraphModule, tuple[Item, ...], tuple[Item, ...]]:
        """Return the program with what it takes and gives."""
        (output,) = self.gm.graph.find_nodes(op="output")
        results: Sequence[fx.Node] = output.args[0]
        ends = [self._end(item, node) for item, node in zip(self.gives, results, strict=True)]
        takes = self._placeholders()
        for segment in self._segments():
            for node in segment:
                if node not in self.joined:
                    self.first[node] = self.graph.node_copy(node, self.first.__getitem__)
            for node in segment:
                self._again(node)
        gives, made = self._results(results, ends)
        self.graph.output(tuple(made))
        self.graph.lint()
        return LazyGraphModule(self.gm, self.graph), takes, gives

    def _end(self, item: Item, result: fx.Node) -> fx.Node | None:
        """Return the gradient that collectives bring to its place, which a result is: of both it is summed before.

        Other gradients are given twice, and summed by who runs the program; `None` for those and all else.
        """
        if item.kind != "gradient" or item.name in self.how.inputs:
            return None
        node, chain, users = result, [], {*self.gm.graph.find_nodes(op="output")}
        while node in self.own and len(node.all_input_nodes) == 1 and users.issuperset(node.users):
            if not (mark(node).gradient or node.target in _COPIES):
                break
            chain.append(node)
            users.add(node)
            node = node.all_input_nodes[0]
        if result in self.own and all(role(each) != "start" for each in chain):
            return None
        self.joined.update(chain)
        self.sums[node] = None
        return node

    def _placeholders(self) -> tuple[Item, ...]:
        takes = []
        for turn in (0, 1):
            for node, item in zip(self.gm.graph.find_nodes(op="placeholder"), self.takes, strict=True):
                if turn and node not in self.own:
                    self.second[node] = self.first[node]
                    continue
                name = _second_name(str(node.target)) if turn else str(node.target)
                made = self.graph.placeholder(name)
                made.meta = self._twin_meta(node) if turn else dict(node.meta)
                (self.second if turn else self.first)[node] = made
                takes.append(_second(item) if turn else item)
        return tuple(takes)

    def _segments(self) -> Iterator[list[fx.Node]]:
        """Yield the program in parts that begin with a wait which the other micro-batch can compute behind."""
        part: list[fx.Node] = []
        computes = False
        for node in self.gm.graph.nodes:
            if node.op in {"placeholder", "output"}:
                continue
            mine = node in self.own and node not in self.joined
            if mine and computes and role(node) == "wait":
                yield part
                part, computes = [], False
            part.append(node)
            computes |= mine and role(node) == "operator" and not is_view(str(node.target))
        yield part

    def _again(self, node: fx.Node) -> None:
        """Append a node for the second micro-batch, and the sum of both where there is to be one."""
        if node in self.joined:
            self.first[node] = self.graph.node_copy(node, lambda each: self.sums.get(each) or self.first[each])
            self.second[node] = self.first[node]
        elif node in self.own:
            made = self.second[node] = self.graph.node_copy(node, self.second.__getitem__)
            made.meta = self._twin_meta(node)
            if _draws(node):
                made.args = (int(made.args[0]) + OF_SECOND, *made.args[1:])  # type: ignore[arg-type]
        else:
            self.second[node] = self.first[node]
        if node in self.sums:
            self._sum(node)

    def _summed(self, node: fx.Node) -> fx.Node:
        """Return the sum of both micro-batches' gradients; of one that the program takes as it is, make it."""
        return self.sums[node] or self._sum(node)

    def _sum(self, node: fx.Node) -> fx.Node:
        made = self.graph.call_function(_ADD, (self.first[node], self.second[node]))
        value: torch.Tensor = node.meta["val"]
        made.meta = {**node.meta, "val": torch.empty_like(value), "autopar": replace(mark(node), role="operator")}
        self.sums[node] = made
        return made

    def _results(
        self, results: Sequence[fx.Node], ends: Sequence[fx.Node | None]
    ) -> tuple[tuple[Item, ...], tuple[fx.Node, ...]]:
        found: list[tuple[Item, fx.Node]] = []
        for turn, copies in enumerate((self.first, self.second)):
            for item, node, end in zip(self.gives, results, ends, strict=True):
                if end is not None:
                    if not turn:
                        found.append((item, self._summed(end) if node is end else copies[node]))
                elif item.kind != "value":
                    found.append((_second(item) if turn else item, copies[node]))
                elif not turn:
                    found.append((item, copies[node]))
                elif node in self.own:
                    self.how.own_values.add(item.name)
                    found.append((_second(item), copies[node]))
        return tuple(item for item, _ in found), tuple(node for _, node in found)

    def _twin_meta(self, node: fx.Node) -> dict[str, object]:
        """Return what is known of the copy of a node: its values are in memory of their own."""
        return {**node.meta, "val": self._elsewhere(node.meta.get("val"))}

    def _elsewhere(self, value: object) -> object:
        if isinstance(value, tuple | list):
            return type(value)(map(self._elsewhere, value))
        if not isinstance(value, torch.Tensor):
            return value
        key = storage_key(value)
        if key in self.shared:
            return value
        if key not in self.memory:
            size = value.untyped_storage().nbytes()
            self.memory[key] = value.new_empty((int(size),), dtype=torch.uint8)
        whole = self.memory[key]
        whole = whole[: whole.numel() // value.itemsize * value.itemsize].view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _second(item: Item) -> Item:
    """Return the item of the second micro-batch: of a value another name, for programs keep values by it."""
    return Item(item.kind, _second_name(item.name) if item.kind == "value" else item.name, turn=1)


def _second_name(name: str) -> str:
    """Return the name that the second micro-batch's value has in programs of two."""
    return f"{name}__second"
