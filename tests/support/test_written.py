"""A program that another process reads is the one that was captured: it plans, rewrites and cuts alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.capture import Captured, capture
from autopar.models import zoo
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import rewrite
from cost_models.cluster import ClusterSpec
from tests.support.models import Mlp
from tests.support.remembering import remembered
from tests.support.written import read, written

EXAMPLE = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64))


def again(program: Captured) -> Captured:
    """Return what another process has of a program."""
    data = written(program)
    assert data is not None
    found = read(data)
    assert found is not None
    return found


def seen(program: Captured) -> list[tuple[Any, ...]]:
    """Return all that is looked at of a program's nodes, memory by the node that has it first."""
    first: dict[int, str] = {}
    rows = []
    for node in program.joint.graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, tuple | list) else [value]:
            row = (node.name, node.op, str(node.target), str(node.args), str(node.kwargs), node.meta.get("stack_trace"))
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                row += (each.dtype, each.shape, each.stride(), each.storage_offset(), each.requires_grad)
                row += (storage.nbytes(), first.setdefault(storage._cdata, node.name), type(each))
            rows.append((*row, *(node.meta.get(key) for key in ("seq_nr", "nn_module_stack", "partitioner_tag"))))
    return rows


@pytest.mark.parametrize("name", ["gpt-tiny", "mixtral-tiny"])
def test_a_program_that_is_read_is_the_one_that_was_captured(name: str) -> None:
    model, inputs, _ = zoo.build(name, batch=4, seq=8, overrides={"layers": "1"})
    one = remembered(model, inputs)
    other = again(one)

    assert other is not one
    assert seen(other) == seen(one)
    assert (other.graph, other.call, other.result, other.placeholders) == (
        one.graph, one.call, one.result, one.placeholders,
    )  # fmt: skip


def test_a_program_that_is_read_is_planned_and_rewritten_as_it_was() -> None:
    one = remembered(Mlp(), EXAMPLE)
    other = again(one)
    options = PlanOptions.parse(fix={"dp_shard": 2, "zero": 3})

    plans = [plan_captured(each, "mlp", ClusterSpec.parse("cpu:2"), options, Silent()) for each in (one, other)]
    programs = [rewrite(each.joint, each.graph, plans[0].decisions, 1) for each in (one, other)]

    assert plans[0] == plans[1]
    assert programs[0].forward.code == programs[1].forward.code
    assert programs[0].backward.code == programs[1].backward.code
    assert programs[0].emitted == programs[1].emitted


def test_views_have_the_memory_of_what_they_look_at() -> None:
    other = again(remembered(Mlp(), EXAMPLE))
    values = [each.meta.get("val") for each in other.joint.graph.nodes]
    memory = [each.untyped_storage()._cdata for each in values if isinstance(each, torch.Tensor)]

    assert len(memory) > len(set(memory))


def test_programs_with_tensors_of_their_own_are_not_written() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * torch.tensor([2.0, 3.0])).sum()

    assert written(capture(Constant(), (torch.zeros(2, 2, requires_grad=True),))) is None


def test_what_says_something_else_here_is_not_taken() -> None:
    data = written(capture(nn.Linear(2, 2), (torch.zeros(2, 2),)))
    assert data is not None

    assert read(data) is not None
    assert read(data.replace(b"def forward", b"def Forward", 1)) is None
