"""How results are compared: complex numbers count with both their parts."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.comparing import distance, gradients_apart, joint_norm, relative


def test_complex_values_are_compared_as_pairs():
    wanted = torch.tensor([3 + 4j, 0j])
    found = torch.tensor([3 + 4j, 0.5j])

    assert relative(found, wanted) == pytest.approx(0.1)
    assert joint_norm({"w": wanted}) == pytest.approx(5.0)
    assert gradients_apart({"w": found}, {"w": wanted}) == {"w": pytest.approx(0.1)}


def test_values_that_are_not_finite_have_to_be_so_in_the_same_places():
    wanted = torch.tensor([1.0, float("inf")])

    assert relative(torch.tensor([1.0, float("inf")]), wanted) == 0.0
    assert relative(torch.tensor([1.0, 2.0]), wanted) == float("inf")


def test_infinite_numbers_of_masks_count_where_they_differ_only():
    mask = torch.tensor([3.0, -torch.inf, 4.0])

    assert distance(mask, mask.clone()) == 0.0
    assert distance(mask + torch.tensor([0.0, 0.0, 0.5]), mask) == 0.5
    assert distance(torch.tensor([3.0, 0.0, 4.0]), mask) == float("inf")
    assert joint_norm({"mask": mask}) == 5.0
    assert gradients_apart({"mask": mask + 1}, {"mask": mask}) == {"mask": pytest.approx(2**0.5 / 5)}
