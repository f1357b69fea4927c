"""Sums over micro-batches in a program that runs once for each of them.

Localising along the axis in time leaves marks (`over_microbatches`) where a value of the whole batch is read. Some are
results: each micro-batch gives its term, and who runs the program adds them up. Others count inputs (the tokens that
a loss is the mean of, each by the weight of its class): these are computed from all micro-batches' inputs before the
first one runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar._torch import LazyGraphModule
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatches import OWN
from autopar.ir.placement import Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.rewrite.alike import BLANK, Values, are_alike, has_gathered, is_table
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.marks import Mark, mark, over_microbatches, role
from autopar.rewrite.partition import ancestors

_RELAID = frozenset(
    {torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default,
     torch.ops.aten.as_strided.default, torch.ops.aten.slice.Tensor}
)  # fmt: skip
"""Operators that may turn any dimension into that of the batch."""

TOTAL = "total_over_microbatches"
"""Start of the names of placeholders that take a sum over all micro-batches."""


@dataclass(frozen=True)
class Totals:
    """What is summed over all micro-batches before the first runs: one of several such programs, in turn.

    The mean of a batch's weights is one, and what they deviate from it on average is one that takes the first.
    """

    program: fx.GraphModule
    """Takes `takes` of one micro-batch, returns its terms."""

    takes: tuple[str, ...]
    """Names of placeholders of the captured program, and of earlier sums, in the program's order."""

    names: tuple[str, ...]
    """Placeholders of the micro-batch program that take the sums, in the order of the terms."""

    reduces: tuple[str, ...]
    """How the terms of each are joined: `sum`, `max` or `min`."""


def settle(gm: fx.GraphModule, graph: Graph) -> tuple[Totals, ...]:
    """Replace every mark in the program by its term or by a placeholder for the sum; return how those sums are made.

    Raises:
        InfeasibleError: a constant has a row for each sample, and so would be another in each micro-batch.
        RewriteError: a value is needed that only all micro-batches together give.
    """
    _check_cuts(gm.graph, graph)
    totals = _settle(gm, graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return totals


def _settle(gm: fx.GraphModule, graph: Graph) -> tuple[Totals, ...]:
    wanted: list[fx.Node] = []
    for node in gm.graph.find_nodes(op="call_function", target=over_microbatches):
        if _is_result(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        else:
            wanted.append(node)
    for node in wanted:
        trained = [
            each for each in sorted(ancestors([node])) if each.op == "placeholder" and not _is_given(each, graph)
        ]
        if trained:
            raise RewriteError(f"{mark(node).moves or mark(node).origin} needs all micro-batches at once")
    names = {node: f"{TOTAL}_{number}" for number, node in enumerate(wanted)}
    totals = tuple(_totals(gm, each, names) for each in _in_turn(wanted))
    for node, name in names.items():
        with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
            start = gm.graph.placeholder(name)
        start.meta = {"val": node.meta["val"], "autopar": Mark(name, "forward")}
        for user in list(node.users):
            # Whoever runs the program adds up what it returns, as where nothing else reads it.
            user.replace_input_with(node, node.all_input_nodes[0] if _is_returned(user) else start)
        gm.graph.erase_node(node)
    return totals


def _is_result(node: fx.Node) -> bool:
    """Return whether nothing but the program's caller reads a value, moved or not."""
    return all(map(_is_returned, node.users))


def _is_returned(user: fx.Node) -> bool:
    return user.op == "output" or (role(user) in {"move", "start", "wait"} and _is_result(user))


def _is_given(node: fx.Node, graph: Graph) -> bool:
    return graph.by_name[node.name].kind in {"input", "constant", "buffer"}


def _in_turn(wanted: list[fx.Node]) -> list[list[fx.Node]]:
    """Return the marks whose sums may be made at once, those behind sums that they read."""
    turn: dict[fx.Node, int] = {}
    for node in wanted:
        turn[node] = 1 + max((turn[each] for each in ancestors([node]) if each in turn), default=-1)
    return [[node for node in wanted if turn[node] == number] for number in range(max(turn.values(), default=-1) + 1)]


def _totals(gm: fx.GraphModule, wanted: list[fx.Node], names: Mapping[fx.Node, str]) -> Totals:
    """Return the program of some marks' terms, in which earlier ones stand for their sums."""
    terms = [node.all_input_nodes[0] for node in wanted]
    needed = sorted(ancestors(terms, (over_microbatches,)))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    takes = []
    # A mark that is left here is one of those wanted: what is only returned has none by now.
    for node in sorted(needed, key=lambda each: each.op != "placeholder" and each not in names):
        if node.op == "placeholder" or node in names:
            takes.append(names.get(node, node.name))
            copies[node] = graph.placeholder(takes[-1])
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[term] for term in terms))
    graph.lint()
    reduces = tuple(node.meta.get("reduce", "sum") for node in wanted)
    return Totals(LazyGraphModule(gm, graph), tuple(takes), tuple(names[node] for node in wanted), reduces)


@dataclass(frozen=True, slots=True)
class Cut:
    """A value that is whole in every micro-batch, where each takes its part of it."""

    source: fx.Node
    dim: int
    count: int
    origin: str
    """Name of the operator that reads the part."""

    is_places: bool
    """Whether it is read as places among a micro-batch's own rows."""

    begins: bool
    """Whether it is added to such places: where each sample's rows begin."""


