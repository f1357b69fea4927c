"""Where and when each node of a local program runs once the program is cut into pipeline stages."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import Graph, Phase
from autopar.rewrite.derived import is_view
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.marks import mark, role

_ATEN = torch.ops.aten
_FEW = 4
"""A product that sums no more terms than this costs no more than writing its result."""

_PRODUCTS = frozenset({"mm", "bmm"})
_LIGHT = frozenset(
    {
        "arange", "zeros", "ones", "full", "empty", "scalar_tensor", "eye", "linspace", "tril_indices", "triu_indices",
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
        "tril", "triu", "cat", "stack", "roll", "flip", "repeat", "constant_pad_nd", "select_scatter", "slice_scatter",
        "fill", "zero",
        "index", "index_select", "index_put", "gather", "scatter", "embedding", "where", "masked_fill", "one_hot",
        "cumsum", "sum", "any", "all", "amax", "amin", "argmax", "max", "min",
        "clone", "copy", "contiguous", "reshape", "lift_fresh_copy", "_to_copy", "convert_element_type",
    }
)  # fmt: skip
"""Operators that move about as many bytes as they compute; elementwise ones and views are known by their tags."""

_CASTS = frozenset({_ATEN._to_copy.default, _ATEN.clone.default, torch.ops.prims.convert_element_type.default})


@dataclass(frozen=True, slots=True)
class Home:
    """A stage's program of one phase."""

    phase: Phase
    stage: int

    def reaches(self, other: Home) -> bool:
        """Return whether what runs here is there in time for `other`: forward goes up the stages, backward down."""
        if self.phase != other.phase:
            return self.phase == "forward"
        return self.stage <= other.stage if self.phase == "forward" else self.stage >= other.stage


