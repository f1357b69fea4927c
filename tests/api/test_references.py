"""What `autopar plan` says of a function of the user's that does not make what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import api
from autopar.errors import UsageError
from autopar.options import PlanOptions
from autopar.progress import Silent

FUNCTIONS = """
import torch
from torch import nn

def fixed():
    return nn.Linear(8, 8), {"input": torch.zeros(4, 16, 8)}

def alone():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def test_a_length_that_no_input_has_is_refused(functions: Path):
    with pytest.raises(UsageError, match=r"seq=4 was asked for, and no example input .* \(shapes: \[4, 16, 8\]\)"):
        api.plan_reference(f"{functions}:fixed", "cpu:2", PlanOptions.parse(seq="4"), Silent())


def test_a_length_for_a_model_that_reads_no_sequences_is_refused():
    with pytest.raises(UsageError, match="seq=128 was asked for, and zoo:mlp reads no sequences; leave seq out"):
        api.plan_reference("zoo:mlp", "cpu:2", PlanOptions.parse(batch="4", seq="128"), Silent())


def test_a_model_without_inputs_is_refused(functions: Path):
    with pytest.raises(UsageError, match=r"alone gives a model without example inputs; name a function that returns"):
        api.plan_reference(f"{functions}:alone", "cpu:2", PlanOptions.parse(), Silent())


def test_a_batch_that_the_function_does_not_make_is_refused_with_the_parameter_it_lacks(functions: Path):
    with pytest.raises(
        UsageError, match=r"have a batch of 4, but batch=6 was asked for; give the function a parameter"
    ):
        api.plan_reference(f"{functions}:fixed", "cpu:2", PlanOptions.parse(batch="6"), Silent())
