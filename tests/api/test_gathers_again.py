"""Where a block is computed again in backward, its parameters are gathered once there."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

import autopar
from autopar.ir.plan_json import from_json, to_json
from tests.support.ranks import RankPool

WIDTH, BATCH = 32, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


def example() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))


def plan(recompute: str) -> autopar.Plan:
    model, inputs = example()
    fix = {"dp_shard": 2, "zero": 3, "recompute": recompute}
    return autopar.plan(model, "cpu:2", example_inputs=inputs, fix=fix)


def gathered_bytes(made: autopar.Plan) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in made.decisions.collectives:
        if each.op == "all_gather":
            found[each.phase] += each.count * each.bytes
    return found


def gradients(_rank: int, text: str) -> list[torch.Tensor]:
    model, inputs = example()
    made = from_json(text)
    compiled = autopar.compile(model, autopar.ClusterSpec.from_dict(made.cluster), example_inputs=inputs, plan=made)
    compiled(*inputs).backward()
    return [each.grad.full_tensor() for each in compiled.parameters()]


def test_computing_again_gathers_each_matrix_once_in_a_phase():
    whole = sum(each.numel() * each.element_size() for each in Stack().parameters() if each.dim() == 2)

    again = gathered_bytes(plan("full"))

    assert again["forward"] >= whole
    assert whole <= again["backward"] < 1.1 * whole  # biases beside it


def test_gradients_are_those_of_one_device(pool: RankPool):
    model, inputs = example()
    model(*inputs).backward()

    outcomes = pool.run(gradients, to_json(plan("full")))

    assert [each.error for each in outcomes] == ["", ""]
    for mine, own in zip(outcomes[0].value, model.parameters(), strict=True):
        torch.testing.assert_close(mine, own.grad)
