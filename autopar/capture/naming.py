"""Names of operators that say only what they are and where they stand: equal programs have equal names, however made.

torch numbers nodes as it makes them, also those that are dropped later; here they are counted in the program's order.
"""

from __future__ import annotations

import builtins
import keyword
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.ir.graph import Arg, Op, OpKind, Output, Ref

_KINDS: dict[OpKind, str] = {
    "parameter": "primals",
    "buffer": "primals",
    "input": "primals",
    "tangent": "tangents",
    "constant": "constant",
}


def names_in_order(ops: Sequence[Op]) -> dict[str, str]:
    """Return the new name of each operator: `mm`, `mm_1`, ... as fx counts, inputs from 1."""
    seen: Counter[str] = Counter()
    taken: set[str] = set()
    names: dict[str, str] = {}
    for op in ops:
        base = _KINDS.get(op.kind) or _base(op.target)
        count = seen[base] + (op.kind != "call" or keyword.iskeyword(base) or hasattr(builtins, base))
        while (name := f"{base}_{count}" if count else base) in taken:
            count += 1
            seen[base] += 1
        seen[base] += 1
        taken.add(name)
        names[op.name] = name
    return names


def renamed_ops(ops: Sequence[Op], names: Mapping[str, str]) -> list[Op]:
    """Return the operators under other names, and reading from these."""

    def swap(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names[arg.op], arg.index)
        return tuple(map(swap, arg)) if isinstance(arg, tuple) else arg

    return [
        replace(
            op,
            name=names[op.name],
            args=tuple(map(swap, op.args)),
            kwargs=tuple((key, swap(value)) for key, value in op.kwargs),
        )
        for op in ops
    ]


def renamed_outputs(outputs: Sequence[Output], names: Mapping[str, str]) -> list[Output]:
    """Return the results of operators under other names; a gradient's and a mutation's name is an operator's too."""
    return [
        replace(
            each,
            name=each.name if each.kind == "output" else names[each.name],
            ref=each.ref and Ref(names[each.ref.op], each.ref.index),
        )
        for each in outputs
    ]


def rename_nodes(joint: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Name the nodes of a program as its operators are; those that only pick one of several results as fx does.

    Raises:
        RuntimeError: fx does not take a name.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        name = names.get(node.name)
        args, kwargs = (fx.map_arg(each, made.__getitem__) for each in (node.args, node.kwargs))
        new = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        new.meta = node.meta
        if name is not None and new.name != name:
            raise RuntimeError(f"fx calls the node {node.name} {new.name} where {name} was asked for")
        made[node] = new
    joint.graph = graph


def _base(target: str) -> str:
    """Return `mm` of `aten.mm.default`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target
