"""Derivatives that forward takes itself: forces of a potential, penalties of gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.program import run


class Potential(nn.Module):
    """A loss of an energy and of its slope along the input."""

    def __init__(self, given: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.up, self.energy = nn.Linear(3, 8), nn.Linear(8, 1)
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.given(x)
        energy = self.energy(torch.tanh(self.up(x)))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + slope.square().mean()


def test_derivative_by_an_input_that_requires_a_gradient_is_part_of_the_program():
    model, x = Potential(), torch.randn(4, 3, requires_grad=True)

    found = run(capture(model, (x,)), model, (x,))
    loss = model(x)
    loss.backward()

    torch.testing.assert_close(found.result, loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)
    torch.testing.assert_close(found.gradients["x"], x.grad)


@pytest.mark.parametrize("how", ["input", "copy"])
def test_gradient_that_forward_turns_on_is_refused_with_the_way_out(how: str):
    turned_on = {"input": lambda x: x.requires_grad_(), "copy": lambda x: x.detach().requires_grad_()}

    with pytest.raises(CaptureError) as caught:
        capture(Potential(turned_on[how]), (torch.randn(4, 3),))

    text = str(caught.value)
    assert "its forward turns on the gradient of a tensor" in text
    assert "give forward that tensor as an input that requires a gradient" in text
