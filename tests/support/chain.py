"""A chain of layers cut into pipeline stages by hand: programs for tests of their execution, and the model itself.

Layer i: h(i+1) = tanh(h(i) W(i)^T + b(i)); the loss is the squared error summed over rows that `mask` counts, divided
by their number in the whole batch. Options add a value that skips stages, a tied weight, dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.errors import InputMismatchError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Replicate, Shard
from autopar.ir.plan import Decisions, ParameterDecision
from autopar.ir.reads import Read
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.tensor import TensorMeta
from autopar.rewrite.programs import Seeding, Value
from autopar.rewrite.random_ops import seeded, step_seed
from autopar.runtime.module import Runner, compiled
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.ranks import Ranks
from autopar.runtime.staged_program import PipelinedProgram, names_on_rank

WIDTH = 6
C10D = torch.ops._c10d_functional
Env = dict[str, Any]


@dataclass(frozen=True)
class Item:
    kind: Literal["start", "value", "output", "mutation", "tangent", "gradient"]
    name: str
    turn: int = 0


@dataclass(frozen=True)
class Transfer:
    value: str
    source: int
    target: int
    phase: Literal["forward", "backward"]
    shape: tuple[int, ...]
    dtype: str = "float64"


@dataclass(frozen=True)
class Tie:
    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class StageProgram:
    stage: int
    forward: fx.GraphModule
    takes: tuple[Item, ...]
    gives: tuple[Item, ...]
    backward: fx.GraphModule | None = None
    backward_takes: tuple[Item, ...] = ()
    backward_gives: tuple[Item, ...] = ()
    weights: fx.GraphModule | None = None
    weights_takes: tuple[Item, ...] = ()
    weights_gives: tuple[Item, ...] = ()
    finish: fx.GraphModule | None = None
    finish_takes: tuple[str, ...] = ()
    finish_gives: tuple[str, ...] = ()
    begin: fx.GraphModule | None = None
    begin_takes: tuple[str, ...] = ()
    begin_gives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Totals:
    program: fx.GraphModule
    takes: tuple[str, ...]
    names: tuple[str, ...]
    reduces: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    stages: Mapping[int, StageProgram]
    transfers: tuple[Transfer, ...]
    ties: tuple[Tie, ...]
    stage_of: Mapping[str, int]
    totals: tuple[Totals, ...]
    outputs: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...] = ()
    joined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    name: str
    kind: str
    target: str
    index: int = -1


@dataclass(frozen=True)
class Input:
    path: str
    meta: TensorMeta
    requires_grad: bool = False


@dataclass(frozen=True)
class Call:
    tensors: Sequence[Input]
    reads: Sequence[Read] = ()

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        if len(args) != len(self.tensors) or kwargs:
            raise InputMismatchError("other arguments")
        return list(args)


class Result:
    @property
    def totals(self) -> Sequence[int]:
        """Return nothing: all results are the program's own."""
        return ()

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        return tuple(outputs)