@dataclass
class Homes:
    """Homes of a program's nodes; what stages make for themselves has none.

    Those are `shared`: parameters, inputs and other starts, what only views, casts or gathers one parameter, and what
    reads no parameter and costs little (masks, positions, rotary tables).
    """

    graph: fx.Graph
    stage_of: Mapping[str, int]
    needed: Collection[fx.Node]
    forward: Collection[fx.Node]
    given: Collection[fx.Node]
    """What the program returns: it stays where it is made."""

    shared: set[fx.Node]
    of: dict[fx.Node, Home] = field(default_factory=dict)

    def __post_init__(self) -> None:
        moved = []
        for node in self.graph.nodes:
            if node not in self.needed or node in self.shared or node.op == "output":
                continue
            if not is_move(node):
                self.of[node] = Home("forward" if node in self.forward else "backward", self._stage(node))
            else:
                moved.append(node)
        self._place_moves(moved)

    def _stage(self, node: fx.Node) -> int:
        origin = mark(node).origin
        if origin not in self.stage_of:
            raise RewriteError(f"{node.name} belongs to {origin!r}, which has no pipeline stage")
        return self.stage_of[origin]

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the needed nodes that read a value, results not counted."""
        return [user for user in node.users if user in self.needed and user.op != "output"]

    def _place_moves(self, moved: list[fx.Node]) -> None:
        """Give redistributions their homes: where they are read if that is one stage, else where the value is made."""
        follows: dict[fx.Node, int | None] = {}
        for node in reversed(moved):
            stages = {self.of[user].stage if user in self.of else follows.get(user) for user in self.readers(node)}
            kept = node in self.given
            follows[node] = next(iter(stages)) if len(stages) == 1 and not kept else None
        for node in moved:
            source = self.of[node.all_input_nodes[0]]
            stage = follows[node]
            if stage is None or (stage != source.stage and not self._crosses_before(node, stage)):
                stage = source.stage
            self.of[node] = Home(self._phase(node, source, stage), stage)

    def _crosses_before(self, node: fx.Node, stage: int) -> bool:
        """Return whether to send what `node` reads: nothing further along its chain has fewer bytes, or fewer gaps."""
        before = node.all_input_nodes[0]
        if role(before) == "start":
            return False
        cost = (nbytes(before), not is_dense(before.meta["val"]))
        while is_move(node):
            if role(node) != "start" and (nbytes(node), not is_dense(node.meta["val"])) < cost:
                return False
            readers = self.readers(node)
            if len(readers) != 1:
                break
            node = readers[0]
        return True

    def _phase(self, node: fx.Node, source: Home, stage: int) -> Phase:
        if source.phase == "backward":
            return "backward"
        if node in self.forward:
            return "forward" if stage >= source.stage else "backward"
        later = [self.of[user].stage for user in ends(node, self) if user in self.of]
        return "backward" if all(each <= stage for each in later) else "forward"

    def check(self) -> None:
        """Raise if a value is read before it is made.

        Raises:
            RewriteError: the stages are such that a value would have to go back in time.
        """
        for node, home in self.of.items():
            for each in node.all_input_nodes:
                made = self.of.get(each, home)
                if not made.reaches(home):
                    raise RewriteError(
                        f"{node.name} ({home.phase} of stage {home.stage}) reads {each.name}, which "
                        f"{made.phase} of stage {made.stage} makes later"
                    )


def ends(node: fx.Node, homes: Homes) -> list[fx.Node]:
    """Return the operators that read a redistributed value, behind all moves."""
    found: list[fx.Node] = []
    for user in homes.readers(node):
        found += ends(user, homes) if is_move(user) else [user]
    return found


def is_move(node: fx.Node) -> bool:
    """Return whether a node is part of a redistribution: one value in, one out."""
    return node.op == "call_function" and role(node) != "operator" and len(node.all_input_nodes) == 1


def shared_nodes(
    gm: fx.GraphModule, graph: Graph, pinned: Collection[str], whole: Collection[str] = ()
) -> set[fx.Node]:
    """Return the nodes that every stage which reads them makes for itself; not what depends on the buffers `pinned`.

    Placeholders `whole` take parameters, too: made whole before the first micro-batch.
    """
    kinds: dict[str, str] = {**{op.name: op.kind for op in graph.ops}, **dict.fromkeys(whole, "parameter")}
    parameters: set[fx.Node] = set()
    plain: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            kind = kinds.get(node.name)  # none: a sum over micro-batches, which every stage is given
            if node.name not in pinned and kind != "tangent":
                (parameters if kind == "parameter" else plain).add(node)
        elif node.op == "get_attr":
            plain.add(node)
        elif node.op == "call_function":
            inputs = node.all_input_nodes
            if len(inputs) == 1 and inputs[0] in parameters and only_renames(node):
                parameters.add(node)
            elif all(each in plain for each in inputs) and is_light(node):
                plain.add(node)
    return parameters | plain


def only_renames(node: fx.Node) -> bool:
    """Return whether a node that reads one value only views, casts or moves it."""
    return is_move(node) or is_plain_view(node) or node.target in _CASTS


def is_plain_view(node: fx.Node) -> bool:
    """Return whether a node may share the memory of what it reads; it takes no time where it does."""
    return node.target is operator.getitem or is_view(str(node.target))


def is_light(node: fx.Node) -> bool:
    """Return whether an operator costs about as little as reading its inputs, and gives the same wherever it runs."""
    target: Any = node.target
    if is_move(node) or is_plain_view(node):
        return True
    if getattr(target, "namespace", "") == "autopar":
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = target._schema.name.split("::")[1]
    if name in _PRODUCTS:
        return bool(node.all_input_nodes[0].meta["val"].shape[-1] <= _FEW)
    return torch.Tag.pointwise in target.tags or name in _LIGHT


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a tensor's elements."""
    value = node.meta["val"]
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0


def is_dense(value: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a piece of memory without gaps, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(value.shape, value.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def views_back(node: fx.Node) -> Iterable[fx.Node]:
    """Yield the nodes from a view back to what it is a view of: getitems and split lists among them, `node` first."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        yield node
        if not (is_plain_view(node) and len(node.all_input_nodes) == 1):
            return
        node = node.args[0]
    yield node