def cuts_in_time(joint: fx.GraphModule, graph: Graph, follow: Mapping[str, Strategy], count: int) -> dict[Cut, None]:
    """Return what `count` micro-batches will cut if operators do along time what `follow` says, in program order.

    `follow` is by representative. Parts of several runs are left out.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    found: dict[Cut, None] = {}
    for op in graph.ops:
        mine = follow[graph.representative(op.name)]
        for ref, need in zip(op.refs, mine.inputs, strict=True):
            have = follow[graph.representative(ref.op)].outputs[ref.index]
            if graph.by_name[ref.op].kind == "input" or not isinstance(have, Replicate):
                continue
            if isinstance(need, Shard) and need.outer == 1:
                source = _output(nodes[ref.op], ref.index)
                own = mine.lowering == OWN and _may_be_places(source)
                found[Cut(source, need.dim, count, op.name, own, own and op.target == "aten.add.Tensor")] = None
    return found


def _output(node: fx.Node, index: int) -> fx.Node:
    """Return the node of one of an operator's values."""
    if not isinstance(node.meta.get("val"), tuple | list):
        return node
    return next(each for each in node.users if each.target is operator.getitem and each.args[1] == index)


def _may_be_places(source: fx.Node) -> bool:
    """Return whether a value holds whole numbers: others, read beside own rows, only have to be alike."""
    value = source.meta["val"]
    return not (value.is_floating_point() or value.is_complex())


def _check_cuts(graph: fx.Graph, captured: Graph) -> None:
    cuts = []
    for node in graph.nodes:
        count = node.meta.get("cut_in_time")
        if count is not None:
            is_slice = node.target is torch.ops.aten.slice.Tensor
            own = is_slice and _read_as_own(node) and _may_be_places(node.all_input_nodes[0])
            begins = own and all(each.target is torch.ops.aten.add.Tensor for each in _readers(node))
            cuts.append(Cut(node.all_input_nodes[0], node.args[1], count, mark(node).origin, own, begins))
    require_alike(cuts, captured)


def require_alike(cuts: Iterable[Cut], captured: Graph) -> None:
    """Check that what is cut along time is the same for every micro-batch, as all run the program of the first.

    Values repeated along the batch are. A range is not, but where it is read as places among a micro-batch's own rows,
    or added to such: then it says where each sample's rows begin.

    Raises:
        InfeasibleError: a value is not, with what it comes from.
    """
    values = Values()
    with torch.device("cpu"):  # whatever device the caller builds models on
        _require_alike(cuts, captured, values)


def _require_alike(cuts: Iterable[Cut], captured: Graph, values: Values) -> None:
    for cut in cuts:
        source, dim = cut.source, cut.dim
        value = source.meta["val"]
        if isinstance(value, torch.Tensor) and value.stride(dim) == 0:
            continue
        made = sorted(_made_of(source))
        parts = values.parts(source, made, dim, cut.count)
        if parts is None:
            found = [each for each in made if _has_rows(each, captured)]
        else:
            if cut.is_places:
                rows = int((parts[1] - parts[0]).flatten()[0]) if cut.begins else parts[0].shape[dim]
                parts = [part - number * rows for number, part in enumerate(parts)]
            found = [] if are_alike(parts) else [*filter(_is_named, made), source]
            if found and has_gathered(made):
                found = [each for each in made if _has_rows(each, captured)]
        if found:
            origin = captured.by_name[cut.origin]
            raise InfeasibleError(
                f"the batch cannot be cut into micro-batches: {origin.where} differs from micro-batch to micro-batch "
                f"and comes from {_name(found[0], captured)}, which is whole in each; make it of the inputs, or leave "
                "microbatch and pp out"
            )


def _made_of(source: fx.Node) -> set[fx.Node]:
    """Return the nodes that a value comes of, itself included: not what tables and blank values are made of."""
    found: set[fx.Node] = set()
    todo = [source]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if node.target in BLANK or is_table(node) else node.all_input_nodes
    return found


def _is_named(node: fx.Node) -> bool:
    return node.op == "placeholder"


def _name(node: fx.Node, captured: Graph) -> str:
    """Return the user's name of a parameter, buffer or input; a value's own where it has none."""
    op = captured.by_name.get(node.name)
    if op is not None and op.kind == "input":
        return f"{op.target} (an input whose first dimension is not the batch)"
    return op.target if op is not None and op.kind in {"parameter", "buffer"} else node.name


def _read_as_own(node: fx.Node) -> bool:
    """Return whether all that read a value, moved or not, take it as places among a micro-batch's own rows."""
    return all(each.meta.get("own_rows") for each in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a value where it is wanted, moves left out."""
    for user in node.users:
        if role(user) == "move" and not user.meta.get("own_rows"):
            yield from _readers(user)
        else:
            yield user


def _has_rows(node: fx.Node, captured: Graph) -> bool:
    """Return whether a node brings in a row for each sample: a table of the batch's length, or another one laid out so.

    A table without such a dimension is the same for all samples, however it is repeated or looked up.
    """
    value, batch = node.meta.get("val"), captured.batch_size
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != batch or batch == 1:
        return False
    if node.op == "get_attr":
        return True
    if node.op == "placeholder":
        return captured.by_name[node.name].kind in {"input", "constant", "buffer", "parameter"}
    shapes = [each.meta["val"].shape for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    return node.target in _RELAID and any(shape and shape[0] not in {1, batch} for shape in shapes)
