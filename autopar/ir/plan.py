"""The plan: every decision about one program on one cluster, and what was predicted of it.

These are the nouns; `plan_json` reads and writes the file of the contract.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Placement
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta

Gather = Literal["none", "per_phase", "once"]
"""When a parameter sharded at rest is made whole: never; in forward and again in backward; once, kept for backward."""


Reduce = Literal["step", "microbatch"]
"""When gradients are brought to their parameter's place: summed over the step's micro-batches; each micro-batch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDecision:
    """Where a parameter (or buffer) lives at rest; its gradient and optimizer state live there too."""

    placements: Layout
    gather: Gather = "none"
    reduce: Reduce = "step"
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDecision:
    """The strategy of one operator, and of all that share its decision (equal layers)."""

    target: str
    strategy: MeshStrategy
    inputs: tuple[str, ...] = ()
    """Names of the operators it reads (of the first of the equal ones), in `Op.refs` order; `NAME:1`: its output 1."""

    output: TensorMeta | None = None
    """Global shape and dtype of its first output."""

    phase: str = "forward"
    module: str = ""
    source: str = ""
    instances: int = 1
    predicted_s: float = 0.0
    """Seconds of one instance on one device, inner collectives left out; of one micro-batch."""

    time: Strategy | None = None
    """What it does along the axis of micro-batches, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective that the program issues `count` times a step."""

    op: str
    axis: str
    level: str
    bytes: int
    """Of one message: of the larger of its local buffers."""

    count: int
    phase: str
    tensor: str
    """What is moved: parameter name, or operator name and module."""

    overlapped: bool
    predicted_s: float
    """Of all `count` together, overlap not subtracted."""

    stream: str = ""
    """The process group it runs on: those of one stream run one after another, in program order."""

    exposed_s: float = 0.0
    """Of all `count` together, what computation does not hide, as simulated; see `Estimates.timeline`."""

    inner: int = 1
    """Neighbours on the axis that share the inner of two levels, where it runs inside those, across and inside again;
    1: it is one flat collective. Equal for all of one operation, axis and size, like `chunks`."""

    chunks: int = 1
    """Of two levels: in how many pieces, so that what is inside of one runs beside what is across of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Collectives of one kind that are issued as one: sums of gradients, or gathers of parameters."""

    op: str = "all_reduce"
    axis: str
    phase: str = "backward"
    tensors: tuple[str, ...]
    """What they move, as `Collective.tensor` names it, in the order in which it becomes ready or is read."""

    def __str__(self) -> str:
        kind = "parameters" if self.op == "all_gather" else "gradients"
        return f"{len(self.tensors)} {kind}, {self.tensors[0]} to {self.tensors[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A gather of parameters that is issued before it is needed."""

    axis: str
    phase: str
    tensor: str
    """As `Collective.tensor` names it; of several that travel together, their bucket's text."""

    before: str
    """The operator before which it is issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage; one SPMD program is a single one."""

    index: int
    ranks: tuple[int, ...]
    blocks: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of micro-batches over the stages."""

    name: str = "none"
    interleave: int = 1
    num_microbatches: int = 1
    batch_overlap: int = 1
    """Micro-batches that a rank runs at once: one of them computes while another waits for its collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """All that the rewriter and the runtime read."""

    degrees: Mapping[str, int]
    mesh: Mesh
    parameters: Mapping[str, ParameterDecision]
    """By fully qualified name, every tied name included."""

    operators: Mapping[str, OperatorDecision]
    """By name of the representative operator (`Graph.representative`); inputs, buffers and tangents included."""

    outputs: Mapping[str, Layout]
    """By output name: layout of each user-visible output."""

    outputs_in_time: Mapping[str, Placement] = field(default_factory=dict)
    """By output name: how the micro-batches' outputs make the step's (`Partial`: added up, `Shard(0)`: one behind the
    other, `Replicate`: any of them), where there are several."""

    outputs_dropped: tuple[str, ...] = ()
    """Outputs beside the loss that steps of training do not keep of their micro-batches, since they would not fit."""

    collectives: tuple[Collective, ...]
    buckets: tuple[Bucket, ...] = ()
    """Collectives that travel together; every other one goes by itself."""

    ahead: tuple[Ahead, ...] = ()
    """Gathers of parameters that are issued ahead of their use, in order; every other one where it is first read."""

    deferred: Mapping[str, str] = field(default_factory=dict)
    """Operators that run later than the program has them, with what follows from them: right before which operator,
    or, where it has no name, at the end of backward."""

    streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By mesh axis, the kinds of collectives that have a process group of their own: `parameters`, `gradients`."""

    stages: tuple[Stage, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    recompute: Mapping[str, str] = field(default_factory=dict)

    @property
    def levels(self) -> frozenset[tuple[str, int]]:
        """Return the streams that have collectives in two levels, with the ranks inside the inner one."""
        return frozenset((each.stream, each.inner) for each in self.collectives if each.inner > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a plan was made for."""

    graph: str
    cluster: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained and how."""

    model: str
    global_batch: int
    microbatch: int
    num_microbatches: int
    precision: str
    optimizer: str
    tokens_per_step: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """What `--set` gave the model that the reference names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device at the peak, by what they hold."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    reserved: int = 0

    @property
    def total(self) -> int:
        """Return the peak in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary + self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the step's seconds go; they add up to the step time."""

    compute_s: float
    exposed_communication_s: float
    bubble_s: float
    optimizer_s: float
    host_s: float = 0.0
    """Of a device that waits for the host, which issues its operators one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What the cost model predicts of one pipeline stage."""

    index: int
    step_time_s: float
    peak_memory_bytes: int
    forward_s: float = 0.0
    """Of one micro-batch, as the seconds below; where ranks share cores, of ranks that have one each."""

    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    forward_waiting_s: float = 0.0
    """Of `forward_s`, waiting for collectives inside the stage, which takes no core."""

    input_gradient_waiting_s: float = 0.0
    weight_gradient_waiting_s: float = 0.0
    send_forward_s: float = 0.0
    """Of what the next stage reads."""

    send_backward_s: float = 0.0
    """Of the gradients of that, from the next stage."""

    memory_budget_bytes: int = 0
    """What a device of the stage may hold; 0: as `Estimates` has it."""

    devices: str = ""
    """Those of the stage's ranks, equal ones counted: `8 x h100`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that one rank does, from one moment of the predicted step to another."""

    name: str
    """Of a collective `collective_name`; of computations their module or operator; of waiting `wait` and a name."""

    stream: str
    start_s: float
    end_s: float
    rank: int = 0
    exposed_s: float = 0.0
    """Of a collective, the seconds that computation gives for it."""

    kind: int = -1
    """Of a collective, its place in `Decisions.collectives`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What the cost model predicts of the plan."""

    step_time_s: float
    mfu: float
    """Model FLOPs over step time, devices and the peak of the plan's precision."""

    peak_memory_bytes: int
    memory: Memory
    memory_budget_bytes: int
    communication_bytes: int
    """Bytes of all messages of one step on one device."""

    breakdown: Breakdown
    per_stage: tuple[StageEstimate, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Figure name to the formula and data it comes from."""

    timeline: tuple[Span, ...] = ()
    """The predicted step of one device, optimizer left out; of a pipeline, of each of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """How far the search got: `bound` <= best possible objective <= `objective`, in seconds."""

    status: Literal["optimal", "gap", "time_limit", "interrupted", "priced"]
    """How the search ended; `priced`: there was none, decisions of another plan were priced for this cluster."""

    objective: float
    bound: float
    gap: float
    seconds: float | None
    """What the search kept to: its time limit, or the multiple of it that it took.

    Not the clock's figure, which is printed instead: equal requests give equal bytes.
    """

    seed: int
    candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A candidate that lost, and why."""

    degrees: Mapping[str, int]
    step_time_s: float | None
    peak_memory_bytes: int | None
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something the user should know about the plan."""

    code: str
    text: str
    location: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions, predictions and their proof, for one program on one cluster."""

    fingerprint: Fingerprint
    workload: Workload
    cluster: Mapping[str, Any]
    """The resolved cluster file."""

    decisions: Decisions
    estimates: Estimates
    solver: Solver
    constraints: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[Warned, ...] = ()
    autopar_version: str = ""
    format_version: str = "1.0"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, whole or not at all; see `plan_json.save`."""
        from autopar.ir import plan_json

        plan_json.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a file; see `plan_json.load`."""
        from autopar.ir import plan_json

        return plan_json.load(path)
