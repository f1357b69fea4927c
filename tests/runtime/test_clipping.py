"""Norms over the gradients of a model of which each rank holds some stages, against those of one device."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.errors import UsageError
from tests.support.ranks import RankPool
from tests.support.training import whole


class Tied(nn.Module):
    """A table that the first block reads, and the loss again; blocks of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 8)) for w in (8, 32, 16, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy((hidden @ self.table.weight.T).flatten(0, 1), ids.flatten())


def backward(ranks: int, fix: dict[str, Any], frozen: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return a model and its compiled copy with gradients; the first blocks and the table may be frozen."""
    torch.manual_seed(3)
    reference, ids = Tied(), torch.randint(0, 16, (8, 6))
    if frozen:
        reference.table.requires_grad_(False)
        reference.layers[:frozen].requires_grad_(False)
    mine = autopar.compile(copy.deepcopy(reference), f"cpu:{ranks}", example_inputs=(ids,), fix=fix)
    for each in (reference, mine):
        (3 * each(ids)).backward()
    return reference, mine


def worst_error(mine: nn.Module, reference: nn.Module) -> float:
    wanted = dict(reference.named_parameters())
    pairs = [(whole(p.grad), wanted[name].grad) for name, p in mine.named_parameters() if p.grad is not None]
    return max(((got - want).norm() / want.norm()).item() for got, want in pairs)


def clip(_rank: int, ranks: int, fix: dict[str, Any], how: str, norm_type: float, frozen: int = 0) -> tuple[float, ...]:
    """Return the norm before clipping, that of the model itself, and the largest error of a clipped gradient."""
    reference, mine = backward(ranks, fix, frozen)
    want = clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    if how == "torch":
        got = clip_grad_norm_(mine.parameters(), 0.1, norm_type)
    else:
        got = autopar.clip_grad_norm_(mine, 0.1, norm_type)
    return whole(got).item(), want.item(), worst_error(mine, reference)


@pytest.mark.parametrize(
    ("fix", "norm_type", "how"),
    [
        ({"pp": 2, "microbatch": 2}, 2.0, "torch"),
        ({"pp": 2, "microbatch": 2}, float("inf"), "torch"),
        ({"pp": 2, "schedule": "zbv", "microbatch": 2}, 3.0, "torch"),
        ({"pp": 2, "microbatch": 2}, 2.0, "autopar"),
        ({"pp": 2, "microbatch": 2}, -float("inf"), "autopar"),
        ({"tp": 2}, 2.0, "torch"),
        ({"tp": 2}, 2.0, "autopar"),
    ],
    ids=str,
)
def test_clipping_sees_the_norm_of_the_whole_model(pool: RankPool, fix: dict[str, Any], norm_type: float, how: str):
    for got, want, error in pool.values(clip, 2, fix, how, norm_type):
        # An order of -inf looks at the one smallest number: of terms as large as 0.1, it has their rounding.
        assert got == pytest.approx(want, rel=1e-5, abs=1e-8)
        assert error < 1e-5


@pytest.mark.parametrize(
    "fix",
    [{"tp": 2, "microbatch": 4}, {"dp_shard": 2, "zero": 3, "microbatch": 2}, {"dp_replicate": 2, "microbatch": 2}],
    ids=str,
)
def test_clipping_sees_all_stages_and_all_parts_of_split_parameters(four: RankPool, fix: dict[str, Any]):
    for got, want, error in four.values(clip, 4, {"pp": 2, **fix}, "torch", 2.0):
        assert got == pytest.approx(want, rel=1e-5)
        assert error < 1e-5


def test_a_rank_without_gradients_takes_part_in_clipping(pool: RankPool):
    for got, want, _ in pool.values(clip_last, 2):
        assert got == pytest.approx(want, rel=1e-5)


def clip_last(_rank: int, ranks: int) -> tuple[float, ...]:
    reference, mine = backward(ranks, {"pp": 2, "microbatch": 4}, frozen=3)
    want = clip_grad_norm_(reference.parameters(), 0.1)
    got = clip_grad_norm_(list(mine.parameters()), 0.1)
    return got.item(), want.item(), float(sum(p.grad is not None for p in mine.parameters()))


def parts(_rank: int) -> tuple[float, float, float]:
    """Return errors of the norm of weights, of one gradient's, and of some parameters'."""
    reference, mine = backward(2, {"pp": 2, "microbatch": 4})
    wanted = dict(reference.named_parameters())
    total = nn.utils.get_total_norm
    weights = total(list(mine.parameters())) / total(list(reference.parameters())) - 1
    alone = max(abs((total(p.grad) / wanted[name].grad.norm()).item() - 1) for name, p in mine.named_parameters())
    for name, p in mine.named_parameters():
        got = clip_grad_norm_(p, 1e9)
        alone = max(alone, abs((got / wanted[name].grad.norm()).item() - 1))
    got = autopar.clip_grad_norm_(mine, 1.0, parameters=biases(mine))
    some = got / clip_grad_norm_(biases(reference), 1.0) - 1
    return abs(weights.item()), alone, abs(some.item())


def biases(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("bias")]


def test_weights_one_parameter_and_chosen_parameters_have_their_own_norms(pool: RankPool):
    for weights, alone, some in pool.values(parts):
        assert max(weights, alone, some) < 1e-5


PICKS: dict[str, Callable[[nn.Module], Iterable[nn.Parameter]]] = {
    "a submodule of the first stage": lambda model: model.layers[0].parameters(),
    "a submodule of the last stage": lambda model: model.layers[-1].parameters(),
    "one parameter of a submodule": lambda model: (p for p in model.layers[1].parameters() if p.shape == (32,)),
    "all that the last rank has": lambda model: model.layers[2:].parameters(),
    "a table that both ranks have": lambda model: model.table.parameters(),
    "biases in a list": biases,
    "one parameter in a list": lambda model: [p for name, p in model.named_parameters() if name == "layers.3.0.bias"],
    "a group of an optimizer": lambda model: torch.optim.SGD(
        [{"params": [p for p in model.parameters() if p.dim() == dims]} for dims in (1, 2)]
    ).param_groups[1]["params"],
}


def clip_some(_rank: int, pick: str, norm_type: float, fix: dict[str, Any]) -> tuple[float, float, float]:
    reference, mine = backward(2 * fix.get("tp", 1), {"pp": 2, "microbatch": 4, **fix})
    want = clip_grad_norm_(PICKS[pick](reference), 0.01, norm_type)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`parameters` is an empty generator")
        got = clip_grad_norm_(PICKS[pick](mine), 0.01, norm_type)
    return whole(got).item(), want.item(), worst_error(mine, reference)


@pytest.mark.parametrize("pick", PICKS)
def test_parameters_of_some_stages_are_clipped_by_the_norm_of_all_of_them(pool: RankPool, pick: str):
    for norm_type in (2.0, -float("inf")):
        for got, want, error in pool.values(clip_some, pick, norm_type, {}, timeout_s=30):
            # The least of all gradients is exact to the rounding of the large ones that it is a difference of.
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7)
            assert error < 1e-5


def test_parameters_of_some_stages_are_clipped_where_they_are_split(four: RankPool):
    for pick in ("a submodule of the last stage", "a table that both ranks have", "biases in a list"):
        for got, want, error in four.values(clip_some, pick, 2.0, {"tp": 2}, timeout_s=30):
            assert got == pytest.approx(want, rel=1e-5)
            assert error < 1e-5


PLACES: dict[str, Callable[[nn.Module], None]] = {
    "the last two": lambda model: clip_grad_norm_(list(model.parameters())[-2:], 1.0),
    "the first three": lambda model: clip_grad_norm_(list(model.parameters())[:3], 1.0),
    "one after another in lists": lambda model: [clip_grad_norm_([p], 1.0) for p in model.parameters()],
}


def clip_places(_rank: int, how: str) -> str:
    _, mine = backward(2, {"pp": 2, "microbatch": 4})
    with pytest.raises(UsageError) as refused:
        PLACES[how](mine)
    return str(refused.value)


@pytest.mark.parametrize("how", PLACES)
def test_places_in_lists_of_parameters_are_refused_on_all_ranks(pool: RankPool, how: str):
    for refused in pool.values(clip_places, how, timeout_s=30):
        assert re.match(r"a norm of \d gradients of each rank was asked for \(\w+[^)]*\)", refused)
        assert "autopar.clip_grad_norm_(model, max_norm, parameters=THESE)" in refused


def apart(rank: int) -> float:
    """Return the norm of gradients of no pipeline, taken on one rank alone beside a model with stages."""
    backward(2, {"pp": 2, "microbatch": 4})
    other = nn.Linear(4, 4)
    other(torch.ones(2, 4)).sum().backward()
    return clip_grad_norm_(other.parameters(), 1.0).item() if rank == 0 else 0.0


def test_gradients_of_other_models_are_no_business_of_other_ranks(pool: RankPool):
    assert pool.values(apart)[0] == pytest.approx((16 * 4 + 4 * 4) ** 0.5)


def late(_rank: int) -> tuple[float, float, float]:
    """Clip and step where stages are planned at the first call, and the optimizer was made before."""
    torch.manual_seed(3)
    reference, ids = Tied(), torch.randint(0, 16, (8, 6))
    mine = autopar.compile(copy.deepcopy(reference), "cpu:2", fix={"pp": 2, "microbatch": 4})
    norms = []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, mine)]
    for each, optimizer in zip((reference, mine), optimizers, strict=True):
        each(ids).backward()
        norms.append(whole(clip_grad_norm_(each.parameters(), 0.1)).item())
        optimizer.step()
    wanted = dict(reference.named_parameters())
    errors = [(whole(p) - wanted[name]).abs().max().item() for name, p in mine.named_parameters()]
    return norms[0], norms[1], max(errors)


def test_stages_that_are_planned_at_the_first_call_are_clipped_and_trained_alike(pool: RankPool):
    for want, got, error in pool.values(late):
        assert got == pytest.approx(want, rel=1e-5)
        assert error < 1e-6


def test_parameters_in_place_of_the_model_are_refused_with_the_call_that_is_meant():
    with pytest.raises(UsageError, match=r"takes the compiled model itself.*clip_grad_norm_\(model, max_norm\)"):
        autopar.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
