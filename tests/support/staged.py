"""The stage programs of all ranks of a pipeline, run in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.graph import Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout
from autopar.ir.plan import Decisions
from autopar.ir.squeeze import squeeze
from autopar.ir.stages import stage_of
from autopar.rewrite.random_ops import step_seed
from autopar.rewrite.spmd import Localiser
from autopar.rewrite.stage_partition import rewrite_stages
from autopar.rewrite.staged import Item, StagedPrograms, StageProgram
from tests.support import lockstep
from tests.support.whole import Whole, part


@dataclass
class Pipeline:
    """One micro-batch's values on every rank of every stage, by (kind, name)."""

    whole: Whole
    mesh: Mesh
    programs: list[StagedPrograms]
    """By rank of a stage's mesh, which has programs of all stages."""

    layouts: dict[tuple[str, str], Layout]
    held: list[dict[tuple[int, str, str], torch.Tensor]] = field(default_factory=list)
    """By rank: (stage, kind, name)."""

    sums: list[dict[tuple[int, str], torch.Tensor]] = field(default_factory=list)
    """By rank: gradients accumulated over micro-batches, by (stage, name)."""

    results: list[dict[tuple[str, str], torch.Tensor]] = field(default_factory=list)
    whole_parameters: list[dict[tuple[int, str], torch.Tensor]] = field(default_factory=list)
    """By rank: parameters gathered before the first micro-batch, by (stage, name)."""

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.programs[0].stages)

    def begin(self) -> None:
        """Run what every stage runs before its first micro-batch."""
        self.whole_parameters = [{} for _ in self.programs]
        for stage in range(self.stages):
            mine = [p.stages[stage] for p in self.programs]
            if mine[0].begin is None:
                continue
            takes = [Item("start", name) for name in mine[0].begin_takes]
            given = [[self._value(rank, stage, item) for item in takes] for rank in range(len(mine))]
            with torch.no_grad():
                made = lockstep.run([p.begin for p in mine], given, self.mesh, under_way=True)
            for rank, values in enumerate(made):
                found = zip(mine[rank].begin_gives, values, strict=True)
                self.whole_parameters[rank].update({(stage, name): value for name, value in found})

    def micro_batch(self, seed: int = 0) -> None:
        """Run forward of every stage, then backward, for the values of `whole`; add gradients up."""
        self.held = [{} for _ in self.programs]
        with torch.no_grad(), step_seed(seed):
            for stage in range(self.stages):
                self._run(stage, "forward", [p.stages[stage] for p in self.programs])
            for stage in reversed(range(self.stages)):
                self._run(stage, "backward", [p.stages[stage] for p in self.programs])
                self._run(stage, "weights", [p.stages[stage] for p in self.programs])

    def _run(self, stage: int, phase: str, programs: Sequence[StageProgram]) -> None:
        gms = [getattr(program, phase) for program in programs]
        if gms[0] is None:
            return
        prefix = "" if phase == "forward" else f"{phase}_"
        takes: tuple[Item, ...] = getattr(programs[0], f"{prefix}takes")
        gives: tuple[Item, ...] = getattr(programs[0], f"{prefix}gives")
        for program in programs:
            assert getattr(program, f"{prefix}takes") == takes
            assert getattr(program, f"{prefix}gives") == gives
        given = [[self._value(rank, stage, item) for item in takes] for rank in range(len(gms))]
        before = [[lockstep.waited(each).clone() for each in values] for values in given]
        made = lockstep.run(gms, given, self.mesh)
        for rank, values in enumerate(made):
            for mine, copy in zip(given[rank], before[rank], strict=True):
                same = torch.equal(lockstep.waited(mine), copy) or torch.isnan(copy).any()
                assert same, f"{phase} of {stage} overwrites its input"
            self._keep(rank, stage, phase, gives, values)

    def _value(self, rank: int, stage: int, item: Item) -> torch.Tensor:
        if (stage, item.name) in self.whole_parameters[rank]:
            return self.whole_parameters[rank][stage, item.name]
        if item.kind in {"start", "tangent"}:
            return part(self.whole.values[item.name], self.layouts["start", item.name], self.mesh, rank)
        return self.held[rank][stage, item.kind, item.name]

    def _keep(self, rank: int, stage: int, phase: str, gives: Sequence[Item], values: Sequence[Any]) -> None:
        program = self.programs[rank]
        way = "forward" if phase == "forward" else "backward"
        sent = {(t.value, t.target): t for t in program.transfers if t.source == stage and t.phase == way}
        made: set[int] = set()
        for item, value in zip(gives, values, strict=True):
            self.held[rank][stage, item.kind, item.name] = value
            if item.kind == "gradient":
                key = (stage, item.name)
                assert value.untyped_storage().data_ptr() not in made, "two gradients in one memory"
                made.add(value.untyped_storage().data_ptr())
                self.sums[rank][key] = self.sums[rank][key].add_(value) if key in self.sums[rank] else value
            elif item.kind in {"output", "mutation"}:
                self.results[rank][item.kind, item.name] = value
        if phase == "weights":
            return
        for (name, target), transfer in sent.items():
            value = self.held[rank][stage, "value", name]
            assert value.is_contiguous(), f"{name} is not contiguous"
            assert tuple(value.shape) == transfer.shape
            assert str(value.dtype) == f"torch.{transfer.dtype}"
            self.held[rank][target, "value", name] = value.clone()

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """Return every rank's finished gradients, ties summed."""
        done: list[dict[str, torch.Tensor]] = [{} for _ in self.programs]
        ties = {tie.name: tie for tie in self.programs[0].ties}
        for stage in range(self.stages):
            mine = [p.stages[stage] for p in self.programs]
            for rank, sums in enumerate(self.sums):  # of inputs: as backward gives them
                for (at, name), value in sums.items():
                    if at == stage and name not in mine[rank].finish_takes:
                        done[rank][name] = done[rank][name] + value if name in done[rank] else value
            if mine[0].finish is None:
                continue
            given = [[self.sums[r][stage, name] for name in p.finish_takes] for r, p in enumerate(mine)]
            with torch.no_grad():
                made = lockstep.run([p.finish for p in mine], given, self.mesh)
            for rank, values in enumerate(made):
                for name, value in zip(mine[rank].finish_gives, values, strict=True):
                    assert name not in done[rank] or stage in ties[name].stages
                    done[rank][name] = done[rank][name] + value if name in done[rank] else value
        return done


