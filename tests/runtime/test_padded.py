"""Parameters that the ranks do not divide: padded parts on real ranks, and what the user sees of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.utils import clip_grad_norm_

import autopar
from tests.support.ranks import RankPool
from tests.support.training import whole


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def six() -> Iterator[RankPool]:
    with RankPool(6) as ranks:
        yield ranks


class Odd(nn.Module):
    """A table and its layers, tied at both ends; 3 divides no dimension. Of 4 rows the last of 3 ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, w), nn.GELU(), nn.Linear(w, 10)) for w in (4, 7, 11))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy((hidden @ self.table.weight.T).flatten(0, 1), ids.flatten())


def models(ranks: int, fix: dict[str, Any]) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Return a model, its compiled copy and a batch."""
    torch.manual_seed(3)
    reference, ids = Odd(), torch.randint(0, 16, (24, 6))
    mine = autopar.compile(copy.deepcopy(reference), f"cpu:{ranks}", example_inputs=(ids,), fix=fix)
    return reference, mine, ids


def steps(reference: nn.Module, mine: nn.Module, ids: torch.Tensor) -> None:
    """Take clipped steps with both models, which must agree."""
    both = (reference, mine)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in both]
    for _ in range(3):
        losses = [each(ids) for each in both]
        for loss in losses:
            loss.backward()
        norms = [whole(clip_grad_norm_(each.parameters(), 0.1)) for each in both]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(whole(losses[1]), losses[0])
        torch.testing.assert_close(norms[1], norms[0])


def same_values(reference: nn.Module, mine: nn.Module) -> None:
    """Check that the parameters that this rank has are the reference's."""
    wanted = dict(reference.named_parameters())
    for name, value in mine.named_parameters():
        torch.testing.assert_close(whole(value.detach()), wanted[name].detach(), rtol=1e-4, atol=1e-6)


def trained(_: int, ranks: int, fix: dict[str, Any]) -> list[int]:
    reference, mine, ids = models(ranks, fix)
    steps(reference, mine, ids)
    same_values(reference, mine)
    return [p.to_local().shape[0] for p in mine.parameters() if p.shape[0] == 4]


@pytest.mark.parametrize(
    "fix",
    [
        {"zero": 3, "microbatch": 4},
        {"zero": 2, "microbatch": 4},
        pytest.param({"zero": 3}, marks=pytest.mark.slow),
        pytest.param({"zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_with_padded_parts_are_those_of_one_device(three: RankPool, fix: dict[str, Any]):
    rows = three.values(trained, 3, {"dp_shard": 3, **fix})

    assert rows == [[2, 2], [2, 2], [0, 0]]


@pytest.mark.parametrize("fix", [{"pp": 2, "microbatch": 4}, {"tp": 2, "zero": 3}, {"dp_replicate": 2}], ids=str)
def test_padded_parts_go_with_other_axes(six: RankPool, fix: dict[str, Any]):
    six.values(trained, 6, {"dp_shard": 3, **fix})


def reloaded(rank: int) -> None:
    reference, mine, ids = models(3, {"dp_shard": 3, "zero": 3})
    steps(reference, mine, ids)
    saved = get_model_state_dict(mine, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    state = [reference.state_dict() if rank else saved]
    torch.distributed.broadcast_object_list(state)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[0][name], value, rtol=1e-4, atol=1e-6)

    torch.manual_seed(7)
    other = Odd()
    mine.load_state_dict(other.state_dict())
    steps(other, mine, ids)
    same_values(other, mine)

    third = Odd()
    set_model_state_dict(
        mine, third.state_dict(), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    torch.distributed.broadcast_object_list(values := [third.state_dict()])
    third.load_state_dict(values[0])
    steps(third, mine, ids)
    same_values(third, mine)


def test_checkpoints_hold_no_padding(three: RankPool):
    three.values(reloaded)


def assigned(_: int) -> None:
    reference, mine, ids = models(3, {"dp_shard": 3, "zero": 3})
    mine.load_state_dict({name: value.clone() for name, value in mine.state_dict().items()}, assign=True)
    steps(reference, mine, ids)
    same_values(reference, mine)


def test_tensors_that_users_assign_need_no_room_behind_them(three: RankPool):
    three.values(assigned)
