"""What each stage's programs compute, keep and exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.rewrite.errors import RewriteError
from autopar.rewrite.stage_homes import Home, Homes, is_dense, nbytes, views_back
from autopar.rewrite.stage_parcels import Parcel
from autopar.rewrite.staged import Transfer


@dataclass
class Program:
    """The nodes of one phase of one stage."""

    home: Home
    results: list[fx.Node]
    """What it returns at any rate; `Traffic` adds what others read."""

    nodes: set[fx.Node] = field(default_factory=set)
    local: set[fx.Node] = field(default_factory=set)
    """Of these, what it makes for itself and other stages make too."""

    starts: dict[fx.Node, None] = field(default_factory=dict)
    kept: dict[fx.Node, None] = field(default_factory=dict)
    """Of forward: read by the stage's own backward, or sent after it. Of backward: read from there."""

    received: dict[fx.Node, None] = field(default_factory=dict)
    sent: dict[fx.Node, None] = field(default_factory=dict)


@dataclass
class Traffic:
    """Who makes, keeps and sends what, for all stages."""

    graph: fx.Graph
    homes: Homes
    stages: int
    results: Mapping[Home, Sequence[fx.Node]]
    pinned: Collection[fx.Node] = ()
    """Starts that forward overwrites: what depends on them is made in forward."""

    programs: dict[Home, Program] = field(init=False)
    crossing: dict[tuple[Home, Home], dict[fx.Node, None]] = field(init=False)
    """Values that one program sends another; a value received in forward is there in backward too."""

    def __post_init__(self) -> None:
        self._order = {node: place for place, node in enumerate(self.graph.nodes)}
        self._here: dict[int, set[fx.Node]] = {stage: set() for stage in range(self.stages)}
        self._tainted = self._overwritten()
        self._collect()
        if self._choose_views():
            self._collect()

    def _overwritten(self) -> set[fx.Node]:
        found = set(self.pinned)
        for node in self.graph.nodes:
            if node in self.homes.shared and any(each in found for each in node.all_input_nodes):
                found.add(node)
        return found

    def _collect(self) -> None:
        self.programs, self.crossing = {}, {}
        own: dict[Home, list[fx.Node]] = {}
        for node, home in self.homes.of.items():
            if node.op != "placeholder":
                own.setdefault(home, []).append(node)
        for stage in range(self.stages):
            forward, backward = Home("forward", stage), Home("backward", stage)
            for home in (forward, backward):
                self.programs[home] = Program(home, list(self.results.get(home, ())))
                todo = [*own.get(home, ()), *self.programs[home].results]
                self._demand(self.programs[home], todo)
            early, late = self.programs[forward], self.programs[backward]
            overwritten = [node for node in late.local if node in self._tainted]
            if overwritten:
                # Backward would read it too late.
                self._demand(early, overwritten)
                late.nodes, late.local, late.starts = set(), set(), {}
                self._demand(late, [*own.get(backward, ()), *late.results])
        for program in self.programs.values():
            self._link(program)

    def _makes_itself(self, node: fx.Node, stage: int) -> bool:
        return node in self.homes.shared or node in self._here[stage]

    def _demand(self, program: Program, todo: list[fx.Node]) -> None:
        """Add nodes to a program, with all that its stage makes for itself to run them."""
        home = program.home
        early = self.programs.get(Home("forward", home.stage)) if home.phase == "backward" else None
        pending = list(todo)
        while pending:
            node = pending.pop()
            if node in program.nodes:
                continue
            if node.op == "placeholder":
                if node in self.homes.shared or is_tangent(node, self.homes):
                    program.starts[node] = None
                continue
            here = self._makes_itself(node, home.stage)
            if not here and self.homes.of.get(node) != home:
                continue
            is_value = node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor)
            if here and early is not None and node in early.nodes and is_value:
                continue  # of a list only the elements can be kept: backward takes it apart again for others
            program.nodes.add(node)
            if here:
                program.local.add(node)
            pending += node.all_input_nodes

    def _link(self, program: Program) -> None:
        """Note what a program reads of others."""
        home = program.home
        for node in [*sorted(program.nodes, key=self._order.__getitem__), *program.results]:
            for each in [node] if node in program.results and node not in program.nodes else node.all_input_nodes:
                if each in program.nodes or each in program.starts or each.op == "get_attr":
                    continue
                self._read(program, home, each)

    def _read(self, program: Program, home: Home, node: fx.Node) -> None:
        forward = Home("forward", home.stage)
        if home.phase == "backward" and node in self.programs[forward].nodes:
            program.kept[node] = self.programs[forward].kept[node] = None
            return
        made = self.homes.of[node]
        if made == home and node.op == "placeholder":
            program.starts[node] = None
            return
        if made.stage == home.stage:
            raise RewriteError(f"backward of stage {home.stage} reads {node.name}, which forward does not keep")
        program.received[node] = None
        if made.phase == "forward" and made.stage > home.stage:
            source = Home("backward", made.stage)
            self.programs[made].kept[node] = self.programs[source].kept[node] = None
        else:
            source = made
        target = forward if source.phase == "forward" else home
        self.programs[source].sent[node] = None
        self.crossing.setdefault((source, target), {})[node] = None

    def _choose_views(self) -> bool:
        """Let stages take views themselves where sending what they are views of is no more; return whether any does."""
        chosen = False
        for (source, target), nodes in self.crossing.items():
            groups: dict[fx.Node, list[list[fx.Node]]] = {}
            for node in nodes:
                path = self._path(node, source)
                groups.setdefault(path[-1], []).append(path)
            for node in nodes:
                there = self._arriving(node, target, nodes)
                if there:
                    self._here[target.stage].update(there)
                    chosen = True
            for base, paths in groups.items():
                total = sum(nbytes(path[0]) for path in paths)
                if any(len(path) > 1 for path in paths) and (base in nodes or total >= nbytes(base)):
                    self._here[target.stage].update(node for path in paths for node in path[:-1])
                    chosen = True
        return chosen

    def _arriving(self, node: fx.Node, target: Home, nodes: Collection[fx.Node]) -> list[fx.Node]:
        """Return the views from a value back to one that its reader is sent anyway; none if there is no such."""
        arriving = {each for (_, to), sent in self.crossing.items() if to.stage == target.stage for each in sent}
        path: list[fx.Node] = []
        for each in views_back(node):
            if each is not node and (each in arriving or self.homes.of.get(each) == target):
                return path
            path.append(each)
        return []

    def _path(self, node: fx.Node, source: Home) -> list[fx.Node]:
        """Return a value and what it is a view of, in the same program, as far back as that can be sent."""
        found: list[fx.Node] = []
        last = 0
        for each in views_back(node):
            if self.homes.of.get(each) != self.homes.of[node] or each.op == "placeholder":
                break
            found.append(each)
            if isinstance(each.meta["val"], torch.Tensor) and is_dense(each.meta["val"]):
                last = len(found) - 1
        return found[: last + 1] if found else [node]

    def transfers(self) -> tuple[Transfer, ...]:
        """Return all transfers, forward first, sources in the order in which they run."""
        found = []
        for phase, way in (("forward", 1), ("backward", -1)):
            pairs = [pair for pair in self.crossing if pair[0].phase == phase]
            for source, target in sorted(pairs, key=lambda pair: (way * pair[0].stage, way * pair[1].stage)):
                nodes = sorted(self.crossing[source, target], key=self._order.__getitem__)
                found += [Parcel.of(node).transfer(source, target) for node in nodes]
        return tuple(found)


def is_tangent(node: fx.Node, homes: Homes) -> bool:
    """Return whether a placeholder is the gradient of an output, which every stage may be given."""
    return node.op == "placeholder" and node in homes.of and homes.of[node].phase == "backward"
