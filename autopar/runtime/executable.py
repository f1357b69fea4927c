"""A graph as a plain Python function, with as little as possible between it and the operators.

`fx.GraphModule` looks operators up by name at every call and keeps its arguments
alive. Here operators are bound once, down to what torch's dispatcher is entered
by; every value is dropped after its last use; and a program may take its
arguments as a list that it empties, so that nobody else holds them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from autopar._torch import direct_call
from autopar.ir.tasks import issuing, waiting

_GROUPED = {"_c10d_functional": 1, "autopar_direct": 1, "autopar_experts": 1, "autopar_levels": 3}
"""Of the operators whose last arguments name process groups: how many do."""


def _group_norm(value: torch.Tensor, *others: Any) -> Any:
    """Return the normalised value, its mean and its deviation, however the value lies in memory."""
    return torch.ops.aten.native_group_norm.default(value.contiguous(memory_format=_order(value)), *others)


def _group_norm_backward(gradient: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
    """Return the gradients, however the gradient of the result and the value lie in memory."""
    order = _order(value)
    gradient, value = gradient.contiguous(memory_format=order), value.contiguous(memory_format=order)
    return torch.ops.aten.native_group_norm_backward.default(gradient, value, *others)


def _order(value: torch.Tensor) -> torch.memory_format:
    last = value.dim() == 4 and value.device.type == "cpu" and not value.is_contiguous()
    channels_last = last and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


WHATEVER_STRIDES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
}
"""What runs for views, and for kernels that read memory as it lies: some kernels stride their results in another way
than they do on the fake tensors of the capture (backward of layer norm and of a mean squared error, of permuted
inputs). A view may be none then, and autograd saw no need of the copy that it would have made. It costs no more."""

Compiled = Callable[..., Sequence[Any]]
"""A program as a function."""


Ranges = Callable[[str], AbstractContextManager[Any]]
"""Makes the context in which something named runs: a profiler's range."""


Taken = Mapping[int, Callable[[torch.Tensor], None]]
"""Who takes a result as soon as it is made, by its place among the results; the program then returns `None` for it."""


