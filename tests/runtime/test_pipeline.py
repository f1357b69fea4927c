"""Pipeline steps of a chain of layers on real gloo ranks equal the model's own steps on one device."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.schedule import PipelineSchedule
from autopar.simulate.generators import generate
from tests.support.decide import mesh_of
from tests.support.ranks import RankPool
from tests.support.staged import WIDTH, Chain, Layers, compile_staged

FOUR = ((0,), (1,), (2,), (3,))
TWO = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, targets, and which rows count: unequally many in the micro-batches."""
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y, (torch.arange(rows) % 5 < 3).double()


def train(model: nn.Module, data: Any, steps: int = 2) -> list[float]:
    """Take AdamW steps and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*data)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(rank: int, layers: Layers, schedule: PipelineSchedule) -> tuple[list[str], list[str]]:
    """Train the chain as a pipeline and alone; return the names this rank holds, of parameters and of all."""
    data = batch(layers.rows * schedule.microbatches)
    reference = Chain(layers.count, layers.skip, tied=layers.tied)
    mine, _ = compile_staged(copy.deepcopy(reference), layers, schedule)

    want, got = train(reference, data), train(mine, data)

    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    whole = reference.state_dict(keep_vars=True)
    for name, value in mine.state_dict(keep_vars=True).items():
        if name != "calls":
            torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(value.grad, whole[name].grad, rtol=1e-6, atol=1e-9)
    return [name for name, _ in mine.named_parameters()], list(mine.state_dict())


CASES = {
    "gpipe": (Layers(TWO, 2), generate("gpipe", ranks=2, microbatches=4)),
    "1f1b": (Layers(TWO, 2), generate("1f1b", ranks=2, microbatches=4)),
    "1f1b, 3 micro-batches": (Layers(TWO, 3), generate("1f1b", ranks=2, microbatches=3)),
    "1f1b, 1 micro-batch": (Layers(TWO, 4), generate("1f1b", ranks=2, microbatches=1)),
    "interleaved": (Layers(FOUR, 2), generate("interleaved_1f1b", ranks=2, microbatches=4, interleave=2)),
    "interleaved, 5 micro-batches": (Layers(FOUR, 1), generate("interleaved_1f1b", ranks=2, microbatches=5)),
    "zb_h1": (Layers(TWO, 2, split=True), generate("zb_h1", ranks=2, microbatches=4)),
    "zb_h1, backward in one": (Layers(TWO, 2), generate("zb_h1", ranks=2, microbatches=4)),
    "1f1b, backward in two": (Layers(TWO, 2, split=True), generate("1f1b", ranks=2, microbatches=4)),
    "zbv": (Layers(FOUR, 2, split=True), generate("zbv", ranks=2, microbatches=4)),
    "skip to another rank": (Layers(FOUR, 2, skip=3), generate("interleaved_1f1b", ranks=2, microbatches=4)),
    "skip to the same rank": (Layers(FOUR, 2, skip=2), generate("interleaved_1f1b", ranks=2, microbatches=4)),
    "tied": (Layers(TWO, 2, tied=True), generate("1f1b", ranks=2, microbatches=4)),
    "tied on one rank": (Layers(FOUR, 2, tied=True, split=True), generate("zbv", ranks=2, microbatches=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_the_models_own(pool: RankPool, name: str):
    layers, schedule = CASES[name]

    (first, states), (second, others) = pool.values(compare, layers, schedule)

    everything = Chain(layers.count, tied=layers.tied)
    assert {*first, *second} == {name for name, _ in everything.named_parameters()}
    assert {*states, *others} == set(everything.state_dict())
    assert bool(set(first) & set(second)) == (name == "tied")
