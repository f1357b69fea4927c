"""Frozen branches that are built like a trained one, and the pipeline stages that both get."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.ir.graph import Graph
from autopar.ir.stages import stage_of, units


class Branches(nn.Module):
    """A student, and a teacher that is a copy of it."""

    def __init__(self, first: str, *, behind: bool = False, wider: bool = False, trained: bool = False) -> None:
        super().__init__()
        self.student = nn.ModuleDict({"stem": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
        self.student["layers"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(trained)
        if wider:
            self.teacher["layers"][1] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(trained)
        self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.first, self.behind = first, behind

    @staticmethod
    def run(branch: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        """Return a branch's output, made outside of it in part."""
        found = branch["stem"](x)
        for layer in branch["layers"]:
            found = found + layer(found).tanh()
        return branch["head"](found)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        if self.first == "teacher":
            wanted = self.run(self.teacher, other * 2)
            found = self.run(self.student, x)
        else:
            found = self.run(self.student, x)
            wanted = self.run(self.teacher, found if self.behind else other * 2)
        for layer in self.last:
            found = layer(found).tanh()
        return (found - wanted.softmax(-1)).square().mean()


def graph_of(model: nn.Module) -> Graph:
    return capture(model, (torch.randn(4, 4), torch.randn(4, 4))).graph


@pytest.mark.parametrize("first", ["teacher", "student"])
def test_a_teacher_has_the_stages_of_its_student_however_the_program_is_cut(first: str):
    graph = graph_of(Branches(first))
    paths = [unit.path for unit in units(graph)]

    assert paths == ["student.layers.0", "student.layers.1", "student.layers.2", "last.0", "last.1"]
    for place in range(1, len(paths)):
        home = stage_of(graph, [paths[:place], paths[place:]])
        stages = {op.target: home[op.name] for op in graph.ops if op.kind == "parameter"}
        students = {name: stage for name, stage in stages.items() if name.startswith("student.")}
        assert len(students) == 10
        assert {name: stages[name.replace("student", "teacher")] for name in students} == students
        for op in graph.ops:
            if op.kind == "call" and op.phase == "forward":
                reads = [home[ref.op] for ref in op.refs if graph.by_name[ref.op].kind == "call"]
                assert max(reads, default=0) <= home[op.name]


@pytest.mark.parametrize("how", ["behind", "wider", "trained"])
def test_branches_that_wait_for_each_other_or_are_not_alike_keep_blocks_of_their_own(how: str):
    graph = graph_of(Branches("student", **{how: True}))

    assert [unit.path for unit in units(graph) if unit.path.startswith("teacher.")]


def test_a_plan_that_names_a_teachers_blocks_has_them_where_it_says():
    graph = graph_of(Branches("teacher"))
    teacher, student = ([f"{name}.layers.{at}" for at in range(3)] for name in ("teacher", "student"))

    home = stage_of(graph, [teacher, [*student, "last.0", "last.1"]])

    stages = {op.target: home[op.name] for op in graph.ops if op.kind == "parameter"}
    assert {stage for name, stage in stages.items() if name.startswith("teacher.layers")} == {0}
    assert stages["student.layers.0.weight"] == 1