def run_stages(
    whole: Whole, decisions: Decisions, blocks: Sequence[Sequence[str]], micro_batches: int = 1, **how: Any
) -> Pipeline:
    """Return what a pipeline made of some micro-batches, each with the values of `whole`."""
    captured, mesh = whole.captured, squeeze(decisions).mesh
    stages = stage_of(captured.graph, blocks)
    programs = [
        rewrite_stages(captured.joint, captured.graph, decisions, rank, stages, range(len(blocks)), **how)
        for rank in range(mesh.world_size)
    ]
    localiser = Localiser(captured.joint, captured.graph, squeeze(decisions), 0)
    layouts = {("start", op.name): localiser.layout(Ref(op.name)) for op in captured.graph.ops if op.kind != "call"}
    for output in captured.graph.outputs:
        if output.kind == "output":
            layouts["output", output.name] = squeeze(decisions).outputs[output.name]
        else:
            layouts[output.kind, output.name] = localiser.layout(Ref(output.name))
    pipeline = Pipeline(whole, mesh, programs, layouts)
    pipeline.sums = [{} for _ in programs]
    pipeline.results = [{} for _ in programs]
    pipeline.begin()
    for _ in range(micro_batches):
        pipeline.micro_batch()
    return pipeline


def require_equal(pipeline: Pipeline, want: Sequence[torch.Tensor | None], micro_batches: int = 1) -> None:
    """Compare outputs, new buffer values and gradients with the whole program's."""
    gradients = pipeline.gradients()
    for output, value in zip(pipeline.whole.captured.graph.outputs, want, strict=True):
        for rank in range(pipeline.mesh.world_size):
            if output.kind == "gradient":
                found = gradients[rank].get(output.name)
            else:
                found = pipeline.results[rank][output.kind, output.name]
            if value is None:
                assert found is None
                continue
            expected = part(value, pipeline.layouts[output.kind, output.name], pipeline.mesh, rank)
            times = micro_batches if output.kind == "gradient" else 1
            torch.testing.assert_close(
                found, expected * times, rtol=1e-4, atol=1e-5 * times, msg=lambda m, o=output: f"{o}: {m}"
            )
