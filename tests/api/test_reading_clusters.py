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


def test_a_document_in_the_format_of_cluster_files_is_a_cluster():
    document = {
        "version": 1,
        "name": "two cores",
        "devices": {"core": {"preset": "cpu"}},
        "nodes": {"host": {"device": "core", "count": 2, "links": {"bandwidth": "1 GB/s", "latency": "9us"}}},
        "groups": [{"node": "host", "count": 1}],
    }

    plan = autopar.plan(nn.Linear(4, 4), document, example_inputs=(torch.zeros(2, 4),))

    assert plan.cluster["name"] == "two cores"
    with pytest.raises(UsageError, match=r"cluster.*devices.core: unknown key 'prest'"):
        autopar.plan(
            nn.Linear(4, 4), document | {"devices": {"core": {"prest": "cpu"}}}, example_inputs=(torch.zeros(2, 4),)
        )
