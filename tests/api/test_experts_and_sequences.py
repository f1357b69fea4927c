"""Axes that split experts (`ep`) or tokens (`cp`): what is where along them, on ranks, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.ir.plan import Plan
from autopar.models.zoo.llama import LlamaSettings
from tests.support.ranks import RankPool
from tests.support.routing import Experts, Gated
from tests.support.training import Trained, train, whole

DENSE = LlamaSettings(1, 32, 4, 4, 64, vocab=64, sequence=16)
GROUPED = LlamaSettings(1, 32, 4, 2, 64, vocab=64, sequence=16)
MIXED = LlamaSettings(1, 32, 4, 4, 64, vocab=64, sequence=16, experts=4)
EXPERTS = {f"layers.0.mlp.{name}" for name in ("gate", "up", "down")}


def planned(settings: LlamaSettings, cluster: str = "cpu:4", batch: int = 8, **fix: Any) -> Plan:
    with torch.device("meta"):
        model, inputs = settings.model(), settings.inputs(batch, settings.sequence)
    return autopar.plan(model, cluster, example_inputs=inputs, fix=fix)


def train_llama(_rank: int, settings: LlamaSettings, fix: dict[str, Any]) -> Trained:
    torch.manual_seed(0)
    ids = torch.randint(settings.vocab, (8, settings.sequence + 1))
    return train(settings.model(), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), "cpu:4", fix)


@pytest.mark.parametrize(
    "fix",
    [
        {"ep": 4},
        {"ep": 2, "dp_shard": 2, "zero": 3},
        {"ep": 2, "dp_replicate": 2, "microbatch": 1},
        pytest.param({"ep": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_on_several_ranks_train_as_on_one(four: RankPool, fix: dict[str, Any]):
    for done in four.values(train_llama, MIXED, fix):
        assert done.worst_gradient < 1e-4


@pytest.mark.parametrize(
    "fix",
    [
        {"cp": 4},
        {"cp": 2, "dp_shard": 2, "zero": 3},
        pytest.param({"cp": 2, "tp": 2, "microbatch": 8}, marks=pytest.mark.slow),  # as grouped queries do below
        pytest.param({"cp": 4, "microbatch": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sequences_on_several_ranks_train_as_on_one(four: RankPool, fix: dict[str, Any]):
    for done in four.values(train_llama, DENSE, fix):
        assert done.worst_gradient < 1e-4


def test_queries_of_one_group_of_heads_train_on_several_ranks(four: RankPool):
    for done in four.values(train_llama, GROUPED, {"cp": 2, "tp": 2, "microbatch": 8}):
        assert done.worst_gradient < 1e-4


def train_grouped(_rank: int, fix: dict[str, Any]) -> Trained:
    torch.manual_seed(4)
    return train(Experts(layers=1), (torch.randn(8, 3, 8),), "cpu:4", fix)


@pytest.mark.parametrize("fix", [{"ep": 4}, {"ep": 2, "dp_replicate": 2, "microbatch": 1}], ids=str)
def test_experts_of_sorted_tokens_train_as_on_one_device(four: RankPool, fix: dict[str, Any]):
    for done in four.values(train_grouped, fix):
        assert done.worst_gradient < 1e-4


def train_gated(_rank: int, fix: dict[str, Any]) -> Trained:
    torch.manual_seed(4)
    return train(Gated(), (torch.randn(8, 4, 16),), "cpu:4", fix)


@pytest.mark.parametrize(
    "fix",
    [{"ep": 4}, {"ep": 2, "dp_shard": 2, "zero": 3}, pytest.param({"ep": 2, "tp": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_rows_of_experts_between_their_products_train_as_on_one_device(four: RankPool, fix: dict[str, Any]):
    for done in four.values(train_gated, fix):
        assert done.worst_gradient < 1e-4


def step_native(_rank: int, fix: dict[str, Any]) -> None:
    torch.manual_seed(4)
    model, x = Gated(native=True), torch.randn(8, 4, 16)
    compiled = autopar.compile(copy.deepcopy(model), "cpu:4", example_inputs=(x,), fix=fix)
    found, wanted = compiled(x), model(x)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=2.0**-8, atol=0.0)
    expected = dict(model.named_parameters())
    for key, each in compiled.named_parameters():
        grad = expected[key].grad
        assert grad is not None
        torch.testing.assert_close(whole(each.grad), grad, rtol=2.0**-5, atol=2.0**-7 * float(grad.abs().max()))


@pytest.mark.parametrize("fix", [{"ep": 4}, {"ep": 2, "dp_shard": 2, "zero": 3}], ids=str)
def test_products_of_experts_in_16_bits_train_as_on_one_device(four: RankPool, fix: dict[str, Any]):
    four.values(step_native, fix)


class Crosswise(Gated):
    """Takes the tokens of all samples in turn, so that no rank has rows of its own: each has all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of tokens [b, s, 16]."""
        return super().forward(x.transpose(0, 1))


@pytest.mark.parametrize("native", [False, True])
def test_between_products_of_experts_nothing_is_summed(native: bool):
    plan = autopar.plan(Crosswise(native), "cpu:2", example_inputs=(torch.randn(64, 256, 16),), fix={"ep": 2})

    between = [each for each in plan.decisions.operators.values() if each.target.startswith("aten.silu")]
    assert between
    assert {at for each in between for (at,) in each.strategy.inputs} == {Partial("expert")}
    largest = max(each.bytes for each in plan.decisions.collectives)
    assert largest <= 64 * 256 * 2 * 16 * 4, "what two experts make of a token; gates and values are twice as much"


def test_tokens_of_experts_can_be_split_by_both(four: RankPool):
    for done in four.values(train_llama, MIXED, {"cp": 2, "ep": 2}):
        assert done.worst_gradient < 1e-4


def test_experts_stay_on_their_ranks_and_tokens_travel():
    plan = planned(MIXED, ep=4)

    along = {name: each.placements[0] for name, each in plan.decisions.parameters.items()}
    assert plan.decisions.degrees["ep"] == 4
    assert plan.decisions.mesh.names == ("ep",)
    assert plan.workload.microbatch == 2
    assert {name for name, placement in along.items() if placement == Shard(0)} == EXPERTS
    assert {along[name] for name in along.keys() - EXPERTS} == {Replicate()}
    assert all(plan.decisions.parameters[name].gather == "none" for name in EXPERTS)
    kinds = {each.op for each in plan.decisions.collectives if each.bytes > 64}
    assert kinds == {"all_to_all", "all_reduce"}
    reduced = sum(each.bytes * each.count for each in plan.decisions.collectives if each.op == "all_reduce")
    others = sum(p.numel() * 4 for name, p in MIXED.model().named_parameters() if name not in EXPERTS)
    assert others <= reduced <= others + 64


def test_attention_is_split_by_heads_where_activations_are_by_tokens():
    plan = planned(LlamaSettings(1, 512, 8, 8, 1024, vocab=64, sequence=4096), "h100-sxm-80gb:8", 1, cp=8)

    assert plan.decisions.degrees["cp"] == 8
    assert plan.decisions.mesh.names == ("cp",)
    attention = [
        each for name, each in plan.decisions.operators.items() if name.startswith("_scaled_dot_product_flash")
    ]
    assert len(attention) == 2
    assert {str(placement) for each in attention for (placement,) in each.strategy.inputs} == {"Shard(1)"}
    products = [each.strategy.inputs[0][0] for name, each in plan.decisions.operators.items() if name == "mm"]
    assert products == [Shard(0)]
    moved = {each.op for each in plan.decisions.collectives if each.phase == "forward" and each.bytes > 64}
    assert moved == {"all_to_all"}


def test_more_ranks_than_key_heads_split_the_queries_of_each():
    settings, fix = LlamaSettings(1, 2048, 16, 4, 1024, vocab=64, sequence=16384), {"cp": 4, "tp": 4}
    plan = planned(settings, "h100-sxm-80gb:8x2", 1, **fix, recompute="none", zero=0)

    split = [
        {str(each) for each in op.strategy.inputs[0]}
        for name, op in plan.decisions.operators.items()
        if name.startswith("_scaled_dot_product_flash")
    ]
    assert split == [{"Shard(1)", "Shard(1, outer=4)"}] * 2
    assert not plan.warnings


@pytest.mark.slow
def test_tokens_are_split_where_samples_are_fewer_than_ranks():
    settings = LlamaSettings(1, 1024, 32, 8, 1024, vocab=64, sequence=65536)
    with torch.device("meta"):
        model, inputs = settings.model(), settings.inputs(1, settings.sequence)
    free, without, fixed = (
        autopar.plan(model, "h100-sxm-80gb:8x4", example_inputs=inputs, fix=fix, forbid=("pp", "recompute", *forbid))
        for fix, forbid in (({}, ()), ({}, ("cp",)), ({"cp": 4, "tp": 8}, ()))
    )

    assert free.decisions.degrees["cp"] > 1
    assert without.decisions.degrees["cp"] == 1
    assert free.estimates.step_time_s <= fixed.estimates.step_time_s * 1.01 < without.estimates.step_time_s
    assert free.solver.bound <= fixed.estimates.step_time_s
    assert "indivisible-batch" not in {each.code for each in free.warnings}


def test_experts_that_do_not_divide_are_counted():
    with pytest.raises(InfeasibleError, match=r"--fix ep=3: layers\.0\.mlp\.\w+ holds 4 experts.*choose ep of 2 or 4"):
        planned(MIXED, "cpu:3", 9, ep=3)


def test_a_model_without_experts_has_nothing_to_split():
    with pytest.raises(UsageError, match="--fix ep=2: no parameter of the model has a dimension of experts"):
        planned(DENSE, "cpu:2", ep=2)


def test_a_batch_must_divide_by_the_ranks_that_share_experts():
    with pytest.raises(InfeasibleError, match="--fix ep=4: the batch of 6 .* does not divide into 4 equal parts"):
        planned(MIXED, batch=6, ep=4)


def test_tokens_that_do_not_divide_are_counted():
    with pytest.raises(InfeasibleError, match=r"--fix cp=3: input input_ids has 16 tokens a sample.*multiple of 3"):
        planned(DENSE, "cpu:3", cp=3)


def test_heads_that_do_not_divide_are_counted():
    with pytest.raises(InfeasibleError, match=r"--fix cp=8: .* has 4 query and 4 key heads.* choose cp of 2 or 4"):
        planned(DENSE, "cpu:8", cp=8)


def test_where_one_head_is_all_there_is_no_degree_divides():
    with pytest.raises(InfeasibleError, match=r"--fix cp=2: .* has 1 query and 1 key heads.*; leave cp out$"):
        _planned_on_tokens(_Causal(heads=1, patches=False), torch.zeros(4, 8, dtype=torch.int64))


def test_attention_to_patches_has_none_of_the_tokens_that_are_split():
    with pytest.raises(InfeasibleError, match=r"--fix cp=2: \S+flash\S+ \(.*\) has no tokens of targets, which are"):
        _planned_on_tokens(_Causal(heads=2, patches=True), torch.zeros(4, 3, 2, 16))


def _planned_on_tokens(model: nn.Module, x: Tensor) -> None:
    example = {"x": x, "targets": torch.zeros(len(x), 8, dtype=torch.int64)}
    autopar.plan(model, "cpu:2", example_inputs=example, fix={"cp": 2})


class _Causal(nn.Module):
    """Causal attention to tokens, or under a mask to the patches of a picture, whose targets are tokens."""

    def __init__(self, heads: int, *, patches: bool) -> None:
        super().__init__()
        self.read = nn.Conv2d(3, 16, 2, stride=2) if patches else nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, heads, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32)
        self.patches = patches
        self.register_buffer("later", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.read(x)
        h = h.flatten(2).transpose(1, 2) if self.patches else h
        logits = self.head(self.layer(h, src_mask=self.later, is_causal=not self.patches))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_model_without_sequences_has_no_tokens_to_split():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), _Mean()), torch.empty(4, 8)

    with pytest.raises(UsageError, match="--fix cp=2: no input of the model has a batch and a sequence dimension"):
        autopar.plan(model, "cpu:2", example_inputs=(x,), fix={"cp": 2})


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()
