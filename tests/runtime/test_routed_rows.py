"""Tokens that go to the ranks of their experts and back: numbers as on one device, whatever the routing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.autocasting import policy
from autopar.ir.placement import Shard
from autopar.ir.plan import Plan
from autopar.rewrite import rewrite
from tests.support.ranks import RankPool
from tests.support.remembering import remembered
from tests.support.routing import Experts, Gated
from tests.support.training import same_step, whole

BATCH, TOKENS = 16, 256
"""Enough tokens that sending each to its experts is cheaper than giving all ranks all of them."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


class Biased(nn.Module):
    """Experts with biases, and a gate cut out of what they make, of 8 of which `none` take no token."""

    def __init__(self, none: int = 0) -> None:
        super().__init__()
        self.none = none
        self.router = nn.Linear(16, 8)
        self.up, self.up_bias = nn.Parameter(torch.randn(8, 16, 32) / 4), nn.Parameter(torch.randn(8, 32) / 4)
        self.down, self.down_bias = nn.Parameter(torch.randn(8, 16, 16) / 4), nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens [b, s, 16]."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        best, experts = (scores - (torch.arange(8) < self.none).to(scores)).topk(3, -1)
        kinds, order = experts.flatten().sort()
        ends = torch.histc(kinds.float(), 8, min=0, max=7).cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        made = product(tokens[order // 3], self.up, ends) + self.up_bias[kinds]
        gate, value = made[:, ::2].clamp(max=2.0), made[:, 1::2]
        made = product(gate * torch.sigmoid(gate) * (value + 1.0), self.down, ends) + self.down_bias[kinds]
        made = made * best.flatten()[order, None]
        back = torch.empty_like(order).index_put((order,), torch.arange(order.numel()))
        return (tokens + made[back].view(-1, 3, 16).sum(1)).square().mean()


def _of(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(4)
    made: dict[str, Any] = {
        "gated": Gated,
        "layers": lambda: Experts(layers=2, experts=8),
        "biased": Biased,
        "idle experts": lambda: Biased(none=2),
        "idle ranks": lambda: Biased(none=5),
    }
    model = made[name]()
    return model.double(), torch.randn(BATCH, TOKENS, 8 if name == "layers" else 16).double()


def train(_rank: int, name: str, fix: dict[str, int]) -> None:
    """Check loss and gradients of two steps of different tokens in float64."""
    model, x = _of(name)
    compiled = autopar.compile(copy.deepcopy(model), "cpu:4", example_inputs=(x,), fix=fix)
    for inputs in (x, x.flip(0) + 1.0):
        model.zero_grad()
        compiled.zero_grad()
        same_step(compiled, model, (inputs,))


def planned(name: str, fix: dict[str, int], cluster: str = "cpu:4") -> Plan:
    model, x = _of(name)
    return autopar.plan(model, cluster, example_inputs=(x,), fix=fix)


def goes_to_experts(plan: Plan) -> bool:
    """Return whether a product reads tokens that came to their experts' ranks."""
    layouts = (layout for each in plan.decisions.operators.values() for layout in each.strategy.inputs)
    return any(isinstance(at, Shard) and at.rows == "expert" for layout in layouts for at in layout)


CASES: list[tuple[str, dict[str, int]]] = [
    ("gated", {"ep": 4}),
    ("gated", {"ep": 2, "dp_replicate": 2, "microbatch": 2}),
    ("gated", {"ep": 2, "dp_shard": 2, "zero": 3}),
    ("gated", {"ep": 2, "tp": 2}),
    ("layers", {"ep": 2, "pp": 2, "microbatch": 8}),
    ("layers", {"ep": 2, "pp": 2, "microbatch": 2}),
    ("layers", {"ep": 4, "microbatch": 1}),
    ("biased", {"ep": 4}),
    ("biased", {"ep": 2, "dp_shard": 2, "zero": 3, "microbatch": 2}),
]


@pytest.mark.parametrize(("name", "fix"), CASES, ids=str)
def test_tokens_sent_to_their_experts_train_as_on_one_device(pool: RankPool, name: str, fix: dict[str, int]) -> None:
    assert goes_to_experts(planned(name, fix))
    pool.values(train, name, fix)


def in_16_bits(_rank: int, fix: dict[str, int]) -> tuple[float, float]:
    """Return how far loss and gradients of a step of the `bf16` policy are from those of one device."""
    torch.manual_seed(4)
    model, x = Biased(), torch.randn(BATCH, TOKENS, 16)
    compiled = autopar.compile(copy.deepcopy(model), "cpu:4", example_inputs=(x,), fix=fix, precision="bf16")
    with policy("bf16"):
        wanted = model(x)
    made = compiled(x)
    wanted.backward()
    made.backward()
    held = dict(compiled.named_parameters())
    far = [(whole(held[name].grad) - each.grad).norm() / each.grad.norm() for name, each in model.named_parameters()]
    return abs(made.item() / wanted.item() - 1), max(far).item()


@pytest.mark.parametrize("fix", [{"ep": 4}, {"ep": 2, "dp_shard": 2, "microbatch": 2}], ids=str)
def test_a_policy_of_16_bits_multiplies_by_experts_as_on_one_device(pool: RankPool, fix: dict[str, int]) -> None:
    for loss, gradient in pool.values(in_16_bits, fix):
        assert loss < 1e-3
        assert gradient < 2e-2


@pytest.mark.parametrize("name", ["idle experts", "idle ranks"])
def test_experts_and_ranks_may_be_without_tokens(pool: RankPool, name: str) -> None:
    pool.values(train, name, {"ep": 4})


def test_sequences_are_gathered_before_tokens_go_to_experts(pool: RankPool) -> None:
    pool.values(train, "gated", {"ep": 2, "cp": 2})


def test_each_token_travels_to_its_experts_and_back_in_both_directions() -> None:
    plan = planned("layers", {"ep": 4})

    sent = [each for each in plan.decisions.collectives if each.op == "all_to_all"]
    rows = BATCH * TOKENS * 2 // 4 * 8 * 8
    assert {each.bytes for each in sent} == {rows}
    assert sum(each.count for each in sent) == 2 * 4 - 1, "two layers; the first one's tokens have no gradient"
    others = sum(each.bytes * each.count for each in plan.decisions.collectives if each.op == "all_gather")
    assert others == 2 * 8 * 4 * 4, "where the rows of 8 experts end on 4 ranks, of each layer"


def step_in_levels(_rank: int, path: str) -> None:
    model, x = _of("layers")
    plan = Plan.load(Path(path))
    spec = autopar.ClusterSpec.from_dict(plan.cluster)
    compiled = autopar.compile(copy.deepcopy(model), spec, example_inputs=(x,), plan=plan)
    same_step(compiled, model, (x,))


def test_tokens_may_go_in_two_levels(pool: RankPool, tmp_path: Path) -> None:
    plan = planned("layers", {"ep": 4}, "cpu:2x2")
    assert goes_to_experts(plan)
    in_levels = tuple(
        replace(each, inner=2) if each.op == "all_to_all" else each for each in plan.decisions.collectives
    )
    plan = replace(plan, decisions=replace(plan.decisions, collectives=in_levels, streams={}))
    model, x = _of("layers")
    captured = remembered(model, (x,))
    issued = rewrite(captured.joint, captured.graph, plan.decisions, 0).emitted
    assert {each.inner for each in issued if each.op == "all_to_all"} == {2}
    plan.save(tmp_path / "plan.json")
    pool.values(step_in_levels, str(tmp_path / "plan.json"))
