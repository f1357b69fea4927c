"""What the runtime needs to know of a program, whoever captured and rewrote it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from autopar.ir.placement import Layout
from autopar.ir.reads import Read
from autopar.ir.tensor import TensorMeta


class Tensor(Protocol):
    """A tensor input of a call."""

    @property
    def path(self) -> str:
        """Return where it sits among the arguments."""

    @property
    def meta(self) -> TensorMeta:
        """Return its global shape and dtype."""

    @property
    def requires_grad(self) -> bool:
        """Return whether the program gives a gradient for it."""


class Call(Protocol):
    """The form of a call."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Return the tensor inputs, in the order of the input placeholders."""

    @property
    def reads(self) -> Sequence[Read]:
        """Return the plain values of attributes that the program was made for."""

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call; `InputMismatchError` if it has another form."""


class Result(Protocol):
    """The form of the model's return value."""

    @property
    def totals(self) -> Sequence[int]:
        """Return the numbers of the user outputs that other results are made of: each rank needs them whole."""

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """Return the model's return value with these user outputs in it."""


class Start(Protocol):
    """A placeholder: parameter, buffer, input, constant or tangent."""

    @property
    def name(self) -> str:
        """Return its operator's name."""

    @property
    def kind(self) -> str:
        """Return what it is."""

    @property
    def target(self) -> str:
        """Return the qualified name of a parameter or buffer, the path of an input."""

    @property
    def index(self) -> int:
        """Return, for an input, its number among the call's tensors."""


class Value(Protocol):
    """A tensor that enters or leaves a program."""

    @property
    def name(self) -> str:
        """Return its operator's name, of a user output its path."""

    @property
    def meta(self) -> TensorMeta | None:
        """Return its global shape and dtype; `None` if it does not exist."""

    @property
    def layout(self) -> Layout:
        """Return where its elements live."""


class Saved(Protocol):
    """Where a value that backward reads is found."""

    @property
    def source(self) -> str:
        """Return `input`, `output` or `value`."""

    @property
    def index(self) -> int:
        """Return its place among those."""


class Issued(Protocol):
    """One collective."""

    @property
    def op(self) -> str:
        """Return its name."""

    @property
    def axis(self) -> str:
        """Return the mesh axis."""

    @property
    def bytes(self) -> int:
        """Return the size of the larger of its local buffers."""

    @property
    def inner(self) -> int:
        """Return the ranks inside the inner of two levels; 1: it is flat."""


class Seeding(Protocol):
    """How the random operators of a step are given their seed."""

    @property
    def next_seed(self) -> Callable[[], int]:
        """Return what draws a seed from torch's default generator."""

    @property
    def step_seed(self) -> Callable[..., AbstractContextManager[None]]:
        """Return the context in which a step runs with a seed; of a micro-batch with its own, and that of the step."""


class Local(Protocol):
    """One rank's forward and backward (`autopar.rewrite.Programs`)."""

    @property
    def forward(self) -> fx.GraphModule:
        """Return the program of user outputs, new buffer values, and values saved for backward."""

    @property
    def inputs(self) -> Sequence[Value]:
        """Return what forward takes."""

    @property
    def outputs(self) -> Sequence[Value]:
        """Return the user outputs."""

    @property
    def mutations(self) -> Sequence[Value]:
        """Return the buffers and inputs that get new values."""

    @property
    def saved(self) -> Sequence[Saved]:
        """Return what backward takes first."""

    @property
    def tangents(self) -> Sequence[Value]:
        """Return what backward takes then."""

    @property
    def gradients(self) -> Sequence[Value]:
        """Return what backward gives."""

    @property
    def emitted(self) -> Sequence[Issued]:
        """Return the collectives of forward, then of backward, in the order in which they are issued."""

    @property
    def seeding(self) -> Seeding | None:
        """Return how steps are seeded; `None` if the programs draw no random numbers of their own."""

    def backward_without(self, absent: Collection[str]) -> fx.GraphModule | None:
        """Return backward for a step in which these tangents are zero."""


@dataclass(frozen=True)
class Program:
    """A program that is ready to run on one rank, for calls of one form."""

    call: Call
    result: Result
    placeholders: Sequence[Start]
    constants: Mapping[str, torch.Tensor]
    local: Local
