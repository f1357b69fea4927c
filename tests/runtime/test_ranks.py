"""The compiled module on two real gloo ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from autopar.ir.placement import Replicate, Shard
from autopar.runtime import Ranks
from autopar.runtime.copying import copy_tree
from autopar.runtime.waiting import hold_whole, plain_copy, take_over
from tests.support.compiling import compile_with
from tests.support.decide import drawn, mesh_of
from tests.support.models import Layers, Mlp, Plain, Tied, Vision, cases
from tests.support.ranks import RankPool
from tests.support.training import train as train_whole

PAIR = mesh_of(tp=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, forked=False) as ranks:
        yield ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loss_of(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        return result["loss"]
    return result[-1] if isinstance(result, tuple) else result


def call(model: nn.Module, example: Any) -> Any:
    return model(**example) if isinstance(example, dict) else model(*example)


def greedy(seed: int):
    return lambda captured: drawn(captured.graph, PAIR, seed, greedy=True)


def train(rank: int, name: str, seed: int) -> list[float]:
    model, example = cases()[name]
    if rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)  # rank 0's values are to win
    reference, _ = cases()[name]
    mine = compile_with(model, example, PAIR, decide_by=greedy(seed) if seed else None)
    # A large eps: gradients that are zero but for rounding (a key's bias) are not to be scaled up.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (reference, mine)]
    losses = []
    for _ in range(3):
        pair = [loss_of(call(each, example)) for each in (reference, mine)]
        norms = []
        for each, loss, optimizer in zip((reference, mine), pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            norms.append(whole(nn.utils.clip_grad_norm_(each.parameters(), 1.0)))
            optimizer.step()
        torch.testing.assert_close(pair[1], pair[0])
        torch.testing.assert_close(norms[1], norms[0])
        losses.append(pair[1].item())
    state = mine.state_dict()
    for key, want in reference.state_dict().items():
        torch.testing.assert_close(whole(state[key]), want, rtol=1e-4, atol=1e-5)
    for original, placed in zip(reference.parameters(), mine.parameters(), strict=True):
        assert placed.grad is None or placed.grad.placements == placed.placements
        assert (placed.grad is None) == (original.grad is None)
    return losses


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["mlp", "vision", "tied"])
def test_three_steps_on_two_ranks_equal_the_models_own(pool: RankPool, name: str, seed: int):
    first, second = pool.values(train, name, seed)

    assert first == second


def hashed(_rank: int) -> int:
    return hash("a parameter's name")


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all processes hash alike")
def test_ranks_of_this_file_hash_unlike_as_those_of_a_job_do(pool: RankPool):
    first, second = pool.values(hashed)

    assert first != second


def in_stages(_rank: int) -> list[float]:
    torch.manual_seed(3)
    return train_whole(Layers(), (torch.randn(8, 6),), "cpu:2", {"pp": 2, "microbatch": 2, "schedule": "zb_h1"}).losses


def test_stages_on_ranks_that_hash_unlike_equal_the_models_own(pool: RankPool):
    first, second = pool.values(in_stages)

    assert first == second


def accumulate(rank: int) -> None:
    model, (x, y) = cases()["mlp"]
    mine = compile_with(copy.deepcopy(model), (x, y), PAIR)
    for each in (model, mine):
        for scale in (1, 2, 3):
            each(x * scale, y)[1].backward()
    for want, got in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def test_gradients_of_several_backward_passes_add_up(pool: RankPool):
    pool.values(accumulate)


def loss_outside(rank: int, seed: int) -> str:
    model, example = Plain(), (torch.randn(8, 8, generator=torch.Generator().manual_seed(4)),)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    y = torch.arange(8) % 4

    def decide_by(captured):
        decisions = drawn(captured.graph, PAIR, seed, greedy=True)
        return _outputs_sharded(captured, decisions)

    mine = compile_with(copy.deepcopy(model), example, PAIR, decide_by=decide_by)
    out = mine(*example)
    want = nnf.cross_entropy(model(*example), y)
    got = nnf.cross_entropy(out, y)
    want.backward()
    got.backward()
    torch.testing.assert_close(whole(got), want)
    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    return str(out.placements)


def _outputs_sharded(captured, decisions):
    from dataclasses import replace

    from autopar.ir.strategy import MeshStrategy, Strategy

    tangent = next(op.name for op in captured.graph.ops if op.kind == "tangent")
    layout = (Shard(0),)
    operators = dict(decisions.operators)
    strategy = MeshStrategy((Strategy((), layout),), (), (layout,))
    operators[tangent] = replace(operators[tangent], strategy=strategy)
    return replace(decisions, operators=operators, outputs=dict.fromkeys(decisions.outputs, layout))


def test_a_loss_computed_outside_takes_sharded_outputs_beside_plain_targets(pool: RankPool):
    placements = pool.values(loss_outside, 1)

    assert placements == ["(Shard(dim=0),)"] * 2


def save_and_load(rank: int) -> None:
    model, example = cases()["tied"]
    mine = compile_with(copy.deepcopy(model), example, PAIR)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    mine.load_state_dict(model.state_dict())  # whole tensors, as one device saves them

    for key, value in mine.state_dict().items():
        assert torch.equal(whole(value), model.state_dict()[key]), key
    mine.load_state_dict(mine.state_dict())  # DTensors
    assert mine.head.weight is mine.embed.weight
    assert list(mine.state_dict()) == list(model.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for qkv\.bias"):
        mine.load_state_dict({**model.state_dict(), "qkv.bias": torch.zeros(3)})


def test_state_dicts_keep_their_names_and_load_whole_and_sharded(pool: RankPool):
    pool.values(save_and_load)


def evaluate(rank: int) -> None:
    model, example = cases()["vision"]
    mine = compile_with(copy.deepcopy(model), example, PAIR, decide_by=greedy(1))
    for each in (model, mine):
        call(each, example)
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(call(mine, example), call(model, example))


def test_evaluation_on_two_ranks_equals_the_models_own(pool: RankPool):
    pool.values(evaluate)


def from_meta(rank: int) -> None:
    torch.manual_seed(3)
    want = Vision()
    with torch.device("meta"):
        model = Vision()
    example = cases()["vision"][1]
    torch.manual_seed(3 + rank)  # rank 0's random state is to win

    mine = compile_with(
        model, example, PAIR, init_fn=lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None
    )

    for (key, a), b in zip(want.state_dict().items(), mine.state_dict().values(), strict=True):
        assert torch.equal(whole(b), a), key
    assert isinstance(mine.conv.weight, nn.Parameter)
    assert mine.conv.weight.to_local().shape[0] == 4


def test_parameters_on_meta_are_initialised_as_on_one_device_and_sharded(pool: RankPool):
    pool.values(from_meta)


def drop(rank: int, seeds: tuple[int, int]) -> tuple[list[float], list[float]]:
    """Return the losses of two steps from the same seed, and of the step between them."""
    example = cases()["tied"][1]
    torch.manual_seed(1)
    model = Tied(dropout=0.5)
    mine = compile_with(model, example, PAIR, decide_by=greedy(2))
    found = []
    for _ in range(2):
        torch.manual_seed(seeds[rank])
        found.append(mine(**example)["loss"].item())
    found.append(mine(**example)["loss"].item())
    return found[:2], found[2:]


@pytest.mark.parametrize("seeds", [(7, 7), (7, 8)], ids=["equal seeds", "a seed a rank"])
def test_dropout_follows_manual_seed_and_is_the_same_loss_on_all_ranks(pool: RankPool, seeds):
    first, second = pool.values(drop, seeds)

    assert first == second
    assert first[0][0] == first[0][1]
    assert first[1][0] != first[0][0]


def dropout_gradients(rank: int, seed: int) -> float:
    """Return how far gradients are from what the loss itself says, with the same dropout."""
    torch.manual_seed(1)
    model = Tied(dropout=0.5, of_scores=0.3).double()
    example = cases()["tied"][1]
    mine = compile_with(model, example, PAIR, decide_by=greedy(seed))
    weight = mine.qkv.weight

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return mine(**example)["loss"]

    loss().backward()
    step = 1e-5
    direction = whole(weight.grad)
    slope = direction.square().sum().item()
    with torch.no_grad():
        weight.add_(weight.grad, alpha=step)
    up = loss().item()  # with gradients enabled: the program without them may split, and so draw, otherwise
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-2 * step)
    down = loss().item()
    return abs((up - down) / (2 * step) - slope) / slope


@pytest.mark.parametrize("seed", [0, 1], ids=["attention by heads", "by samples"])
def test_backward_uses_the_dropout_of_its_forward(pool: RankPool, seed: int):
    assert max(pool.values(dropout_gradients, seed)) < 1e-4


def local_inputs(rank: int) -> None:
    model, (x, y) = cases()["mlp"]
    from autopar.ir.strategy import Strategy
    from tests.support.decide import decide

    def decide_by(captured):
        split = {}
        for op in captured.graph.ops:
            if op.target == "aten.addmm.default" and op.refs[1].op in _inputs(captured):
                split[op.name] = (Strategy((Replicate(), Shard(0), Replicate()), (Shard(0),)),)
        return decide(captured.graph, PAIR, operators=split, zero=True)

    mine = compile_with(copy.deepcopy(model), (x, y), PAIR, decide_by=decide_by, local_inputs=True)
    logits, loss = mine(x.chunk(2)[rank], y.chunk(2)[rank])
    want_logits, want = model(x, y)
    want.backward()
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(whole(logits), want_logits)
    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    mine(x, y)


def _inputs(captured) -> set[str]:
    return {op.name for op in captured.graph.ops if op.kind == "input"}


def test_loaders_that_split_the_batch_bring_their_part(pool: RankPool):
    outcomes = pool.run(local_inputs)

    for outcome in outcomes:
        assert outcome.kind == "InputMismatchError", outcome.trace
        assert "the plan was made for float32[4, 8] (this rank's part of float32[8, 8])" in outcome.error


def disagree(rank: int) -> None:
    Ranks.join("cpu").agree("captured program", "ab"[rank] * 8)


def fail_on_one(rank: int) -> None:
    with Ranks.join("cpu").together("capture the model"):
        if rank == 1:
            raise ValueError("no luck")


def wrong_mesh(rank: int) -> None:
    compile_with(Mlp(), cases()["mlp"][1], mesh_of(dp=2, tp=2))


def test_ranks_that_disagree_all_stop(pool: RankPool):
    for outcome in pool.run(disagree):
        assert outcome.kind == "RanksDisagreeError"


def test_when_one_rank_fails_the_others_say_which_and_why(pool: RankPool):
    zero, one = pool.run(fail_on_one)

    assert one.error == "ValueError: no luck"
    assert zero.kind == "RanksDisagreeError"
    assert "rank 1: ValueError('no luck')" in zero.error


def test_a_plan_for_another_number_of_ranks_is_stale(pool: RankPool):
    for outcome in pool.run(wrong_mesh):
        assert outcome.error.startswith("StalePlanError: the plan is for 4 ranks (dp=2 x tp=2) and 2 are running")


def lazily(rank: int) -> None:
    """Place parameters after an optimizer was made for them, as a first call without example inputs does."""
    model, example = cases()["mlp"]
    reference = copy.deepcopy(model)
    mine = copy_tree(model, {})
    hold_whole(mine, Ranks.join("cpu"))
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    built = compile_with(plain_copy(mine, model), example, PAIR)
    take_over(mine, built)
    mine.__class__ = built.__class__
    mine(*example)[1].backward()
    optimizer.step()
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(*example)[1].backward()
    other.step()
    for a, b in zip(reference.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a.detach())


def test_an_optimizer_made_before_the_first_call_goes_on_working(pool: RankPool):
    pool.values(lazily)
