"""Training on batches of other forms than planned: each form has a program of its own, on the same parameters."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.compiling import _microbatches
from autopar.errors import InputMismatchError
from autopar.ir.plan import Workload
from tests.support.ranks import RankPool
from tests.support.training import same_step, whole

FORMS = ((8, 6), (8, 6), (3, 6), (8, 9), (4, 6), (1, 9), (8, 6))
"""Samples and tokens of the batches: a last one that is smaller, a longer one, sizes that no axis divides."""


class Tagger(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(12, 8), nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, scale: float = 1.0, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of telling the next token, weighted by its number."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = self.drop(x + torch.tanh(layer(x)))
        return scale * nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), weights)


def _ids(samples: int, tokens: int) -> torch.Tensor:
    return torch.randint(12, (samples, tokens), generator=torch.Generator().manual_seed(samples * tokens))


def trained(_rank: int, fix: dict[str, Any], every: int) -> tuple[list[float], float, int]:
    """Return the losses' and parameters' differences from one device's, and how often a form was told of."""
    torch.manual_seed(0)
    model, found = Tagger().double(), []
    mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(_ids(*FORMS[0]),), fix=fix)
    told: list[warnings.WarningMessage] = []
    for each in (model, mine):
        optimizer, losses = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9), []
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            for step, form in enumerate(FORMS, 1):
                loss = each(_ids(*form))
                loss.backward()
                losses.append(loss.item())
                if step % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        told += now
        found.append((losses, {name: whole(p.detach()) for name, p in each.named_parameters()}))
    (wanted, state), (got, my_state) = found
    worst = max((my_state[name] - state[name]).abs().max().item() for name in my_state)
    text = r"argument ids is int64[3, 6], and the plan was made for int64[8, 6]: a program for calls of this form"
    return [a - b for a, b in zip(got, wanted, strict=True)], worst, sum(text in str(e.message) for e in told)


@pytest.mark.parametrize(
    ("fix", "every"),
    [
        ({"dp_replicate": 2}, 1),
        ({"dp_shard": 2, "zero": 3, "recompute": "full"}, 1),
        ({"tp": 2}, 2),
        ({"pp": 2, "microbatch": 2}, 1),
        ({"pp": 2, "microbatch": 2, "schedule": "zb_h1", "recompute": "full"}, 3),
        ({"dp_shard": 2, "microbatch": 2}, 2),
    ],
    ids=str,
)
def test_training_on_batches_of_other_forms_is_that_of_one_device(pool: RankPool, fix: dict[str, Any], every: int):
    for losses, worst, told in pool.values(trained, fix, every):
        assert max(map(abs, losses)) < 1e-12
        assert worst < 1e-12
        assert told == 1


def test_a_model_planned_in_evaluation_is_trained():
    """`from_pretrained` returns models in evaluation; their dropout is no part of the program planned for."""
    torch.manual_seed(0)
    model, ids = Tagger(dropout=0.5).eval(), _ids(8, 6)
    mine = autopar.compile(model, "cpu:1", example_inputs=(ids,))

    torch.testing.assert_close(mine(ids), model(ids))
    torch.manual_seed(1)
    loss = mine.train()(ids)
    loss.backward()
    assert loss != mine.eval()(ids)
    assert mine.head.weight.grad is not None


@pytest.mark.filterwarnings("ignore:the call's arguments differ")
def test_an_argument_more_than_planned_is_welcome():
    torch.manual_seed(0)
    model, weights = Tagger().double(), torch.rand(12, dtype=torch.float64)
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(_ids(8, 6),))

    same_step(mine, model, (_ids(8, 6), 1.0, weights))
    for each in (mine, model):
        each.zero_grad()
    same_step(mine, model, (_ids(8, 6),))


def test_another_number_than_planned_is_refused_in_training():
    mine = autopar.compile(Tagger(), "cpu:1", example_inputs=(_ids(8, 6), 2.0))

    with pytest.raises(InputMismatchError, match=r"argument scale is 0\.5, and the plan was made for 2\.0"):
        mine(_ids(4, 6), 0.5)


@pytest.mark.filterwarnings("ignore:argument ids is")
def test_a_copy_knows_the_forms_that_the_model_has_met():
    torch.manual_seed(0)
    model = Tagger().double()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(_ids(8, 6),))
    mine(_ids(3, 6))

    same_step(copy.deepcopy(mine), model, (_ids(3, 6),))


@pytest.mark.parametrize(
    ("batch", "count"),
    [(16, 4), (8, 2), (4, 1), (2, 1), (12, 3), (6, 3), (10, 5), (7, 7), (32, 8), (0, 1)],
)
def test_another_batch_goes_in_micro_batches_no_larger_than_planned_and_even_over_ranks_if_it_can(
    batch: int, count: int
):
    planned = Workload(
        model="", global_batch=16, microbatch=2, num_microbatches=4, precision="fp32", optimizer="adamw"
    )  # of 4 samples on 2 data-parallel ranks

    assert _microbatches(planned, batch) == count
