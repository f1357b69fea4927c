"""What users hang on a model before it is compiled: hooks, and a `forward` of the instance's own."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError
from tests.support.ranks import RankPool
from tests.support.training import whole


class Pair(nn.Module):
    """Two layers and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.second(self.first(x).tanh()).square().mean()


def _doubled_result(model: nn.Module) -> None:
    model.register_forward_hook(lambda _module, _args, out: out * 2)


def _doubled_argument(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


def _doubled_gradient(model: nn.Module) -> None:
    model.first.weight.register_hook(lambda grad: grad * 2)


def _halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def _halved_when_summed(model: nn.Module) -> None:
    model.second.weight.register_post_accumulate_grad_hook(_halve)


def _own_forward(model: nn.Module) -> None:
    model.forward = types.MethodType(lambda self, x: self.second(self.first(x)).abs().mean(), model)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    each.__name__: each
    for each in (_doubled_result, _doubled_argument, _doubled_gradient, _halved_when_summed, _own_forward)
}


def step(_rank: int, change: str, fix: dict[str, Any], lazy: bool) -> list[float]:
    """Return the error of the loss and of each gradient after one step of a changed model."""
    both = []
    for _ in range(2):
        torch.manual_seed(3)
        model = Pair()
        CHANGES[change](model)
        both.append(model)
    reference, original = both
    x = torch.randn(8, 4)
    mine = autopar.compile(original, "cpu:2", example_inputs=None if lazy else (x,), fix=fix)
    wanted, loss = reference(x), mine(x)
    wanted.backward()
    loss.backward()
    assert all(each.grad is None for each in original.parameters())
    held = dict(mine.named_parameters())
    errors = [(loss - wanted).abs().item()]
    for name, parameter in reference.named_parameters():
        if name in held:
            errors.append((whole(held[name].grad) - parameter.grad).norm().item() / parameter.grad.norm().item())
    return errors


@pytest.mark.parametrize("lazy", [False, True], ids=["planned", "lazy"])
@pytest.mark.parametrize("fix", [{"dp_shard": 2}, {"dp_replicate": 2, "microbatch": 2}], ids=str)
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_hooks_and_own_forward_act_once(pool: RankPool, change: str, fix: dict[str, Any], lazy: bool):
    for errors in pool.values(step, change, fix, lazy):
        assert max(errors) < 1e-5


def test_hooks_of_the_compiled_model_are_its_own():
    model, seen = Pair(), []
    mine = autopar.compile(model, "cpu:1", example_inputs=(torch.randn(8, 4),))
    mine.register_forward_hook(lambda _module, _args, out: seen.append(out.item()))
    x = torch.randn(8, 4)
    model(x)
    assert seen == []
    loss = mine(x)
    assert seen == [loss.item()]


def test_a_handle_of_a_parameters_hook_removes_it_from_the_compiled_model(pool: RankPool):
    assert all(pool.values(_gradients_after_removal))


def _gradients_after_removal(_rank: int) -> bool:
    torch.manual_seed(3)
    model, x = Pair(), torch.randn(8, 4)
    handle = model.first.weight.register_hook(lambda grad: grad * 2)
    mine = autopar.compile(model, "cpu:2", example_inputs=(x,), fix={"dp_shard": 2})
    found = []
    for _ in range(2):
        mine.zero_grad()
        mine(x).backward()
        found.append(whole(mine.first.weight.grad))
        handle.remove()
    return torch.equal(found[0], 2 * found[1])


def test_a_forward_that_reads_another_models_parameters_is_refused():
    model, other = Pair(), Pair()
    model.forward = lambda x: other(x) * 2
    with pytest.raises(CaptureError, match=r"(?s)requires a gradient and is none of its parameters.*MethodType"):
        autopar.compile(model, "cpu:1", example_inputs=(torch.randn(8, 4),))


class Listed(nn.Module):
    """Holds parameters where torch does not see them."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.held = {
            "list": lambda: [nn.Parameter(torch.randn(4, 4))],
            "dict": lambda: {"up": [nn.Parameter(torch.randn(4, 4))]},
            "modules": lambda: [nn.Linear(4, 4, bias=False)],
        }[held]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.held["up"] if isinstance(self.held, dict) else self.held
        for each in held:
            x = each(x) if isinstance(each, nn.Module) else x @ each
        return self.head(x).mean()


@pytest.mark.parametrize(
    ("held", "name"), [("list", "held[0]"), ("dict", "held['up'][0]"), ("modules", "held[0].weight")]
)
def test_parameters_in_plain_lists_are_refused_by_the_name_they_have_there(held: str, name: str):
    with pytest.raises(CaptureError) as caught:
        autopar.compile(Listed(held), "cpu:1", example_inputs=(torch.randn(8, 4),))

    assert str(caught.value).startswith(f"Listed reads {name!r} of shape [4, 4], which requires a gradient")
    assert "ParameterList, ModuleList" in str(caught.value)


def test_a_forward_of_the_instances_own_that_wraps_the_classs_is_the_models():
    model, x = Pair(), torch.randn(8, 4)
    original = model.forward
    model.forward = lambda x: original(x) * 2
    expected = model(x)
    expected.backward()
    gradient = model.first.weight.grad.clone()
    model.zero_grad()

    mine = autopar.compile(model, "cpu:1", example_inputs=(x,))
    loss = mine(x)
    loss.backward()

    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(whole(mine.first.weight.grad), gradient)


def test_a_plain_attribute_that_requires_a_gradient_is_refused_by_name():
    class Scaled(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(4, requires_grad=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    with pytest.raises(CaptureError, match=r"reads 'scale' of shape \[4\], which requires a gradient"):
        autopar.compile(Scaled(), "cpu:1", example_inputs=(torch.randn(8, 4),))
