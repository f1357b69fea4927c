"""What the rewriter hands to the runtime of a pipeline: programs of a rank's stages, and what goes between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from autopar.ir.graph import Phase
from autopar.ir.placement import Placement
from autopar.rewrite.microbatches import Totals
from autopar.rewrite.programs import Seeding

ItemKind = Literal["start", "value", "output", "mutation", "tangent", "gradient"]


@dataclass(frozen=True, slots=True)
class Item:
    """One argument or result of a stage's program."""

    kind: ItemKind
    """`start`: placeholder of the captured graph. `value`: tensor of the local program. `output`: the user's."""

    name: str
    """Of the placeholder's, parameter's, buffer's or tangent's operator; of the value; of the output."""

    turn: int = 0
    """Which of the micro-batches that a program runs at once it is of."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One contiguous tensor that one stage makes and another reads, once a micro-batch."""

    value: str
    source: int
    target: int
    phase: Phase
    """After which program of the source it is sent. What the target reads in backward alone may come in forward too."""

    shape: tuple[int, ...]
    """Local."""

    dtype: str
    """`float32`"""


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages hold: its accumulated, finished gradients are summed over them."""

    name: str
    """Of the parameter's operator."""

    stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One rank's share of one stage: programs run in this order, all but `begin` and `finish` once a micro-batch."""

    stage: int
    forward: fx.GraphModule
    takes: tuple[Item, ...]
    """`start`, and `value` received from earlier stages."""

    gives: tuple[Item, ...]
    """`output`, `mutation`, and `value`: sent to later stages or kept for backward. One tensor may be given twice."""

    backward: fx.GraphModule | None
    backward_takes: tuple[Item, ...] = ()
    """`start`, `value` (kept, or received before forward or before backward), `tangent`."""

    backward_gives: tuple[Item, ...] = ()
    """`value` to send, and `gradient`: the term of one micro-batch, in memory of its own, not yet reduced."""

    begin: fx.GraphModule | None = None
    """Once a step, before the first micro-batch: parameters to what is gathered of them for all micro-batches."""

    begin_takes: tuple[str, ...] = ()
    begin_gives: tuple[str, ...] = ()
    """Names under which the other programs take what it makes, as `start`."""

    weights: fx.GraphModule | None = None
    """Where backward is split: the rest of it, which no other stage waits for."""

    weights_takes: tuple[Item, ...] = ()
    weights_gives: tuple[Item, ...] = ()
    finish: fx.GraphModule | None = None
    """Once a step: accumulated gradients to gradients in their parameters' layout."""

    finish_takes: tuple[str, ...] = ()
    finish_gives: tuple[str, ...] = ()
    """All gradients of the stage's parameters; what it does not take is zero: a tied one that no gradient reaches here.

    Gradients of inputs are finished when backward gives them.
    """


@dataclass(frozen=True, kw_only=True)
class StagedPrograms:
    """One rank's programs for its stages of a pipeline, and the traffic of the whole of it."""

    stages: Mapping[int, StageProgram]
    transfers: tuple[Transfer, ...]
    """Of all stages, in an order that all ranks share: by time, then as the program makes them."""

    ties: tuple[Tie, ...]
    stage_of: Mapping[str, int]
    """First stage that holds a parameter or buffer, by operator."""

    totals: tuple[Totals, ...] = ()
    """What is summed over micro-batches before the first runs, one program after another."""

    outputs: tuple[tuple[str, Placement], ...] = ()
    """Where each of the micro-batches' outputs lies along time: terms of the step's, its rows, or all alike."""

    joined: Mapping[str, str] = field(default_factory=dict)
    """Buffers whose new value is made of what the micro-batches give for it, by `sum`, `max` or `min`."""

    dropped: tuple[str, ...] = ()
    """Outputs that steps of training do not put together."""

    draws: bool = False
    """Whether any stage draws random numbers of its own: all ranks then need the step's seed."""

    @property
    def seeding(self) -> Seeding | None:
        """Return how each micro-batch is given its seed; `None` if no stage draws random numbers of its own."""
        return Seeding() if self.draws else None