def place_constants(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return the program, whose constants are on the device where it runs: they were captured on the CPU."""
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        setattr(gm.get_submodule(path), name, _attribute(gm, str(node.target)).to(device))
    return gm


def compile_graph(
    gm: fx.GraphModule,
    groups: Mapping[str, str],
    *,
    boxed: bool,
    ranges: Ranges | None = None,
    taken: Taken | None = None,
) -> Compiled:
    """Return a function of the graph's placeholders (boxed: of one list of them, which it empties).

    `groups` gives the process group's name for each mesh axis that the graph's collectives name. With `ranges`, what
    the program does runs in contexts named as in a plan's timeline. The function's attribute `collectives` says on
    which line of its source which collective is issued or waited for.
    """
    source = _Source(gm, groups)
    ranged = _Ranged(source, ranges)
    collectives: dict[int, str] = {}
    names = [source.name(node) for node in gm.graph.find_nodes(op="placeholder")]
    (output,) = gm.graph.find_nodes(op="output")
    results = tuple(None if at in (taken or {}) else each for at, each in enumerate(output.args[0]))
    handed: dict[fx.Node, list[str]] = {}
    for at, take in (taken or {}).items():
        if isinstance(output.args[0][at], fx.Node):
            handed.setdefault(output.args[0][at], []).append(source.constant(take))
    last = _last_uses(gm.graph, {each for each in results if isinstance(each, fx.Node)})
    body = [f"    {', '.join(names)}, = args", "    args.clear()"] if boxed and names else []
    for node in gm.graph.nodes:
        if node.op == "output":
            body += ranged.end()
            body.append(f"    return {source.text(results)}")
        elif node.op == "get_attr":
            body.append(f"    {source.name(node)} = {source.constant(_attribute(gm, str(node.target)))}")
        elif node.op == "call_function":
            body += ranged.before(node)
            body.append(f"    {source.name(node)} = {source.call(node)}")
            if "collective" in node.meta:
                collectives[len(body) + 1] = node.meta["collective"]  # the head is line 1
        body += [f"    {take}({source.name(node)})" for take in handed.get(node, ())]
        dropped = [source.name(each) for each in last.get(node, ()) if node.op != "output"]
        if dropped:
            body.append(f"    del {', '.join(dropped)}")
    head = "def program(args):" if boxed else f"def program({', '.join(names)}):"
    space: dict[str, Any] = dict(source.constants)
    exec(compile("\n".join([head, *body]), f"<{'backward' if boxed else 'forward'} program>", "exec"), space)  # noqa: S102
    program: Compiled = space["program"]
    vars(program)["collectives"] = collectives
    return program


def inductor_graph(
    gm: fx.GraphModule, groups: Mapping[str, str], *, boxed: bool, taken: Taken | None = None
) -> Compiled:
    """Return what `compile_graph` does, its operators fused by Inductor at the first call.

    What is `taken` is taken when the whole program has run.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.args = with_groups(node, groups)
        if str(node.target) == "autopar_levels.all_reduce_.default":
            node.target = torch.ops.autopar_levels.all_reduce.default  # Inductor knows no results in arguments' memory
    named = fx.GraphModule(gm, graph)
    fused: Compiled = torch.compile(named, backend="inductor", fullgraph=True, dynamic=False)
    if not boxed:
        return fused

    def empty_and_run(args: list[Any]) -> Sequence[Any]:
        given = tuple(args)
        args.clear()
        found = list(fused(*given))
        for at, take in (taken or {}).items():
            take(found[at])
            found[at] = None
        return found

    return empty_and_run


class _Ranged:
    """Spells where the named ranges of a program begin and end."""

    def __init__(self, source: _Source, ranges: Ranges | None) -> None:
        self._source = source
        self._ranges = ranges
        self._open = ""

    def before(self, node: fx.Node) -> list[str]:
        """Return the lines before a node: one range ends and another begins where it belongs to another."""
        name = self._name(node)
        if self._ranges is None or not name or name == self._open:
            return []
        lines = [*self.end(), f"    r = {self._source.constant(self._ranges)}({name!r})", "    r.__enter__()"]
        self._open = name
        return lines

    def end(self) -> list[str]:
        """Return the lines that end the range that is open."""
        lines = ["    r.__exit__(None, None, None)"] if self._open else []
        self._open = ""
        return lines

    def _name(self, node: fx.Node) -> str:
        collective = node.meta.get("collective")
        if collective is None:
            # Parts of what a collective gives belong to nothing; a copy for another layout to what runs around it.
            return "" if node.target is operator.getitem else str(node.meta.get("block", self._open))
        return waiting(collective) if "wait" in str(node.target) else issuing(collective)


class _Source:
    """Spells nodes, arguments and constants of one graph."""

    def __init__(self, gm: fx.GraphModule, groups: Mapping[str, str]) -> None:
        self.constants: dict[str, Any] = {}
        self._groups = groups
        self._names = {node: f"v{i}" for i, node in enumerate(gm.graph.nodes)}
        self._known: dict[int, str] = {}

    def name(self, node: fx.Node) -> str:
        return self._names[node]

    def constant(self, value: Any) -> str:
        if id(value) not in self._known:
            self._known[id(value)] = f"c{len(self._known)}"
            self.constants[self._known[id(value)]] = value
        return self._known[id(value)]

    def call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        args = with_groups(node, self._groups)
        given = [self.text(each) for each in args]
        given += [f"{name}={self.text(value)}" for name, value in node.kwargs.items()]
        return f"{self.constant(direct_call(WHATEVER_STRIDES.get(node.target, node.target)))}({', '.join(given)})"

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self.text(each)}, ' for each in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        finite = isinstance(value, float) and math.isfinite(value)
        plain = finite or value is None or isinstance(value, bool | int | str)
        return repr(value) if plain else self.constant(value)


def with_groups(node: fx.Node, groups: Mapping[str, str]) -> tuple[Any, ...]:
    """Return the arguments of a node, with the names that `groups` has for process groups in place of the plan's."""
    count = _GROUPED.get(getattr(node.target, "namespace", ""), 0)
    first = len(node.args) - count
    return tuple(
        groups.get(each, each) if at >= first and isinstance(each, str) else each for at, each in enumerate(node.args)
    )


def _last_uses(graph: fx.Graph, returned: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the values that nobody reads after it, unread ones after their own."""
    seen: set[fx.Node] = set(returned)
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for each in (*node.all_input_nodes, node) if node.op != "output" else ():
            if each not in seen and each.op != "output":
                seen.add(each)
                if each is not node or node.op != "placeholder":
                    last.setdefault(node, []).append(each)
    return last


def _attribute(gm: fx.GraphModule, path: str) -> torch.Tensor:
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part)
    tensor: torch.Tensor = found
    return tensor
