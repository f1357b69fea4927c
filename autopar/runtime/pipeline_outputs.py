"""User outputs of a step made of its micro-batches' parts, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import dtensor_of, dtensor_spec
from autopar.ir.placement import Replicate
from autopar.runtime.errors import group_lost
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.placing import dtensor_placements
from autopar.runtime.program import Value
from autopar.runtime.staged_program import PipelinedProgram
from autopar.runtime.step import dense_strides


class Outputs:
    """Puts a program's outputs together, step after step.

    Scalars are on all ranks. A larger output is a DTensor on the ranks of the stage that makes it, others hold an empty
    part of it; with one pipeline rank it is plain where every rank holds the whole.
    """

    def __init__(self, program: PipelinedProgram, pipeline: PipelineRanks, rank_of: Mapping[str, int]) -> None:
        """Take the pipeline rank that makes each output, by the output's name."""
        self._pipeline = pipeline
        self._rank_of = rank_of
        self._microbatches = program.schedule.microbatches
        self._combine = dict(program.staged.outputs)
        self._values = program.outputs
        self._specs = {each.name: self._spec(each) for each in self._values}
        self._parts: dict[str, list[Any]] = {}

    def begin(self) -> None:
        """Start a step."""
        self._parts.clear()

    def add(self, microbatch: int, made: Mapping[str, torch.Tensor]) -> None:
        """Take a micro-batch's parts; of a sum only the sum is held, of equal parts the first."""
        for name, part in made.items():
            held = self._parts.get(name)
            combine = self._combine[name]
            if combine == "stack":
                self._parts.setdefault(name, [None] * self._microbatches)[microbatch] = part
            elif held is None:
                self._parts[name] = [part]
            elif combine == "sum":
                held[0] = held[0] + part  # not in place: the first part may be kept for backward

    def whole(self) -> list[Any]:
        """Return the step's outputs, as the user gets them.

        Raises:
            PeerLostError: the stage that makes a scalar stopped.
        """
        found = []
        for value in self._values:
            parts = self._parts.pop(value.name, None)
            local = None if parts is None else parts[0] if len(parts) == 1 else torch.cat(parts)
            if value.meta is not None and not value.meta.shape:
                found.append(self._everywhere(value, local))
                continue
            spec = self._specs[value.name]
            if local is None:
                local = torch.empty(0, dtype=_dtype(value), device=self._pipeline.ranks.device)
            found.append(local if spec is None else dtensor_of(local, spec))
        return found

    def _everywhere(self, value: Value, local: torch.Tensor | None) -> torch.Tensor:
        """Return a scalar of one stage on all ranks, in memory that no program knows."""
        if local is None:
            local = torch.empty((), dtype=_dtype(value), device=self._pipeline.ranks.device)
        else:
            local = local.clone()
        if self._pipeline.depth > 1:
            source = self._pipeline.rank_at(self._rank_of[value.name])
            try:
                dist.broadcast(local, source, group=self._pipeline.line)
            except RuntimeError as error:
                raise group_lost(f"broadcast of the output {value.name}", [source], str(error)) from error
        return local

    def _spec(self, value: Value) -> Any:
        pipeline = self._pipeline
        mesh = pipeline.groups.mesh
        whole = all(isinstance(each, Replicate) for each in value.layout)
        if value.meta is None or not value.meta.shape or (pipeline.depth == 1 and (whole or not mesh.axes)):
            return None
        placements: tuple[Any, ...] = dtensor_placements(value.name, value.layout, mesh)
        if not mesh.axes:
            from torch.distributed import tensor as dt

            placements = (dt.Replicate(),)
        on = pipeline.meshes[self._rank_of[value.name]] if pipeline.depth > 1 else pipeline.groups.device_mesh
        shape = value.meta.shape
        return dtensor_spec(on, placements, shape, dense_strides(shape), _dtype(value))


def _dtype(value: Value) -> torch.dtype:
    found: torch.dtype = getattr(torch, value.meta.dtype if value.meta is not None else "float32")
    return found
