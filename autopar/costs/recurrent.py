"""Time, operations and workspace of a recurrent layer, whose steps wait for one another.

What reads the input is one product for all steps; what reads the last step's state is a product of a few samples a
step, and each pays what a kernel pays to start. Backward runs forward again (`own_recurrence.py`), then a product a
step, and those of all steps that give the gradients of weights and input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Op
from autopar.ir.table import Floats
from cost_models import compute
from cost_models.device import DeviceSpec, dtype_bytes

Shape = tuple[int, ...]

_PREFIXES = ("autopar_ops.lstm_layer", "autopar_ops.rnn_layer")
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True, slots=True)
class _Layer:
    """Sizes of one layer on one rank."""

    steps: int
    samples: int
    features: int
    hidden: int
    """Of the gates; a state that is projected is smaller."""

    state: int
    gates: int
    directions: int
    backward: bool

    @classmethod
    def of(cls, op: Op, ins: Sequence[Shape]) -> _Layer:
        """Return the sizes of a call, given the local shapes of what it reads."""
        (at,) = (place for place, arg in enumerate(op.args) if arg in _GATES)
        kind, batch_first = str(op.args[at]), op.args[at + 2]
        states, weights = op.args[at - 2], op.args[at - 1]
        if not isinstance(states, tuple) or not isinstance(weights, tuple):
            raise TypeError(f"{op.name} has no lists of states and weights")
        first = len(ins) - len(weights) - len(states)
        outer, inner, features = ins[first - 1]
        directions, samples, state = ins[first]
        gates = _GATES[kind]
        hidden = ins[first + len(states)][0] // gates
        steps = inner if batch_first else outer
        return cls(steps, samples, features, hidden, state, gates, directions, "backward" in op.target)

    def products(self, *, again: bool) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """Yield how often a matrix product (batch, m, n, k) is done; `again`: with what backward repeats of forward."""
        wide, rows = self.gates * self.hidden, self.steps * self.samples
        each = self.steps * self.directions
        projected = self.state != self.hidden
        if not self.backward or again:
            yield self.directions, (1, rows, wide, self.features)
            yield each, (1, self.samples, wide, self.state)
            if projected:
                yield each, (1, self.samples, self.state, self.hidden)
        if self.backward:
            yield each, (1, self.samples, self.state, wide)
            yield self.directions, (1, rows, self.features, wide)
            yield self.directions, (1, wide, self.features, rows)
            yield self.directions, (1, wide, self.state, rows)
            if projected:
                yield each, (1, self.samples, self.hidden, self.state)
                yield self.directions, (1, self.hidden, self.state, rows)

    def seconds(self, dtype: str, device: DeviceSpec) -> float:
        """Return the time of the layer."""
        total = 0.0
        for count, product in self.products(again=True):
            batch, m, n, k = (np.array([size], dtype=np.float64) for size in product)
            total += count * float(compute.matmul_s(batch, m, n, k, dtype, device)[0])
        # A step reads and writes its gates, its cell and its output once; backward does so for what it repeats, and for
        # the gradients, which read what was kept besides.
        elements = self.samples * self.hidden * (self.gates + 2)
        moved = 2.0 * elements * dtype_bytes(dtype)
        gate_s = float(compute.memory_bound_s(moved, device, self.samples * self.hidden * (self.gates + 1)))
        return total + self.steps * self.directions * gate_s * (3 if self.backward else 1)

    def held_bytes(self, dtype: str) -> float:
        """Return the bytes of gates and states that backward keeps of the forward it repeats."""
        kept = self.steps * self.samples * self.directions * self.hidden * (self.gates + 2)
        return float(kept * dtype_bytes(dtype)) if self.backward else 0.0


def is_recurrent(op: Op) -> bool:
    """Return whether an operator is a recurrent layer, forward or backward."""
    return op.target.startswith(_PREFIXES)


def recurrent_seconds(op: Op, ins: Sequence[Sequence[Shape]], dtype: str, device: DeviceSpec) -> Floats:
    """Return the seconds of a recurrent layer for the local shapes that each strategy reads."""
    return np.array([_Layer.of(op, each).seconds(dtype, device) for each in ins], dtype=np.float64)


def recurrent_flops(op: Op, ins: Sequence[Shape]) -> float:
    """Return the floating-point operations of its products, without what backward repeats of forward."""
    return float(sum(2 * count * math.prod(product) for count, product in _Layer.of(op, ins).products(again=False)))


def recurrent_bytes(op: Op, ins: Sequence[Sequence[Shape]], dtype: str) -> Floats:
    """Return the bytes that it holds while it runs, beside what it reads and makes."""
    return np.array([_Layer.of(op, each).held_bytes(dtype) for each in ins], dtype=np.float64)