class Chain(nn.Module):
    """The model on one device."""

    def __init__(self, layers: int = 4, skip: int | None = None, *, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(layers)
        self.w = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2) for _ in range(layers)
        )
        self.b = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64) / 2) for _ in range(layers)
        )
        self.skip = skip
        if tied:
            self.w[layers - 1] = self.w[0]
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = first = x
        for i, (w, b) in enumerate(zip(self.w, self.b, strict=True)):
            h = torch.tanh((h + first if i == self.skip else h) @ w.T + b)
            if i == 0:
                first = h
        return h, ((h - y).square().mean(1) * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Layers:
    """The same cut into stages: which layers each has, and what is special."""

    of_stage: tuple[tuple[int, ...], ...]
    rows: int
    """Of one micro-batch on one rank."""

    skip: int | None = None
    tied: bool = False
    dropout: float = 0.0
    split: bool = False
    """Whether weight gradients are programs of their own."""

    input_gradient: bool = False
    reduce: str = ""
    """Mesh axis over which gradients and counts are summed."""

    part: int | None = None
    """Which part of a micro-batch's rows the programs take, where ranks bring all rows to a call."""

    @property
    def count(self) -> int:
        return sum(map(len, self.of_stage))

    def weight(self, i: int) -> str:
        return "w0" if self.tied and i == self.count - 1 else f"w{i}"

    def forward(self, stage: int, env: Env) -> None:
        for i in self.of_stage[stage]:
            h = env[self.enters(i)]
            if i == self.skip:
                env[f"z{i}"] = h = h + env["h1"]
            made = torch.tanh(h @ env[self.weight(i)].T + env[f"b{i}"])
            if self.dropout:
                env[f"keep{i}"] = keep = self.keep(i, made)
                env[f"t{i}"] = made
                made = made * keep
            env[f"h{i + 1}"] = made
            if i == 0:
                env["calls"] = env["calls"] + 1
        if stage == len(self.of_stage) - 1:
            h = env["pred"] = env[f"h{self.count}"]
            env["loss"] = ((h - env["y"]).square().mean(1) * env["mask"]).sum() / env["total"]

    def keep(self, i: int, like: torch.Tensor) -> torch.Tensor:
        drawn = seeded("aten.rand.default")(i, list(like.shape), dtype=like.dtype)
        return (drawn > self.dropout).to(like.dtype) / (1 - self.dropout)

    def enters(self, i: int) -> str:
        return f"h{i}" if i else "x"

    def backward(self, stage: int, env: Env) -> None:
        for i in reversed(self.of_stage[stage]):
            if i == self.count - 1:
                error = env[f"h{self.count}"] - env["y"]
                g = env["tangent"] * 2 / WIDTH * error * (env["mask"] / env["total"])[:, None]
            else:
                g = env[f"g{i + 1}"]
            if i == 0 and self.skip is not None:
                g = g + env["s1"]
            if self.dropout:
                g = g * env[f"keep{i}"]
            out = env[f"t{i}"] if self.dropout else env[f"h{i + 1}"]
            env[f"p{i}"] = p = g * (1 - out * out)
            gz = p @ env[self.weight(i)]
            if i == self.skip:
                env["s1"] = gz
            if i:
                env[f"g{i}"] = gz
            elif self.input_gradient:
                env["dx"] = gz

    def weights(self, stage: int, env: Env) -> None:
        for i in self.of_stage[stage]:
            p = env[f"p{i}"]
            z = env[f"z{i}" if i == self.skip else self.enters(i)]
            name = f"d{self.weight(i)}"
            term = p.T @ z
            env[name] = env.made[name] + term if name in env.made else term
            env[f"db{i}"] = p.sum(0)


class Recorded(Env):
    """Values by name; notes which were there before and are read."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self.read: dict[str, None] = {}
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.read[name] = None
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.made[name] = value
        super().__setitem__(name, value)


@dataclass
class Drawn:
    """A program as Python, what it reads and makes."""

    stage: int
    phase: str
    body: Callable[[Env], None]
    reads: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)


def programs(layers: Layers, stages: Sequence[int], trained: bool = True) -> Staged:
    """Return the programs of some stages, and what joins all of them."""
    known = _examples(layers)
    starts = set(known) - {"tangent"}
    drawn = [Drawn(s, "forward", lambda env, s=s: layers.forward(s, env)) for s in range(len(layers.of_stage))]
    for s in reversed(range(len(layers.of_stage))) if trained else ():
        if layers.split:
            drawn.append(Drawn(s, "backward", lambda env, s=s: layers.backward(s, env)))
            drawn.append(Drawn(s, "weights", lambda env, s=s: layers.weights(s, env)))
        else:
            drawn.append(Drawn(s, "backward", lambda env, s=s: (layers.backward(s, env), layers.weights(s, env))[0]))
    with step_seed(0):
        for each in drawn:
            env = Recorded(known)
            each.body(env)
            each.reads, each.makes = list(env.read), list(env.made)
            known = {**known, **{name: env.made[name] for name in env.made if name not in starts}}

        def read_by_others(one: Drawn, name: str) -> bool:
            return any(name in each.reads for each in drawn if each is not one) and name not in starts

        def items(one: Drawn) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
            takes = tuple(
                Item("start" if n in starts else "tangent" if n == "tangent" else "value", n) for n in one.reads
            )
            gives: list[Item] = [Item("value", n) for n in one.makes if read_by_others(one, n)]
            gives += [Item("output", n) for n in one.makes if n in ("pred", "loss")]
            gives += [Item("mutation", n) for n in one.makes if n == "calls"]
            gives += [Item("gradient", n[1:]) for n in one.makes if n[0] == "d"]
            return takes, tuple(gives)

        def graph(one: Drawn) -> fx.GraphModule:
            takes, gives = items(one)

            def program(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
                env = Recorded(dict(zip((item.name for item in takes), args, strict=True)))
                one.body(env)
                return tuple(env.made[f"d{e.name}" if e.kind == "gradient" else e.name] for e in gives)

            made = make_fx(program)(*[known[item.name] for item in takes])
            if layers.reduce:
                _sum_loss(made, gives, layers.reduce)
            if layers.part is not None:
                _take_rows(made, [item.name in ("x", "y", "mask") for item in takes], layers)
            return made

        made: dict[int, StageProgram] = {}
        for s in stages:
            own = {each.phase: each for each in drawn if each.stage == s}
            parts = {phase: (graph(each), *items(each)) for phase, each in own.items()}
            finish, names = _finish(layers, parts)
            made[s] = StageProgram(
                s,
                *parts["forward"],
                *parts.get("backward", (None, (), ())),
                *parts.get("weights", (None, (), ())),
                finish=finish,
                finish_takes=names,
                finish_gives=names,
            )
    transfers = [
        Transfer(name, one.stage, stage, one.phase, tuple(known[name].shape))  # type: ignore[arg-type]
        for one in drawn
        for name in one.makes
        for stage in range(len(layers.of_stage))
        if stage != one.stage and name not in starts
        if any(name in each.reads for each in drawn if each.stage == stage)
    ]
    stage_of = {}
    for one in reversed(drawn):
        stage_of.update(dict.fromkeys((n for n in one.reads if n in starts and n[0] in "wb"), one.stage))
    stage_of["calls"] = 0
    ends = tuple(sorted({0, len(layers.of_stage) - 1}))
    ties = (Tie("w0", ends),) if layers.tied and len(ends) > 1 and trained else ()
    outputs = (("pred", Shard(0)), ("loss", Partial()))
    return Staged(made, tuple(transfers), ties, stage_of, (_totals(layers),), outputs)


def _examples(layers: Layers) -> dict[str, torch.Tensor]:
    rows = layers.rows
    known = {name: torch.ones(rows, WIDTH, dtype=torch.float64) for name in ("x", "y")}
    known["mask"] = torch.ones(rows, dtype=torch.float64)
    known |= {name: torch.ones((), dtype=torch.float64) for name in ("total", "calls", "tangent")}
    for i in range(layers.count):
        known[layers.weight(i)] = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
        known[f"b{i}"] = torch.ones(WIDTH, dtype=torch.float64)
    return known


def _finish(layers: Layers, parts: Mapping[str, Any]) -> tuple[fx.GraphModule | None, tuple[str, ...]]:
    names = tuple(item.name for part in parts.values() for item in part[2] if item.kind == "gradient")
    if not layers.reduce or not names:
        return None, ()
    return summed(names, layers.reduce), names


def _sum_loss(gm: fx.GraphModule, gives: Sequence[Item], axis: str) -> None:
    """Sum the loss of the ranks' own rows over a mesh axis."""
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    for i, item in enumerate(gives):
        if item == Item("output", "loss"):
            with gm.graph.inserting_before(output):
                start = gm.graph.call_function(C10D.all_reduce.default, (results[i], "sum", axis))
                results[i] = gm.graph.call_function(C10D.wait_tensor.default, (start,))
    output.args = (tuple(results),)


def _take_rows(gm: fx.GraphModule, wanted: Sequence[bool], layers: Layers) -> None:
    first = layers.rows * (layers.part or 0)
    for node, want in zip(gm.graph.find_nodes(op="placeholder"), wanted, strict=True):
        node.meta.pop("val", None)
        if want and node.users:
            with gm.graph.inserting_after(node):
                cut = gm.graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, first, first + layers.rows))
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def summed(names: Sequence[str], axis: str) -> fx.GraphModule:
    """Return the program that sums each argument over a mesh axis."""
    graph = fx.Graph()
    args = [graph.placeholder(name) for name in names]
    starts = [graph.call_function(C10D.all_reduce.default, (each, "sum", axis)) for each in args]
    graph.output(tuple(graph.call_function(C10D.wait_tensor.default, (each,)) for each in starts))
    return fx.GraphModule({}, graph)


