"""Teachers that a loop updates by the order of their parameters, where stages have parted them from their students."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.partners import Partners
from tests.support.ranks import RankPool


class Distilled(nn.Module):
    """Layers that learn what a running mean of them gives."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.student = copy.deepcopy(self.teacher)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        wanted, found = x, x
        for layer in self.teacher:
            wanted = layer(wanted).tanh()
        for layer in self.student:
            found = layer(found).tanh()
        return (found - wanted).square().mean() + found.square().mean()


def test_a_frozen_parameter_that_is_written_warns_once_if_its_partner_is_elsewhere():
    model = Distilled()
    partners = Partners.of(model, {"student.0.weight", "head.weight"})
    partners.check()

    with torch.no_grad():
        model.teacher[0].weight.mul_(0.9)

    with pytest.warns(UserWarning, match=r"^teacher\.0\.weight was written .* student\.0\.weight is on .* pp=1"):
        partners.check()
    model.teacher[0].weight.zero_()
    partners.check()


def test_partners_on_this_rank_parameters_of_other_layers_and_trained_ones_are_no_such():
    model = Distilled()

    assert not Partners.of(model, {"student.2.weight", "teacher.2.weight", "other.0.scale"}).pairs
    assert not Partners.of(model.student, {"1.scale", "other.weight"}).pairs


def _told(_rank: int, fix: dict[str, int]) -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    model = autopar.compile(Distilled(), "cpu:2", example_inputs=(x,), fix=fix)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).backward()
            with torch.no_grad():
                for mean, each in zip(model.teacher.parameters(), model.student.parameters(), strict=False):
                    mean.mul_(0.9).add_(each, alpha=0.1)
                for mean in model.teacher.parameters():
                    mean.mul_(1.0)
    return [str(each.message) for each in found if "pipeline stage" in str(each.message)]


def test_ranks_of_a_pipeline_warn_and_others_do_not():
    with RankPool(2) as pool:
        parted = pool.values(_told, {"pp": 2, "microbatch": 2})
        whole = pool.values(_told, {"tp": 2})

    assert sum(map(len, parted)) >= 1
    assert whole == [[], []]
