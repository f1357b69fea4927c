"""User outputs of a step made of its micro-batches' parts, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import dtensor_of, dtensor_spec, local_of
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.runtime.errors import group_lost
from autopar.runtime.joining import JOIN
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.placing import dtensor_placements, own_part
from autopar.runtime.program import Value
from autopar.runtime.staged_program import PipelinedProgram
from autopar.runtime.stand_ins import Dropped, Elsewhere
from autopar.runtime.step import dense_strides
from autopar.runtime.whole import whole


class Outputs:
    """Puts a program's outputs together, step after step.

    Scalars are on all ranks, and with `whole` all outputs. Else a larger output is a DTensor on the ranks of the stage
    that makes it, with an `Elsewhere` in its place on others; with one pipeline rank it is plain where every rank holds
    the whole.
    """

    def __init__(
        self, program: PipelinedProgram, pipeline: PipelineRanks, rank_of: Mapping[str, int], *, whole: bool = False
    ) -> None:
        """Take the pipeline rank that makes each output, by the output's name."""
        self._whole = whole
        self._pipeline = pipeline
        self._rank_of = rank_of
        self._microbatches = program.microbatches
        self._in_time = dict(program.staged.outputs)
        self._droppable = program.staged.dropped
        self._values = program.outputs
        self._shared = {self._values[place].name for place in program.result.totals}
        split = [each.layout for each in program.inputs if each.name in program.split_inputs]
        self._brought = [i for i, each in enumerate(split[0]) if isinstance(each, Shard)] if split else []
        self._specs = {each.name: self._spec(each) for each in self._values}
        self._in_order = {each.name for each in self._values if not self._scattered_rows(each)}
        self._parts: dict[str, list[Any]] = {}
        self._dropped: frozenset[str] = frozenset()

    def begin(self, *, trains: bool) -> None:
        """Start a step, with backward or forward only."""
        self._parts.clear()
        self._dropped = frozenset(self._droppable if trains else ())

    def add(self, microbatch: int, made: Mapping[str, torch.Tensor]) -> None:
        """Take a micro-batch's parts; held are what terms make, the first of equal parts, and all rows in one."""
        for name, part in made.items():
            if name in self._dropped:
                continue
            held = self._parts.get(name)
            match self._in_time[name]:
                case Shard(0, 1) if self._microbatches > 1 and name in self._in_order:
                    if held is None:
                        rows = (self._microbatches * part.shape[0], *part.shape[1:])
                        held = self._parts[name] = [torch.empty(rows, dtype=part.dtype, device=part.device)]
                    held[0].narrow(0, microbatch * part.shape[0], part.shape[0]).copy_(part)
                case Shard():
                    self._parts.setdefault(name, [None] * self._microbatches)[microbatch] = part
                case Partial(reduce) if held is not None:
                    held[0] = JOIN[reduce](held[0], part)  # not in place: the first part may be kept for backward
                case _ if held is None:
                    self._parts[name] = [part]

    def whole(self) -> list[Any]:
        """Return the step's outputs, as the user gets them.

        Raises:
            PeerLostError: the stage that makes a scalar stopped.
        """
        found: list[Any] = []
        for value in self._values:
            if value.name in self._dropped:
                found.append(Dropped(value.name, self._microbatches))
                continue
            parts = self._parts.pop(value.name, None)
            local = None if parts is None else parts[0] if len(parts) == 1 else self._stacked(value, parts)
            spec = self._specs[value.name]
            shared = self._whole or value.name in self._shared
            if value.meta is not None and (not value.meta.shape or shared):
                if local is not None and spec is not None:
                    local = whole(dtensor_of(local, spec))
                found.append(self._everywhere(value, local))
                continue
            if local is None:
                found.append(self._elsewhere(value))
                continue
            found.append(local if spec is None else dtensor_of(local, spec))
        return found

    def _stacked(self, value: Value, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's rows of an output of which it has rows of every micro-batch.

        Where programs split each micro-batch, a rank has every so many rows, and ranks exchange them.
        """
        placed = self._in_time[value.name]
        if isinstance(placed, Shard) and placed != Shard(0):
            return self._in_runs(value, parts, placed)
        axes = self._scattered_rows(value)
        from torch.distributed import tensor as dt

        mesh, count = self._pipeline.groups.mesh, len(parts)
        local = torch.stack(parts)  # [micro-batches, rows of each, ...]
        layout = dtensor_placements(value.name, value.layout, mesh)
        inside = [dt.Shard(each.dim + 1) if isinstance(each, dt.Shard) else each for each in layout]
        held = dt.DTensor.from_local(local, self._pipeline.groups.device_mesh, inside, run_check=False)
        even = count % math.prod(mesh.sizes[i] for i in axes) == 0
        wanted = [(dt.Shard(0) if even else dt.Replicate()) if i in axes else each for i, each in enumerate(inside)]
        found = local_of(held.redistribute(placements=wanted)).flatten(0, 1)
        if even:
            return found
        rows = tuple(each if i in axes else Replicate() for i, each in enumerate(value.layout))
        return own_part(found, rows, mesh, self._pipeline.groups.rank).contiguous()

    def _in_runs(self, value: Value, parts: list[torch.Tensor], placed: Shard) -> torch.Tensor:
        """Return this rank's part of an output whose samples are in another dimension, or in runs of one.

        Where programs split that dimension of each micro-batch, ranks gather it, and take their part of the whole.
        """
        dim = placed.dim
        axes = [i for i, each in enumerate(value.layout) if isinstance(each, Shard) and each.dim == dim]
        brought, mesh = self._brought == axes, self._pipeline.groups.mesh
        if axes and not brought:
            from torch.distributed import tensor as dt

            layout = dtensor_placements(value.name, value.layout, mesh)
            wanted = [dt.Replicate() if i in axes else each for i, each in enumerate(layout)]
            on = self._pipeline.groups.device_mesh
            held = [dt.DTensor.from_local(each, on, layout, run_check=False) for each in parts]
            parts = [local_of(each.redistribute(placements=wanted)) for each in held]
        runs = [each.reshape((*each.shape[:dim], placed.outer, -1, *each.shape[dim + 1 :])) for each in parts]
        found = torch.cat(runs, dim + 1).flatten(dim, dim + 1)
        if brought:
            return found
        split = tuple(each if i in axes else Replicate() for i, each in enumerate(value.layout))
        return own_part(found, split, mesh, self._pipeline.groups.rank).contiguous()

    def _scattered_rows(self, value: Value) -> list[int]:
        """Return the axes that split the rows of each micro-batch; none where ranks bring their own rows, in order."""
        axes = [i for i, each in enumerate(value.layout) if isinstance(each, Shard) and each.dim == 0]
        return [] if self._brought == axes else axes

    def _elsewhere(self, value: Value) -> Elsewhere:
        """Return what stands here for an output that the ranks of another pipeline rank have."""
        shape = value.meta.shape if value.meta is not None else ()
        return Elsewhere(value.name, shape, _dtype(value), tuple(self._pipeline.blocks[self._rank_of[value.name]]))

    def _everywhere(self, value: Value, local: torch.Tensor | None) -> torch.Tensor:
        """Return an output of one stage on all ranks, in memory that no program knows."""
        if local is None:
            shape = value.meta.shape if value.meta is not None else ()
            local = torch.empty(shape, dtype=_dtype(value), device=self._pipeline.ranks.device)
        else:
            local = local.clone(memory_format=torch.contiguous_format)
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
