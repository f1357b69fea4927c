"""Sums over micro-batches in a program that runs once for each of them.

Localising along the axis in time leaves marks (`over_microbatches`) where a value of the whole batch is read. Some are
results: each micro-batch gives its term, and who runs the program adds them up. Others count inputs (the tokens that
a loss is the mean of, each by the weight of its class): these are computed from all micro-batches' inputs before the
first one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import LazyGraphModule
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.marks import Mark, mark, over_microbatches, role
from autopar.rewrite.partition import ancestors
from autopar.rewrite.random_ops import draws

_RELAID = frozenset(
    {torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default,
     torch.ops.aten.as_strided.default, torch.ops.aten.slice.Tensor}
)  # fmt: skip
"""Operators that may turn any dimension into that of the batch."""

_BLANK = frozenset(
    {torch.ops.aten.new_zeros.default, torch.ops.aten.new_ones.default, torch.ops.aten.new_full.default,
     torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default, torch.ops.aten.full_like.default,
     torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}
)  # fmt: skip
"""Operators whose result does not depend on the values of what they read."""

_MOST_ELEMENTS = 1 << 24
"""Elements up to which tables of positions are computed to see whether they repeat: 0.1 s."""

TOTAL = "total_over_microbatches"
"""Start of the names of placeholders that take a sum over all micro-batches."""


@dataclass(frozen=True)
class Totals:
    """What is summed over all micro-batches before the first runs."""

    program: fx.GraphModule
    """Takes `takes` of one micro-batch, returns its terms."""

    takes: tuple[str, ...]
    """Names of placeholders of the captured program, in the program's order."""

    names: tuple[str, ...]
    """Placeholders of the micro-batch program that take the sums, in the order of the terms."""


def settle(gm: fx.GraphModule, graph: Graph) -> Totals | None:
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


def _settle(gm: fx.GraphModule, graph: Graph) -> Totals | None:
    wanted: list[fx.Node] = []
    for node in gm.graph.find_nodes(op="call_function", target=over_microbatches):
        if _is_result(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        else:
            wanted.append(node)
    if not wanted:
        return None
    for node in wanted:
        trained = [
            each for each in sorted(ancestors([node])) if each.op == "placeholder" and not _is_given(each, graph)
        ]
        if trained:
            raise RewriteError(f"{mark(node).moves or mark(node).origin} needs all micro-batches at once")
    totals = _totals(gm, wanted)
    for node, name in zip(wanted, totals.names, strict=True):
        with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
            start = gm.graph.placeholder(name)
        start.meta = {"val": node.meta["val"], "autopar": Mark(name, "forward")}
        node.replace_all_uses_with(start)
        gm.graph.erase_node(node)
    return totals


def _is_result(node: fx.Node) -> bool:
    """Return whether nothing but the program's caller reads a value, moved or not."""
    return all(
        user.op == "output" or (role(user) in {"move", "start", "wait"} and _is_result(user)) for user in node.users
    )


def _is_given(node: fx.Node, graph: Graph) -> bool:
    return graph.by_name[node.name].kind in {"input", "constant", "buffer"}


def _totals(gm: fx.GraphModule, wanted: list[fx.Node]) -> Totals:
    terms = [node.all_input_nodes[0] for node in wanted]
    needed = sorted(ancestors(terms))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in needed:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[term] for term in terms))
    graph.lint()
    takes = tuple(node.name for node in needed if node.op == "placeholder")
    names = tuple(f"{TOTAL}_{number}" for number in range(len(wanted)))
    return Totals(LazyGraphModule(gm, graph), takes, names)


def _check_cuts(graph: fx.Graph, captured: Graph) -> None:
    """Check that what is cut along time is the same for every micro-batch, as all run the program of the first.

    Values repeated along the batch are. A range is not, but where it is read as places among a micro-batch's own rows.
    """
    for node in graph.nodes:
        dim = node.meta.get("cut_in_time")
        if dim is None:
            continue
        source = node.all_input_nodes[0]
        value = source.meta["val"]
        if isinstance(value, torch.Tensor) and value.stride(dim) == 0:
            continue
        made = sorted(ancestors([source], leaves=_BLANK))
        found = [each for each in made if _has_rows(each, captured)]
        parts = [] if found else _parts(made, source, dim, value.shape[dim] // node.meta["val"].shape[dim])
        if _read_as_own(node):
            parts = [part - number * part.shape[dim] for number, part in enumerate(parts)]
        if any(not torch.equal(part, parts[0]) for part in parts):
            found = [source]
        if found:
            origin = captured.by_name[mark(node).origin]
            raise InfeasibleError(
                f"the batch cannot be cut into micro-batches: {origin.where} differs from micro-batch to micro-batch "
                f"and comes from {found[0].name}, which is whole in each; make it of the inputs, or leave microbatch "
                "and pp out"
            )


def _read_as_own(node: fx.Node) -> bool:
    """Return whether all that read a value, moved or not, take it as places among a micro-batch's own rows."""
    return all(user.meta.get("own_rows") or (role(user) == "move" and _read_as_own(user)) for user in node.users)


def _parts(made: Sequence[fx.Node], source: fx.Node, dim: int, count: int) -> list[torch.Tensor]:
    """Return the `count` parts of a value that comes of nothing but ranges and constants; none of any other.

    `made` is all that it comes of, in order. Parts of others are alike: a row a sample would have come from a table.
    """
    elements = sum(each.meta["val"].numel() for each in made if isinstance(each.meta.get("val"), torch.Tensor))
    drawn = any(draws(each.target) for each in made)
    if drawn or elements > _MOST_ELEMENTS or any(each.op != "call_function" for each in made):
        return []
    values: dict[fx.Node, Any] = {}

    def given(arg: Any) -> Any:
        return (
            values[arg] if isinstance(arg, fx.Node) else torch.device("cpu") if isinstance(arg, torch.device) else arg
        )

    for each in made:
        if each.target in _BLANK:
            values[each] = torch.zeros((), dtype=each.meta["val"].dtype).expand(each.meta["val"].shape)
            continue
        target: Any = each.target
        args, kwargs = fx.node.map_aggregate((each.args, each.kwargs), given)
        values[each] = target(*args, **kwargs)
    return list(values[source].chunk(count, dim))


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
        return captured.by_name[node.name].kind in {"input", "constant", "buffer"}
    shapes = [each.meta["val"].shape for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    return node.target in _RELAID and any(shape and shape[0] not in {1, batch} for shape in shapes)