def _totals(layers: Layers) -> Totals:
    graph = fx.Graph()
    found = graph.call_function(torch.ops.aten.sum.default, (graph.placeholder("mask"),))
    if layers.reduce and layers.part is None:
        found = graph.call_function(C10D.all_reduce.default, (found, "sum", layers.reduce))
        found = graph.call_function(C10D.wait_tensor.default, (found,))
    graph.output((found,))
    return Totals(fx.GraphModule({}, graph), ("mask",), ("total",), ("sum",))


def compile_staged(
    model: Chain,
    layers: Layers,
    schedule: PipelineSchedule,
    mesh: Mesh | None = None,
    *,
    ordered: bool = False,
    blocks: Sequence[Sequence[int]] = (),
    **how: Any,
) -> tuple[nn.Module, Runner]:
    """Return the model compiled for a schedule, and its runner; `blocks` are the ranks of each pipeline rank."""
    mesh = mesh or Mesh(())
    ranks = Ranks.join("cpu")
    pipeline = replace(PipelineRanks.of(mesh, schedule.ranks, ranks, blocks=blocks), ordered=ordered)
    whole: Layout = (Replicate(),) * len(mesh.axes)
    split: Layout = (Shard(0),) * len(mesh.axes)
    own = [stage for stage, at in enumerate(schedule.rank_of) if at == pipeline.index]
    batch = layers.rows * schedule.microbatches * mesh.world_size

    def f64(*shape: int) -> TensorMeta:
        return TensorMeta(shape, "float64")

    inputs = {"x": f64(batch, WIDTH), "y": f64(batch, WIDTH), "mask": f64(batch)}
    names = [layers.weight(i) for i in range(layers.count)] + [f"b{i}" for i in range(layers.count)]
    placeholders = [Start(name, "parameter", f"{name[0]}.{name[1:]}") for name in dict.fromkeys(names)]
    placeholders += [Start("calls", "buffer", "calls")]
    placeholders += [Start(name, "input", name, i) for i, name in enumerate(inputs)]

    def program_for(training: bool, grad: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PipelinedProgram:
        return PipelinedProgram(
            call=Call([Input(name, meta, layers.input_gradient and name == "x") for name, meta in inputs.items()]),
            result=Result(),
            placeholders=[*placeholders, Start("tangent", "tangent", "loss")] if grad else placeholders,
            constants={},
            staged=programs(layers, own, trained=grad),
            schedule=schedule,
            inputs=[Value(name, meta, split if layers.part is None else whole) for name, meta in inputs.items()],
            split_inputs=tuple(inputs),
            outputs=[Value("pred", inputs["y"], split), Value("loss", f64(), whole)],
            seeding=Seeding(),
        )

    decisions = Decisions(
        degrees={},
        mesh=mesh,
        parameters={
            name: ParameterDecision(placements=whole) for name, _ in model.named_parameters(remove_duplicate=False)
        },
        operators={},
        outputs={},
        collectives=(),
    )
    runner = Runner(decisions, ranks, program_for, pipeline=pipeline, batch=split if layers.part is None else whole)
    held = names_on_rank(programs(layers, own), placeholders, schedule, pipeline.index, model)
    return compiled(model, runner, names=held, **how), runner
