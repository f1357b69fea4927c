"""Attributes of modules that a loop sets between calls: what a program was made for is not what it goes on with."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputMismatchError, UsageError
from autopar.runtime.module import runner_of
from tests.support.ranks import RankPool
from tests.support.training import whole


class Settings:
    def __init__(self) -> None:
        self.scale, self.unread = 1.0, 0


class Switched(nn.Module):
    """Layers that attributes of all kinds switch, weigh and choose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.side = nn.Linear(8, 8)
        self.with_side, self.tau, self.weights = True, 1.0, {"mean": 1.0}
        self.used = [0, 1, 2, 3]
        self.settings = Settings()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for place in self.used:
            x = torch.tanh(self.layers[place](x)) / self.tau
        if self.with_side:
            x = x + self.side(x) * self.settings.scale
        return self.weights["mean"] * x.square().mean()


def _rows() -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def switch(model: Any, step: int) -> None:
    """Change what a loop may change before a step: what forward reads, back again, and what it does not read."""
    model.steps = step
    model.settings.unread = step
    model.with_side = step not in {1, 2}
    model.tau = 2.0 if step == 3 else 1.0
    model.weights["mean"] = 0.5 if step == 3 else 1.0
    model.used = [1, 0, 2, 3] if step == 4 else [0, 1, 2, 3]
    model.settings.scale = 3.0 if step == 4 else 1.0


def trained(_rank: int, fix: dict[str, Any]) -> tuple[float, float, int, int]:
    """Return the worst difference of losses and parameters from one device's, how often it was told, and programs."""
    torch.manual_seed(0)
    model, found = Switched().double(), []
    mine = autopar.compile(copy.deepcopy(model), f"cpu:{_world()}", example_inputs=(_rows(),), fix=fix)
    told: list[warnings.WarningMessage] = []
    for each in (model, mine):
        optimizer, losses = torch.optim.SGD(each.parameters(), lr=0.1), []
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            for step in range(6):
                switch(each, step)
                loss = each(_rows())
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        told += now
        found.append((losses, {name: whole(p.detach()) for name, p in each.named_parameters()}))
    (wanted, state), (got, my_state) = found
    runner = runner_of(mine)
    assert runner is not None
    off = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
    worst = max((my_state[name] - state[name]).abs().max().item() for name in my_state)
    text = "attribute with_side is False, and the plan was made for True: a program for calls of this form"
    return off, worst, sum(text in str(each.message) for each in told), len(runner._known[True, True])


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


@pytest.mark.parametrize("fix", [{"tp": 2}, {"pp": 2, "microbatch": 4}], ids=str)
def test_attributes_set_between_steps_act_as_on_one_device(pool: RankPool, fix: dict[str, Any]):
    for off, worst, told, programs in pool.values(trained, fix):
        assert off < 1e-12
        assert worst < 1e-12
        assert told == 1
        assert programs == 4, "one for each value that forward reads, and none for what it does not"


def test_a_change_between_compiling_and_the_first_call_acts():
    model = Switched().double()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(_rows(),))
    for each in (model, mine):
        each.with_side = False

    with pytest.warns(UserWarning, match="attribute with_side is False"):
        torch.testing.assert_close(mine(_rows()), model(_rows()))


@pytest.mark.filterwarnings("ignore:attribute with_side")
def test_a_copy_has_attributes_of_its_own():
    model = Switched().double()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(_rows(),))
    other = copy.deepcopy(mine)
    want = model(_rows())
    other.with_side = model.with_side = False

    torch.testing.assert_close(mine(_rows()), want)
    torch.testing.assert_close(other(_rows()), model(_rows()))


@pytest.mark.filterwarnings("ignore:attribute tau", "ignore:8 programs")
def test_a_number_that_goes_on_changing_is_refused_with_the_way_out():
    mine = autopar.compile(Switched().double(), "cpu:1", example_inputs=(_rows(),))

    for step in range(8):
        mine.tau = 1.0 + step / 4
        mine(_rows())

    mine.tau = 7.5
    with pytest.raises(InputMismatchError, match=r"attribute tau is 7\.5, and the plan was made for 1\.0.*buffer"):
        mine(_rows())


class Steered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.head(self.drop(self.norm(x))).square().mean()


@pytest.mark.filterwarnings("ignore:attribute")
def test_settings_of_torchs_own_modules_act():
    model = Steered().double()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(_rows(),))
    for each in (model, mine):
        each.drop.p = 0.0
        each.norm.momentum = 0.3
        each.norm.reset_running_stats()
        losses = [each((1 + step) * _rows()) for step in range(3)]
        losses[-1].backward()

    torch.testing.assert_close(mine.norm.running_mean, model.norm.running_mean)
    torch.testing.assert_close(mine.norm.running_var, model.norm.running_var)
    torch.testing.assert_close(mine.head.weight.grad, model.head.weight.grad)


def test_a_forward_put_in_place_that_runs_no_program_is_refused():
    mine: Any = autopar.compile(Switched().double(), "cpu:1", example_inputs=(_rows(),))
    mine.forward = lambda x: mine.side(x).mean()

    with pytest.raises(UsageError, match=r"forward of this compiled Switched was replaced .* not the plan\. Have it"):
        mine(_rows())

    mine.forward = lambda x: mine.side(x, x)
    with pytest.raises(UsageError, match=r"not the plan \(it failed: .*takes 2 positional arguments"):
        mine(_rows())


def test_a_forward_put_around_the_compiled_one_is_welcome():
    model = Switched().double()
    mine: Any = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(_rows(),))
    own = mine.forward
    mine.forward = lambda x: 2 * own(x)

    torch.testing.assert_close(mine(_rows()), 2 * model(_rows()))
