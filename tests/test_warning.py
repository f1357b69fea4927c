"""Warnings name the line of the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.warning import warn


def test_a_warning_names_the_line_that_called():
    with pytest.warns(UserWarning, match="of something") as caught:
        warn("of something")

    assert caught[0].filename == __file__


def test_frames_of_torch_are_left_out():
    class Warns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module = Warns()
    module.register_forward_hook(lambda *_: exec(compile("w('hi')", autopar.__file__, "exec"), {"w": warn}))

    with pytest.warns(UserWarning, match="hi") as caught:
        module(torch.ones(1))

    assert caught[0].filename == __file__


def test_parameters_frozen_after_planning_are_told_at_the_users_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.ones(2, 4)
    mine = autopar.compile(model, "cpu:1", example_inputs=(x,))
    mine[0].weight.requires_grad_(False)

    with pytest.warns(UserWarning, match="frozen after planning") as caught:
        mine(x)

    assert caught[0].filename == __file__
