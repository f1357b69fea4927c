"""What is given as the cluster is one, or is told to be something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError


def test_a_plan_given_as_the_cluster_is_told_where_plans_go():
    inputs = (torch.zeros(2, 4),)
    plan = autopar.plan(nn.Linear(4, 4), "cpu:1", example_inputs=inputs)

    with pytest.raises(UsageError, match=r"the cluster given is a plan: pass it as plan="):
        autopar.compile(nn.Linear(4, 4), plan, example_inputs=inputs)  # type: ignore[arg-type]
