"""Programs for GPUs on tensors without memory: what each operator makes is what the next one takes there.

Kernels for GPUs do not run here, but torch knows shapes, types, strides and devices of what they make: views that do
not fit, and tensors that are made on the CPU, are refused as on a GPU. What kernels check themselves is not: see
`test_device`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar.api
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import local_shape
from autopar.models.hf_tiny import tiny
from autopar.rewrite import Programs, Value, rewrite
from autopar.runtime.executable import place_constants
from tests.rewrite.test_device import Attends
from tests.support.decide import decide, drawn
from tests.support.remembering import remembered

PAIR = Mesh((Axis("tp", 2, "device"),))
CASES = {
    "llama": "fp32",
    "mixtral": "bf16",
    "gpt2": "bf16",
    "resnet": "bf16",
    "whisper": "bf16",
    "deberta": "fp32",
}


def run(programs: Programs) -> list[torch.Tensor]:
    """Return what forward and backward make of tensors on meta."""
    assert programs.backward is not None
    for program in (programs.forward, programs.backward):
        place_constants(program, torch.device("meta"))
    taken = {each.name for each in programs.forward.graph.nodes if each.op == "placeholder"}
    given = [_local(each) for each in programs.inputs if each.name in taken]
    with torch.no_grad():
        made = programs.forward(*given)
        values = made[len(programs.outputs) + len(programs.mutations) :]
        source = {"input": given, "output": made, "value": values}
        saved = [source[each.source][each.index] for each in programs.saved]
        gradients = programs.backward(*saved, *map(_local, programs.tangents))
    for found, wanted in zip(gradients, programs.gradients, strict=True):
        if wanted.meta is not None:
            assert found.shape == _local(wanted).shape
    return [each for each in (*made, *gradients) if each is not None]


def _local(value: Value) -> torch.Tensor:
    assert value.meta is not None
    shape = local_shape(value.meta.shape, value.layout, PAIR.sizes)
    return torch.empty(shape, dtype=getattr(torch, value.meta.dtype), device="meta")


class Weighted(nn.Module):
    """Numbers that forward writes down: weights of features, and their order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        order = torch.tensor([3, 1, 0, 2]).to(x.device)
        return (self.inner(x) * weights)[:, order].square().mean()


def test_constants_are_where_the_program_runs():
    captured = remembered(Weighted(), (torch.randn(4, 4),))

    made = run(rewrite(captured.joint, captured.graph, decide(captured.graph, PAIR), 0, device="meta"))

    assert {each.device.type for each in made} == {"meta"}


@pytest.mark.parametrize("seed", range(8))
def test_sums_that_move_between_the_halves_are_those_of_queries_alone(seed: int):
    # The kernel of single precision makes rows of 32.
    captured = remembered(Attends(True, torch.float32), (torch.randn(2, 6, 16),))
    decisions = drawn(captured.graph, PAIR, seed=seed)

    made = run(rewrite(captured.joint, captured.graph, decisions, 0, device="meta"))

    assert {each.device.type for each in made} == {"meta"}


@pytest.mark.parametrize("name", CASES)
def test_each_operator_takes_what_the_one_before_makes_there(name: str):
    model, inputs = tiny(name)
    captured = autopar.api.captured_for(model, inputs, CASES[name], training=True, with_backward=True)
    decisions = drawn(captured.graph, PAIR, seed=0, greedy=True)

    made = run(rewrite(captured.joint, captured.graph, decisions, 0, device="meta"))

    on_host = [each for each in made if each.device.type != "meta"]
    assert all(each.device.type == "cpu" and each.dtype == torch.int64 for each in on_host)
    assert all(each.shape[0] == PAIR.sizes[0] for each in on_host), "rows of each rank are known on the host"
