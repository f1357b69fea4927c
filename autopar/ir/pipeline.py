"""What one micro-batch costs on each pipeline stage and between them: seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.ir.schedule import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage, one micro-batch, on one of the stage's devices; collectives inside the stage are in the seconds."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float | None = None
    """Of both gradients in one go; None: the sum of the two."""

    forward_waiting_s: float = 0.0
    """Of the seconds above, waiting for collectives inside the stage: it takes no core from other ranks."""

    input_gradient_waiting_s: float = 0.0
    weight_gradient_waiting_s: float = 0.0

    static_bytes: int = 0
    """Parameters, gradients, optimizer state: there from start to end."""

    activation_bytes: int = 0
    """Of one micro-batch, from the start of its forward to the end of its (input) gradient."""

    kept_bytes: int = 0
    """Of one micro-batch, from the end of its input gradient to the end of its weight gradient."""

    def seconds(self, kind: Kind) -> float:
        """Return the seconds of a computation; transfers belong to an `Edge`."""
        if kind == "B" and self.backward_s is not None:
            return self.backward_s
        return {
            "F": self.forward_s,
            "B": self.input_gradient_s + self.weight_gradient_s,
            "I": self.input_gradient_s,
            "W": self.weight_gradient_s,
        }[kind]

    def waiting_s(self, kind: Kind) -> float:
        """Return what of a computation's seconds is waiting for collectives inside the stage."""
        return {
            "F": self.forward_waiting_s,
            "B": min(self.input_gradient_waiting_s + self.weight_gradient_waiting_s, self.seconds("B")),
            "I": self.input_gradient_waiting_s,
            "W": self.weight_gradient_waiting_s,
        }[kind]

    def allocated_bytes(self, kind: Kind) -> int:
        """Return the bytes that a computation takes when it starts."""
        return self.activation_bytes if kind == "F" else 0

    def released_bytes(self, kind: Kind) -> int:
        """Return the bytes that are fewer when a computation has ended."""
        return {
            "F": 0,
            "B": self.activation_bytes,
            "I": self.activation_bytes - self.kept_bytes,
            "W": self.kept_bytes,
        }[kind]


@dataclass(frozen=True, slots=True)
class Edge:
    """Values that one stage makes and a later one reads; their gradients go back the same way."""

    source: int
    target: int
    forward_s: float
    """Of one micro-batch's transfer, where the two stages are on different ranks."""

    backward_s: float


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """All stages, and the edges between them: every stage to its next, and skip connections over several."""

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        pairs = [(edge.source, edge.target) for edge in self.edges]
        for source, target in pairs:
            if not 0 <= source < target < len(self.stages):
                raise ScheduleError(f"no edge from stage {source} to stage {target} of {len(self.stages)}: edges go up")
        if len(set(pairs)) < len(pairs):
            double = next(pair for i, pair in enumerate(pairs) if pair in pairs[:i])
            raise ScheduleError(f"two edges from stage {double[0]} to stage {double[1]}: give the sum of their seconds")
        for stage in range(len(self.stages) - 1):
            if (stage, stage + 1) not in pairs:
                raise ScheduleError(f"no price of the transfer from stage {stage} to stage {stage + 1}")

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Return the edges that pass over a stage, as pairs of stages."""
        return tuple((edge.source, edge.target) for edge in self.edges if edge.target > edge.source + 1)


def equal_stages(
    stages: int, cost: StageCost, *, forward_s: float = 0.0, backward_s: float = 0.0, skips: Sequence[Edge] = ()
) -> PipelineCosts:
    """Return a pipeline whose stages all cost the same, and so do the transfers from each to the next."""
    chain = (Edge(stage, stage + 1, forward_s, backward_s) for stage in range(stages - 1))
    return PipelineCosts((cost,) * stages, (*chain, *skips))
