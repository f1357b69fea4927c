"""A step on one device as tasks on streams: computations in one order, and the collectives between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

COMPUTE = "compute"
"""The stream of computations; every other stream is that of collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An operator or a collective of one device's step; others name it by its place in the list of tasks."""

    name: str
    """Of an operator its name, of a collective `collective_name`."""

    seconds: float
    """On its own stream, alone there."""

    phase: str
    reads: tuple[int, ...] = ()
    """Tasks whose results it reads."""

    stream: str = COMPUTE
    link: str = ""
    """Of a collective, the link level that it shares with collectives of other streams."""

    issue_s: float = 0.0
    """Of a collective, the seconds that issuing it takes from the stream of computations."""

    within_s: float = 0.0
    """Of `issue_s`, what it takes while it is under way (a core's work on its bytes, a kernel's multiprocessors), and
    not before it begins."""

    makes_bytes: int = 0
    memory_of: int | None = None
    """The task whose memory its result is, if it makes none of its own: a view's."""

    kept: bool = False
    """Whether its result outlives the step."""

    beside_bytes: int = 0
    """What the device holds while this runs that no task made: parameters, a workspace; below zero where results of
    tasks share memory."""

    module: str = ""
    gathers: str = ""
    """Of a gather of parameters, what it gathers, as the plan names it."""

    reduces: bool = False
    """Whether this brings gradients to their places."""

    kind: int = -1
    """Of a collective, its place among the plan's."""

    @property
    def communicates(self) -> bool:
        """Return whether this is a collective."""
        return self.stream != COMPUTE


def collective_name(op: str, tensor: str, axis: str, phase: str) -> str:
    """Return what plans, programs, traces and errors call one collective."""
    return f"{op} {tensor} @{axis} {phase}"


PARAMETERS, GRADIENTS = "parameters", "gradients"
"""Kinds of collectives that may have a stream of their own beside that of their mesh axis."""


def stream_name(axis: str, kind: str) -> str:
    """Return the name of the stream of one kind of collectives of an axis: `dp_shard:gradients`."""
    return f"{axis}:{kind}"


def level_name(stream: str, level: Literal["inner", "outer"], inner: int) -> str:
    """Return the name of the process groups inside, or across, runs of `inner` ranks: `dp_shard:gradients:inner4`."""
    return f"{stream}:{level}{inner}"


def inner_of(level: str) -> int:
    """Return the ranks inside the inner level from the name of one of its groups: 4 of `dp_shard:inner4`."""
    return int(level.rpartition("er")[2])


def axis_of(stream: str) -> str:
    """Return the mesh axis of a stream: `dp_shard` of `dp_shard:gradients`."""
    return stream.partition(":")[0]


def issuing(name: str) -> str:
    """Return what timelines call the issue of a collective, where the issuer spends time on it."""
    return f"issue {name}"


def waiting(name: str) -> str:
    """Return what timelines call the wait for a collective."""
    return f"wait {name}"


def awaited(name: str) -> str | None:
    """Return the collective that a piece of a timeline's compute stream is exposed time of; `None`: of none."""
    for kind in ("issue ", "wait "):
        if name.startswith(kind):
            return name.removeprefix(kind)
    return None


def block_of(module: str) -> str:
    """Return the part of a module's path up to its first number: `model.layers.3` of `model.layers.3.mlp.up`."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return parts[0]


def breaks(tasks: Sequence[Task], order: Sequence[int]) -> str:
    """Return what is wrong with an order of tasks, empty if nothing is.

    Wrong is to leave out, repeat, or run a task before what it reads; to mix phases; and to issue the collectives of
    a stream in another order on one rank than on others cannot happen where all ranks follow one order.
    """
    if sorted(order) != list(range(len(tasks))):
        return "it is no order of all tasks"
    place = {task: at for at, task in enumerate(order)}
    for at, task in enumerate(order):
        for read in tasks[task].reads:
            if place[read] > at:
                return f"{tasks[task].name} runs before {tasks[read].name}, which it reads"
    phases = [tasks[task].phase for task in order]
    if phases != sorted(phases, key=("forward", "backward").index):
        return "backward begins before forward ends"
    return ""
