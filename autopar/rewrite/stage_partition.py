"""The cut of one rank's local program into the programs of pipeline stages.

    cut = stage_programs(gm, graph, decisions, stage_of(graph, blocks), stages=[2])

Values go straight from the stage that makes them to every stage that reads them;
what each stage can make for itself (views of its parameters, masks, positions)
is not sent. Gradients are given per micro-batch, unreduced; `finish` reduces
their sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar._torch import LazyGraphModule, storage_key
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph, Output
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.plan import Decisions
from autopar.ir.squeeze import squeeze
from autopar.ir.weight_gradients import weight_gradients
from autopar.rewrite.batch_overlap import Interleaving
from autopar.rewrite.local import PHASE, localised
from autopar.rewrite.marks import mark
from autopar.rewrite.partition import ancestors, crossing_values, early_cuts, is_forward, own_memory
from autopar.rewrite.passes import run_passes
from autopar.rewrite.programs import LAST
from autopar.rewrite.schedule import SettleScatters
from autopar.rewrite.stage_begin import hoisted
from autopar.rewrite.stage_gradients import Gradient, finish_program, split_terms
from autopar.rewrite.stage_homes import Home, Homes, is_dense, shared_nodes
from autopar.rewrite.stage_parcels import Parcel, copied_like
from autopar.rewrite.stage_repeats import read_forward
from autopar.rewrite.stage_split import halves_of
from autopar.rewrite.stage_traffic import Program, Traffic, is_tangent
from autopar.rewrite.staged import Item, StagedPrograms, StageProgram, Tie
from autopar.rewrite.two_level import RunInLevels, in_two_levels


def rewrite_stages(
    joint: fx.GraphModule,
    graph: Graph,
    decisions: Decisions,
    rank: int,
    stage_of: Mapping[str, int],
    stages: Collection[int],
    *,
    split: Collection[str] = (),
    split_backward: bool = False,
    device: str = "cpu",
) -> StagedPrograms:
    """Return the programs of `rank` (of its stage's mesh) for some of the stages of a pipeline, of one micro-batch.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it.
        InfeasibleError: the program cannot be cut so.
    """
    gm, totals = localised(joint, graph, decisions, rank, split=split, device=device)
    made = stage_programs(gm, graph, squeeze(decisions), stage_of, stages, split_backward=split_backward, device=device)
    in_time = decisions.outputs_in_time
    return replace(
        made,
        totals=totals,
        outputs=tuple((name, in_time.get(name, placed)) for name, placed in made.outputs),
        joined=dict(_joined_buffers(graph, decisions)),
        dropped=decisions.outputs_dropped,
    )


def _joined_buffers(graph: Graph, decisions: Decisions) -> Iterator[tuple[str, str]]:
    """Yield the buffers of whose new value each micro-batch makes a term, and how terms are reduced to it."""
    for output in graph.outputs:
        if output.kind == "mutation" and output.ref is not None:
            made = decisions.operators.get(graph.representative(output.ref.op))
            placed = None if made is None or made.time is None else made.time.outputs[output.ref.index]
            if isinstance(placed, Partial):
                yield output.name, placed.reduce


def stage_programs(
    gm: fx.GraphModule,
    graph: Graph,
    decisions: Decisions,
    stage_of: Mapping[str, int],
    stages: Collection[int],
    *,
    split_backward: bool = False,
    device: str = "cpu",
) -> StagedPrograms:
    """Return the programs of `stages`, from the local program of one rank, which is edited.

    With `split_backward`, weight gradients that no other stage waits for are a program of their own.

    Raises:
        InfeasibleError: a buffer gets its new value on another stage than the one that reads it first.
        RewriteError: a value would have to go back in time.
    """
    return _Cut(gm, graph, decisions, stage_of, split_backward, device).programs(stages)


@dataclass
class _Cut:
    gm: fx.GraphModule
    graph: Graph
    decisions: Decisions
    stage_of: Mapping[str, int]
    split: bool
    """Whether weight gradients are a program of their own."""

    device: str

    results: dict[str, dict[str, fx.Node]] = field(init=False)
    """What the program returns, by kind and name."""

    in_levels: RunInLevels = field(init=False)

    def __post_init__(self) -> None:
        self.in_levels = RunInLevels(in_two_levels(self.decisions.collectives))
        self.begun = hoisted(self.gm, self.graph, self.decisions)
        # An evaluation program may run nothing on the last of the planned stages.
        self.count = max(*self.stage_of.values(), len(self.decisions.stages) - 1, 0) + 1
        output = next(iter(self.gm.graph.find_nodes(op="output")))
        self.results = {"output": {}, "mutation": {}, "gradient": {}}
        for each, node in zip(self.graph.outputs, output.args[0], strict=True):
            if node is not None:
                self.results[each.kind][each.name] = node
        self.gradients = self._gradients()
        self.homes = self._homes()
        self.terms = split_terms(self.gm.graph, self.gradients, self.homes)
        self.homes.check()
        self.traffic = Traffic(
            self.gm.graph, self.homes, self.count, self._due(), [n for n in self._starts() if n.name in self._mutated]
        )
        self._mutate_everywhere()
        self.holders = self._holders()

    def _gradients(self) -> list[Gradient]:
        """Return all gradients.

        Those of inputs are brought to their place in backward, a micro-batch's rows a time; those of parameters where
        the plan reduces them in each micro-batch.
        """
        found = []
        for name, node in self.results["gradient"].items():
            op = self.graph.by_name[name]
            late = op.kind == "parameter" and self.decisions.parameters[op.target].reduce == "step"
            found.append(Gradient.of(name, op.target, node) if late else Gradient(name, op.target, node, ()))
        return found

    @property
    def _mutated(self) -> Collection[str]:
        return self.results["mutation"].keys()

    def _starts(self) -> list[fx.Node]:
        tangents = {op.name for op in self.graph.ops if op.kind == "tangent"}
        return [node for node in self.gm.graph.find_nodes(op="placeholder") if node.name not in tangents]

    def _homes(self) -> Homes:
        graph, starts = self.gm.graph, self._starts()
        tangents = [op.name for op in self.graph.ops if op.kind == "tangent"]
        visible = [*self.results["output"].values(), *self.results["mutation"].values()]
        bases = [each.base for each in self.gradients]
        needed, early = ancestors([*visible, *bases]), ancestors(visible)
        forward = {node for node in needed if node in early or is_forward(node, tangents)} | set(starts)
        forward |= read_forward(graph, needed, forward, self._shared()[0], self.stage_of)
        needed = ancestors([*visible, *bases])
        forward |= early_cuts(graph, needed, forward)
        late = [node for node in graph.nodes if node in needed and node not in forward and node.op != "placeholder"]
        forward |= set(own_memory(graph, crossing_values(late, bases, forward), starts, self._mutated))
        self.gradients = self._gradients()
        bases = [each.base for each in self.gradients]
        needed = ancestors([*visible, *bases])
        shared, pinned = self._shared()
        homes = Homes(graph, self.stage_of, needed, forward, {*visible, *bases}, shared)
        self._check_buffers(homes, pinned)
        return homes

    def _shared(self) -> tuple[set[fx.Node], set[str]]:
        """Return what stages make for themselves, and the buffers whose new value they cannot."""
        pinned: set[str] = set()
        while True:
            shared = shared_nodes(self.gm, self.graph, pinned, self.begun.made)
            more = {name for name, node in self.results["mutation"].items() if node not in shared} - pinned
            if not more:
                return shared, pinned
            pinned |= more

    def _check_buffers(self, homes: Homes, pinned: Collection[str]) -> None:
        """Raise if a buffer is read before the stage that gives it its new value."""
        targets = {op.name: op.target for op in self.graph.ops}
        for name in sorted(pinned):
            made, read = homes.of[self.results["mutation"][name]].stage, self.stage_of[name]
            if made != read:
                raise InfeasibleError(
                    f"buffer {targets[name]} is read on pipeline stage {read} and gets its new value on stage {made}; "
                    f"keep the modules that use it on one stage"
                )

    def _due(self) -> dict[Home, list[fx.Node]]:
        """Return what each program returns at any rate."""
        found: dict[Home, list[fx.Node]] = {}
        for kind in ("output", "mutation"):
            for node in self.results[kind].values():
                home = self.homes.of.get(node) or Home("forward", self.stage_of[mark(node).origin])
                found.setdefault(home, []).append(node)
        for terms in self.terms.values():
            for stage, node in terms.items():
                found.setdefault(Home("backward", stage), []).append(node)
        return found

    def _mutate_everywhere(self) -> None:
        """Let every stage that has a buffer of its own bring it up to date itself, if it can."""
        results = self._due()
        changed = False
        for stage in range(self.count):
            home = Home("forward", stage)
            held = {node.name for node in self.traffic.programs[home].starts}
            for name, node in self.results["mutation"].items():
                if name in held and node not in results.setdefault(home, []):
                    results[home].append(node)
                    changed = True
        if changed:
            self.traffic = Traffic(self.gm.graph, self.homes, self.count, results, self.traffic.pinned)

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that have each start or give a gradient for it."""
        found: dict[str, set[int]] = {name: set(terms) for name, terms in self.terms.items()}
        for home, program in self.traffic.programs.items():
            for node in program.starts:
                found.setdefault(self.begun.parameter_of.get(node.name, node.name), set()).add(home.stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def programs(self, stages: Collection[int]) -> StagedPrograms:
        kinds = {op.name: op.kind for op in self.graph.ops}
        states = [op.name for op in self.graph.ops if op.kind in {"parameter", "buffer"}]
        ties = [name for name in self.terms if kinds[name] == "parameter" and len(self.holders[name]) > 1]
        nodes = self.gm.graph.nodes
        return StagedPrograms(
            stages={stage: self._stage(stage) for stage in stages},
            transfers=self.traffic.transfers(),
            ties=tuple(Tie(name, self.holders[name]) for name in ties),
            stage_of={name: min(self.holders.get(name, (self.stage_of[name],))) for name in states},
            outputs=tuple((each.name, self._in_time(each)) for each in self.graph.outputs if each.kind == "output"),
            draws=any(getattr(node.target, "namespace", "") == "autopar" for node in nodes),
        )

    def _in_time(self, output: Output) -> Placement:
        """Return where an output of micro-batches lies if the plan does not say it."""
        if output.ref is None:
            return Replicate()
        meta = self.graph.meta(output.ref)
        if meta.shape and meta.shape[0] == self.graph.batch_size:
            return Shard(0)
        return Partial() if meta.is_floating and not meta.shape else Replicate()

    def _stage(self, stage: int) -> StageProgram:
        early, late = (self.traffic.programs[Home(phase, stage)] for phase in ("forward", "backward"))
        interleaving = self._interleaving()
        forward = _Builder(self, early, interleaving)
        for kind in ("output", "mutation"):
            for name, node in self.results[kind].items():
                if node in early.results:
                    forward.give(kind, name, node)
        forward.give_values()
        terms = {name: term[stage] for name, term in self.terms.items() if stage in term}
        halves = halves_of(late, terms, weight_gradients(self.graph, self.stage_of)) if self.split else None
        first, second, between = halves or (late, None, ())
        backward = _Builder(self, first, interleaving)
        backward.give_values()
        for node in between:
            if not (node in first.sent and Parcel.of(node).is_plain):
                backward.give("value", node.name, node)
        weights = None if second is None else _Builder(self, second, interleaving)
        here = [each for each in self.gradients if each.name in terms]
        for each in here:
            later = weights is not None and second is not None and terms[each.name] in second.nodes
            (weights if weights is not None and later else backward).give_gradient(each, terms[each.name])
        parameters = [each for each in self.gradients if self.graph.by_name[each.name].kind == "parameter"]
        summed = [each for each in parameters if each in here]
        zeros = [each for each in parameters if stage in self.holders[each.name] and each not in here]
        finish = None
        if summed or zeros:
            finish = finish_program(self.gm, summed, zeros, self.decisions.buckets, self.in_levels, self.device)
        builders = [each for each in (forward, backward, weights) if each is not None]
        starts = {item.name for each in builders for item in each.takes if item.kind == "start"}
        begin, begin_takes, begin_gives = self.begun.program(starts, self.in_levels)
        return StageProgram(
            stage=stage,
            begin=begin,
            begin_takes=begin_takes,
            begin_gives=begin_gives,
            forward=forward.build(),
            takes=tuple(forward.takes),
            gives=tuple(forward.gives),
            backward=backward.build() if backward.gives else None,
            backward_takes=tuple(backward.takes) if backward.gives else (),
            backward_gives=tuple(backward.gives),
            weights=None if weights is None else weights.build(),
            weights_takes=() if weights is None else tuple(weights.takes),
            weights_gives=() if weights is None else tuple(weights.gives),
            finish=finish,
            finish_takes=tuple(each.name for each in summed),
            finish_gives=tuple(each.name for each in (*summed, *zeros)),
        )

    def _interleaving(self) -> Interleaving | None:
        """Return how programs come to run two micro-batches at once; `None` if they do not."""
        if self.decisions.schedule.batch_overlap == 1:
            return None
        return Interleaving({op.name for op in self.graph.ops if op.kind == "input"})


class _Builder:
    """Writes the program of one phase of one stage."""

    def __init__(self, cut: _Cut, program: Program, interleaving: Interleaving | None) -> None:
        self._cut, self._program, self._interleaving = cut, program, interleaving
        self._phase = program.home.phase
        self.graph = fx.Graph()
        self.takes: list[Item] = []
        self.gives: list[Item] = []
        self._results: list[fx.Node] = []
        self._copies: dict[fx.Node, fx.Node] = {}
        self._write()

    def _write(self) -> None:
        order = {node: place for place, node in enumerate(self._cut.gm.graph.nodes)}
        program, late = self._program, self._phase == "backward"
        for node in sorted(program.starts, key=order.__getitem__):
            tangent = is_tangent(node, self._cut.homes)
            self._take("tangent" if tangent else "start", node)
            self._copies[node].meta["tangent"] = tangent
        for node in sorted(program.kept, key=order.__getitem__) if late else ():
            self._take("value", node)
        received = [(Parcel.of(node), node) for node in sorted(program.received, key=order.__getitem__)]
        arrived = [parcel.received(self.graph) for parcel, _ in received]
        self.takes += [Item("value", parcel.name) for parcel, _ in received]
        for (parcel, node), placeholder in zip(received, arrived, strict=True):
            self._copies[node] = parcel.restored(self.graph, placeholder, self._phase)
        for node in sorted(program.nodes, key=order.__getitem__):
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)

    def _take(self, kind: str, node: fx.Node) -> None:
        self.takes.append(Item(kind, node.name))  # type: ignore[arg-type]
        self._copies[node] = self.graph.placeholder(node.name)
        self._copies[node].meta = dict(node.meta)

    def give(self, kind: str, name: str, node: fx.Node) -> None:
        """Return a result of the program."""
        self.gives.append(Item(kind, name))  # type: ignore[arg-type]
        self._results.append(self._copies[node])

    def give_values(self) -> None:
        """Return what this stage keeps for its backward, and what others receive."""
        order = {node: place for place, node in enumerate(self._cut.gm.graph.nodes)}
        kept = () if self._phase == "backward" else sorted(self._program.kept, key=order.__getitem__)
        sent = [Parcel.of(node) for node in sorted(self._program.sent, key=order.__getitem__)]
        plain = {parcel.node for parcel in sent if parcel.is_plain}
        for node in kept:
            if node not in plain:
                self.give("value", node.name, node)
        for parcel in sent:
            self.gives.append(Item("value", parcel.name))
            self._results.append(parcel.pack(self.graph, self._copies[parcel.node], self._phase))

    def give_gradient(self, gradient: Gradient, term: fx.Node) -> None:
        """Return a gradient in memory of its own, strided as the program's own gradient is."""
        value = self._copies[term]
        wanted: torch.Tensor = gradient.base.meta["val"]
        found: torch.Tensor = value.meta["val"]
        given = {storage_key(each.meta["val"]) for each in [*self._results, *self.graph.find_nodes(op="placeholder")]}
        if not is_dense(found) or storage_key(found) in given or found.stride() != wanted.stride() or _is_part(found):
            value = copied_like(self.graph, value, wanted, self._phase)
        self.gives.append(Item("gradient", gradient.name))
        self._results.append(value)

    def build(self) -> fx.GraphModule:
        """Return the finished program."""
        self.graph.output(tuple(self._results))
        # Views that every reader takes for itself.
        self.graph.eliminate_dead_code()
        made: fx.GraphModule = LazyGraphModule(self._cut.gm, self.graph)
        self.graph.lint()
        run_passes(made, PHASE)
        if self._interleaving is not None:
            made, takes, gives = self._interleaving(made, self.takes, self.gives)
            self.takes, self.gives = list(takes), list(gives)
        run_passes(made, (SettleScatters(), self._cut.in_levels, *LAST))
        return made


def _is_part(value: torch.Tensor) -> bool:
    return bool(value.untyped_storage().nbytes() > value.numel() * value.element_size())
