"""Parameters that are made whole once a step: gathered before a stage's first micro-batch, kept for all of them.

All gathers are issued at once. Who reads one waits for it: the first micro-batch, behind whose operators the later ones
run; for the others there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar._torch import LazyGraphModule
from autopar.ir.graph import Graph
from autopar.ir.plan import Decisions
from autopar.rewrite.marks import mark, role
from autopar.rewrite.naming import COLLECTIVE, planned_name
from autopar.rewrite.partition import ancestors
from autopar.rewrite.passes import run_passes
from autopar.rewrite.programs import LAST
from autopar.rewrite.schedule import SinkWaits
from autopar.rewrite.stage_homes import only_renames
from autopar.rewrite.two_level import RunInLevels

BEGUN = "gathered_once"
"""Start of the names of placeholders that take a parameter made whole."""


@dataclass(frozen=True)
class Begun:
    """What is gathered before the first micro-batch."""

    gm: fx.GraphModule
    """The program without micro-batches' gathers of these; it still has the nodes that make them."""

    made: Mapping[str, fx.Node]
    """By placeholder, what it stands for: a gather that is under way, or what is made of one at once."""

    parameter_of: Mapping[str, str]
    """By placeholder, the parameter's operator."""

    def program(
        self, names: Collection[str], in_levels: RunInLevels
    ) -> tuple[fx.GraphModule | None, tuple[str, ...], tuple[str, ...]]:
        """Return the program that makes some of these, the parameters that it takes, and what it gives, in order."""
        gives = tuple(name for name in self.made if name in names)
        if not gives:
            return None, (), ()
        ends = [self.made[name] for name in gives]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        needed = sorted(ancestors(ends))
        for node in (*(each for each in needed if each.op == "placeholder"), *needed):
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in ends))
        program = LazyGraphModule(self.gm, graph)
        graph.lint()
        run_passes(program, (SinkWaits(), in_levels, *LAST))
        return program, tuple(node.name for node in needed if node.op == "placeholder"), gives


def hoisted(gm: fx.GraphModule, graph: Graph, decisions: Decisions) -> Begun:
    """Put placeholders in place of what the program gathers of parameters that are gathered once a step."""
    once = {op.name for op in graph.ops if op.kind == "parameter" and decisions.parameters[op.target].gather == "once"}
    made: dict[str, fx.Node] = {}
    parameter_of: dict[str, str] = {}
    for start in [node for node in gm.graph.find_nodes(op="placeholder") if node.name in once]:
        for node in _gathered(start):
            name = f"{BEGUN}_{len(made)}"
            with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
                given = gm.graph.placeholder(name)
            # As memory it is what the wait returns: no operator may write into it, it is there for all micro-batches.
            given.meta = {**node.meta, "autopar": replace(mark(node), origin=name, role="operator")}
            source, inside = node, _chain(node)
            readers = [each for each in node.users if each not in inside]
            if role(node) == "wait" and role(node.all_input_nodes[0]) == "start" and not inside:
                source, readers = node.all_input_nodes[0], [node]
                given.meta[COLLECTIVE] = planned_name(source)
            for user in readers:
                user.replace_input_with(source, given)
            made[name], parameter_of[name] = source, start.name
    return Begun(gm, made, parameter_of)


def _gathered(start: fx.Node) -> Sequence[fx.Node]:
    """Return where the gathers of a parameter end: what reads the value there is no part of a redistribution."""
    found = []
    todo = [(start, False)]
    while todo:
        node, gathered = todo.pop(0)
        gathered = gathered or role(node) == "start"
        inside = _chain(node)
        if gathered and role(node) in {"wait", "move"} and any(user not in inside for user in node.users):
            found.append(node)
        todo += [(user, gathered) for user in node.users if user in inside or (not gathered and _renames(user))]
    return found


def _renames(node: fx.Node) -> bool:
    return node.op == "call_function" and len(node.all_input_nodes) == 1 and only_renames(node)


def _chain(node: fx.Node) -> set[fx.Node]:
    """Return the next nodes of the redistribution that a value is in the middle of."""
    return {
        user
        for user in node.users
        if user.op == "call_function" and role(user) != "operator" and len(user.all_input_nodes) == 1
    }
