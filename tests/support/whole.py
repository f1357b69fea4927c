"""A captured program on whole tensors, and its rewritten form on all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import Captured
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial
from autopar.ir.plan import Decisions
from autopar.ir.squeeze import squeeze
from autopar.rewrite import Programs, rewrite
from autopar.runtime.executable import WHATEVER_STRIDES
from autopar.runtime.placing import own_part
from tests.support import lockstep
from tests.support.remembering import remembered


@dataclass
class Whole:
    """A captured model with values for every placeholder, tangents included."""

    captured: Captured
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, example: Any, **how: bool) -> Whole:
        """Return the model's program with its own values, the example's, and random tangents."""
        captured = remembered(model, example, **how)
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        tensors = captured.call.flatten(args, kwargs)
        metas = {node.name: node.meta["val"] for node in captured.joint.graph.find_nodes(op="placeholder")}
        generator = torch.Generator().manual_seed(5)
        values = dict(captured.constants)
        for each in captured.placeholders:
            if each.kind in {"parameter", "buffer"}:
                values[each.name] = held[each.target].detach().clone()
            elif each.kind == "input":
                values[each.name] = tensors[each.index]
            elif each.kind != "constant":
                meta = metas[each.name]
                values[each.name] = torch.randn(meta.shape, generator=generator, dtype=meta.dtype)
        return cls(captured, values)

    def run(self) -> list[torch.Tensor | None]:
        """Return the joint program's results, beside `graph.outputs`."""
        with torch.no_grad():
            return list(_Run(self.captured.joint).run(*[self.values[each.name] for each in self.captured.placeholders]))


class _Run(fx.Interpreter):
    """Runs a program with the kernels that ranks run: some read memory as it lies, and fake tensors lie otherwise."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(WHATEVER_STRIDES.get(target, target), args, kwargs)


@dataclass
class Ranked:
    """A rewritten program and what each rank made: results beside `graph.outputs`, and what it issued."""

    programs: list[Programs]
    results: list[list[torch.Tensor | None]]
    layouts: list[Layout]
    issued: list[list[lockstep.Issued]]
    mesh: Mesh

    def expected(self, rank: int, place: int, whole: torch.Tensor) -> torch.Tensor:
        """Return what `rank` should hold of a whole result."""
        return part(whole, self.layouts[place], self.mesh, rank)

    def held(self, rank: int, place: int, whole: torch.Tensor) -> torch.Tensor:
        """Return what `rank` holds of a whole result, without the room beside it where that is padded."""
        made = self.results[rank][place]
        if made is None:
            raise ValueError(f"rank {rank} holds nothing of result {place}")
        return made[tuple(slice(length) for length in self.expected(rank, place, whole).shape)]


def part(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return what a rank holds of a value; where terms are held, the first rank of the axis holds all of it."""
    held = own_part(whole, layout, mesh, rank).contiguous()
    away = any(isinstance(p, Partial) and at for p, at in zip(layout, mesh.coordinate(rank), strict=True))
    return torch.zeros_like(held) if away else held


def _given(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return what a rank is given of a value: all of a padded one's room, of which what is beside its part is NaN."""
    own, room = part(whole, layout, mesh, rank), part(whole, layout, mesh, 0).shape
    return own if own.shape == room else filled(own, room)


def filled(own: torch.Tensor, room: Sequence[int]) -> torch.Tensor:
    """Return a tensor of shape `room` that begins with `own`, and is NaN beside it."""
    lacking = [each for n, m in zip(reversed(room), reversed(own.shape), strict=True) for each in (0, n - m)]
    return torch.nn.functional.pad(own, lacking, value=torch.nan)


def run_ranks(whole: Whole, decisions: Decisions) -> Ranked:
    """Rewrite for every rank and run forward, then backward, in lockstep."""
    captured, mesh = whole.captured, squeeze(decisions).mesh
    everyone = range(mesh.world_size)
    programs = [rewrite(captured.joint, captured.graph, decisions, rank) for rank in everyone]
    first = programs[0]
    issued: list[list[lockstep.Issued]] = [[] for _ in everyone]
    given = [[_given(whole.values[v.name], v.layout, mesh, rank) for v in first.inputs] for rank in everyone]
    with torch.no_grad():
        axis_of = {f"{axis}:{kind}": axis for axis, kinds in decisions.streams.items() for kind in kinds}
        made = lockstep.run([p.forward for p in programs], given, mesh, issued=issued, axis_of=axis_of)
        saved_from = len(first.outputs) + len(first.mutations)
        arguments = []
        for rank in everyone:
            source = {"input": given[rank], "output": made[rank], "value": made[rank][saved_from:]}
            saved = [source[each.source][each.index] for each in first.saved]
            tangents = [part(whole.values[v.name], v.layout, mesh, rank) for v in first.tangents]
            arguments.append([*saved, *tangents])
        gradients: list[Any] = [() for _ in everyone]
        if first.backward is not None:
            gradients = lockstep.run([p.backward for p in programs], arguments, mesh, issued=issued, axis_of=axis_of)
    results = [_ordered(whole, first, made[rank], gradients[rank]) for rank in everyone]
    layouts = [v.layout for v in _ordered(whole, first, (*first.outputs, *first.mutations), first.gradients)]
    return Ranked(programs, results, layouts, issued, mesh)


def _ordered(whole: Whole, first: Programs, made: Any, gradients: Any) -> list[Any]:
    streams = {
        "output": iter(made[: len(first.outputs)]),
        "mutation": iter(made[len(first.outputs) :]),
        "gradient": iter(gradients),
    }
    return [next(streams[output.kind]) for output in whole.captured.graph.outputs]
