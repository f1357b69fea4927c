"""Which values are parameters on their way in, which are gradients on their way out, and what views are views of.

Their redistribution waits for nothing and nothing waits for it, so it can run
behind computation: a gather is issued ahead, a gradient's reduction left running.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Op, Ref, once_per_graph

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "t.default", "transpose.int", "permute.default",
        "expand.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "slice.Tensor",
        "select.int", "split.Tensor", "split_with_sizes.default", "unbind.int", "alias.default", "detach.default",
        "as_strided.default", "chunk.default", "narrow.default", "view_as_real.default", "unfold.default",
        "_reshape_alias.default", "view.dtype",
        "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "diagonal.default", "lift_fresh_copy.default",
        "view_as_complex.default",
    )
)  # fmt: skip
"""Operators that only describe memory anew: no bytes move, nothing is launched on a device."""

CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default", "aten.clone.default"})
"""Operators that give the same elements, in another type perhaps, in memory of their own."""

_COMPUTES = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear", "aten._grouped_mm", "aten.convolution",
    "transformers.grouped_mm_fallback", "aten.embedding", "aten.topk", "aten.sort", "aten.scatter_add",
    "autopar_ops.lstm_layer", "autopar_ops.rnn_layer", "autopar_ops.scan",
)  # fmt: skip

ENDS_OF_EXPERTS = 2
"""Which of the tensors that a product of tokens with their experts reads says where each expert's tokens end."""

_SUMS = frozenset({"aten.add.Tensor"})

_PERMUTES = frozenset({"aten.t.default", "aten.transpose.int", "aten.permute.default"})

LAST_STEPS = frozenset(
    f"aten.{name}"
    for name in ("_to_copy.default", "t.default", "transpose.int", "view.default", "reshape.default", "permute.default")
)
"""Operators that run behind the wait for a gradient's reduction, however late that is, if the gradient then leaves."""


def is_view(op: Op) -> bool:
    """Return whether the operator's outputs share the memory of its first input."""
    return op.target in VIEWS


@once_per_graph
def base_of(graph: Graph) -> dict[tuple[str, int], tuple[str, int]]:
    """Return, for each value, the value whose memory it shares (itself, if it is no view)."""
    base: dict[tuple[str, int], tuple[str, int]] = {}
    for op in graph.ops:
        for index in range(len(op.outputs)):
            own = (op.name, index)
            if op.kind == "call" and is_view(op) and op.refs:
                ref = op.refs[0]
                base[own] = base[ref.op, ref.index]
            else:
                base[own] = own
    return base


def computes(op: Op) -> bool:
    """Return whether an operator is a kernel that others are not part of: a product, attention, a look-up, a sort."""
    return op.target.startswith(_COMPUTES) or is_attention(op)


def is_attention(op: Op) -> bool:
    """Return whether an operator is a kernel of attention, forward or backward."""
    return "._scaled_dot_product" in op.target


def order_of(op: Op) -> tuple[int, ...] | None:
    """Return which dimension of its input each of a transposed or permuted value is; `None` of other operators."""
    if op.target not in _PERMUTES or op.outputs[0] is None:
        return None
    dims = len(op.outputs[0].shape)
    if op.target == "aten.permute.default":
        return tuple(int(each) % dims for each in op.args[1])  # type: ignore[union-attr, arg-type]
    order = list(range(dims))
    if dims > 1:
        a, b = (int(each) % dims for each in op.args[1:3]) if len(op.args) > 1 else (0, 1)  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return tuple(order)


@once_per_graph
def parameter_like(graph: Graph) -> frozenset[str]:
    """Return the operators that only reshape or cast one parameter or buffer, those included."""
    found: set[str] = set()
    for op in graph.ops:
        passes = is_view(op) or op.target in CASTS
        if op.kind in {"parameter", "buffer"} or (passes and len(op.refs) == 1 and op.refs[0].op in found):
            found.add(op.name)
    return frozenset(found)


@once_per_graph
def gradient_like(graph: Graph) -> frozenset[str]:
    """Return the operators whose value only becomes parameters' gradients, by reshaping, casting and adding."""
    read_by_output: dict[str, set[str]] = {}
    for output in graph.outputs:
        if output.ref is not None:
            read_by_output.setdefault(output.ref.op, set()).add(output.kind)
    found: set[str] = set()
    for op in reversed(graph.ops):
        kinds = read_by_output.get(op.name, set())
        users = graph.users[op.name]
        if op.phase != "backward" or (not kinds and not users) or kinds - {"gradient"}:
            continue
        if all(user in found and passes(graph.by_name[user]) for user in users):
            found.add(op.name)
    return frozenset(found)


@once_per_graph
def of_parameters(graph: Graph) -> frozenset[str]:
    """Return the operators that ranks which split the batch need not repeat: each may do a part, for all samples.

    Casts of parameters and of their gradients, products that make the gradients of several matrices (experts'), and
    what has a parameter that outweighs everything else there.
    """
    starts, ends = parameter_like(graph), gradient_like(graph)

    def is_shared(op: Op) -> bool:
        several = any(meta is not None and len(meta.shape) > 2 for meta in op.outputs)
        return op.name in starts or (op.name in ends and (several or passes(op))) or outweighs(graph, op)

    return frozenset(op.name for op in graph.ops if op.kind == "call" and is_shared(op))


def outweighs(graph: Graph, op: Op) -> bool:
    """Return whether an operator's parameters, or the gradient it makes, outweigh all else that it reads and makes."""
    starts, makes = parameter_like(graph), op.name in gradient_like(graph)
    read = [graph.meta(ref).nbytes for ref in op.refs]
    made = sum(meta.nbytes for meta in op.outputs if meta is not None)
    heavy = made if makes else sum(size for ref, size in zip(op.refs, read, strict=True) if ref.op in starts)
    return sum(read) + made < 2 * heavy


@once_per_graph
def gradient_values(graph: Graph) -> frozenset[Ref]:
    """Return the values of backward that only become parameters' gradients, whatever their operators make beside them.

    A layer norm's or convolution's backward gives its parameters' gradients beside that of its input, which goes on; in
    16 bits they are cast before they leave.
    """
    ends, elsewhere = gradient_like(graph), {o.ref for o in graph.outputs if o.kind != "gradient"}
    read: set[Ref] = {o.ref for o in graph.outputs if o.ref is not None}
    for op in graph.ops:
        read.update(op.refs)
        if op.name not in ends or not passes(op):
            elsewhere.update(op.refs)
    return frozenset(ref for ref in read - elsewhere if graph.by_name[ref.op].phase == "backward")


@once_per_graph
def last_steps(graph: Graph) -> frozenset[str]:
    """Return the operators of backward that only cast or view what then leaves it as a parameter's gradient."""
    kinds: dict[str, set[str]] = {}
    for output in graph.outputs:
        if output.ref is not None:
            kinds.setdefault(output.ref.op, set()).add(output.kind)
    found: set[str] = set()
    for op in reversed(graph.ops):
        users = graph.users[op.name]
        known = op.phase == "backward" and op.target in LAST_STEPS and len(op.refs) == 1
        leaves_here = kinds.get(op.name, set()) <= {"gradient"} and (users or op.name in kinds)
        if known and leaves_here and all(user in found for user in users):
            found.add(op.name)
    return frozenset(found)


def passes(op: Op) -> bool:
    """Return whether an operator gives what it reads as it is, in another shape or type, or summed."""
    return is_view(op) or op.target in CASTS or op.target in _SUMS
