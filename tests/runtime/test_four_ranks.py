"""What users do with a compiled model, on meshes of two axes and on stages of several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar
from tests.support.ranks import RankPool
from tests.support.training import whole

TWO_AXES = {"dp_shard": 2, "tp": 2, "zero": 3}
STAGES_TP = {"pp": 2, "tp": 2, "microbatch": 2}
STAGES_DP = {"pp": 2, "dp_shard": 2, "zero": 3, "microbatch": 2}
FIXES = [TWO_AXES, STAGES_TP, STAGES_DP]


class Tagger(nn.Module):
    """Tied tables and layers between; loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the logits."""
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = x @ self.table.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def _ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(16, (8, 4), generator=torch.Generator().manual_seed(seed))


def _pair(fix: dict[str, Any], **how: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Tagger()
    return model, autopar.compile(copy.deepcopy(model), "cpu:4", example_inputs=(_ids(),), fix=fix, **how)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> None:
    model(_ids(seed))[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def _apart(model: nn.Module, mine: nn.Module) -> float:
    wanted = dict(model.named_parameters())
    held = {name: whole(each.detach()) for name, each in mine.named_parameters()}
    return max((each - wanted[name]).abs().max().item() for name, each in held.items())


def outputs(_rank: int, fix: dict[str, Any], grad: bool) -> tuple[bool, float]:
    """Return whether all outputs are plain, and their largest difference."""
    model, mine = _pair(fix, outputs="whole")
    with torch.set_grad_enabled(grad):
        wanted, got = model(_ids(2)), mine(_ids(2))
    return all(type(each) is torch.Tensor for each in got), max(
        (a - b).abs().max().item() for a, b in zip(wanted, got, strict=True)
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_whole_outputs_are_those_of_one_device_on_every_rank(four: RankPool, fix: dict[str, Any], grad: bool):
    for plain, apart in four.values(outputs, fix, grad):
        assert plain
        assert apart < 1e-5


def states(_rank: int, fix: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Return one device's state after a step, what the ranks' is gathered to, and how far it is once loaded again."""
    model, mine = _pair(fix)
    for each in (model, mine):
        _step(each, torch.optim.SGD(each.parameters(), lr=0.5))
    full = autopar.full_state_dict(mine)
    for each in mine.parameters():
        torch.nn.init.zeros_(each)
    mine.load_state_dict(model.state_dict())
    return dict(model.state_dict()), full, _apart(model, mine)


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_the_full_state_is_the_single_devices_on_rank_0_and_loads_on_all(four: RankPool, fix: dict[str, Any]):
    (wanted, got, _), *others = told = four.values(states, fix)

    assert list(got) == list(wanted)
    for name, each in wanted.items():
        torch.testing.assert_close(got[name], each, msg=lambda text, name=name: f"{name}: {text}")
    assert [full for _, full, _ in others] == [{}] * 3
    assert [apart for _, _, apart in told] == [0.0] * 4


def copies(_rank: int, fix: dict[str, Any]) -> tuple[float, float]:
    """Return how far a model and its copy, trained on other batches by turns, are from those of one device."""
    model, mine = _pair(fix)
    pairs = [(each, copy.deepcopy(each)) for each in (model, mine)]
    for one, other in pairs:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (one, other)]
        for seed in (3, 4):
            _step(one, optimizers[0], seed)
            _step(other, optimizers[1], seed + 2)
    (one, other), (mine, copied) = pairs
    return _apart(one, mine), _apart(other, copied)


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_a_copy_trains_by_itself(four: RankPool, fix: dict[str, Any]):
    for apart, of_copy in four.values(copies, fix):
        assert apart < 1e-5
        assert of_copy < 1e-5


def overflowing(rank: int, fix: dict[str, Any]) -> tuple[bool, float]:
    """Take a step in which the gradient of one rank's part overflows; return whether values moved, and the scale."""
    _, mine = _pair(fix)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
    before = [whole(each.detach()).clone() for each in mine.parameters()]
    mine(_ids())
    (bound,) = mine.__dict__["_autopar"]._known[True, True]
    run = bound.run

    def spoiled(*args: Any, **how: Any) -> Any:
        outputs, gradients = run(*args, **how)
        if rank == 3:
            gradients[0].fill_(torch.inf)
        return outputs, gradients

    bound.run = spoiled
    scaler.scale(mine(_ids())[0]).backward()
    scaler.step(optimizer)
    scaler.update()
    after = [whole(each.detach()) for each in mine.parameters()]
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), scaler.get_scale()


@pytest.mark.parametrize("fix", [STAGES_TP, STAGES_DP], ids=str)
def test_a_part_of_one_rank_that_overflows_skips_the_step_on_all(four: RankPool, fix: dict[str, Any]):
    assert four.values(overflowing, fix) == [(False, 2.0)] * 4


def scaled(_rank: int, fix: dict[str, Any]) -> list[tuple[bool, float]]:
    """Return of each step whether values here moved, and the scale; the second step overflows."""
    _, mine = _pair(fix, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    told = []
    for step in range(3):
        before = [whole(each.detach()).clone() for each in mine.parameters()]
        loss = mine(_ids())[0]
        scaler.scale(loss * (1e38 if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [whole(each.detach()) for each in mine.parameters()]
        told.append((any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), scaler.get_scale()))
    return told


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_a_scaled_step_that_overflows_is_skipped_on_all_ranks(four: RankPool, fix: dict[str, Any]):
    assert four.values(scaled, fix) == [[(True, 8.0), (False, 4.0), (True, 4.0)]] * 4
