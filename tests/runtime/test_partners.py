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

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.student = copy.deepcopy(self.teacher[:2])
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
    partners = Partners.of(nn.ModuleDict({"teacher": model.teacher}), {"student.0.weight", "head.weight"})
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
    # `teacher.norm` is no partner of `teacher.patch`, whose student is here.
    model.first = nn.ModuleDict(
        {name: nn.Linear(4, 4).requires_grad_(name == "student") for name in ("student", "mean")}
    )
    assert not Partners.of(nn.ModuleDict({"first": model.first}), {"first.norm.weight"}).pairs


def _told(_rank: int, fix: dict[str, int]) -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    model = autopar.compile(Distilled(layers=3), "cpu:2", example_inputs=(x,), fix=fix)
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


def _trained(rank: int | None, fix: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the parameters that a rank has after some steps of a loop that moves the teacher behind the student."""
    torch.manual_seed(0)
    model, x = Distilled().double(), torch.randn(4, 4).double()
    if rank is not None:
        model = autopar.compile(model, "cpu:2", example_inputs=(x,), fix=fix, precision="fp32")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, each in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                mean.mul_(0.9).add_(each, alpha=0.1)
    return {name: each.detach() for name, each in model.named_parameters()}


def test_a_teacher_built_like_its_student_is_where_that_is_and_learns_as_on_one_device():
    with RankPool(2) as pool:
        ranks = pool.values(_trained, {"pp": 2, "microbatch": 2})

    found = {name: value for each in ranks for name, value in each.items()}
    assert all(len(each) == 4 for each in ranks)
    torch.testing.assert_close(found, _trained(None, {}), rtol=1e-10, atol=1e-12)
