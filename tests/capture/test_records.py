"""Dataclasses and mappings that pytree does not know, as arguments: their tensors are inputs, the rest is baked in."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import ArgumentsDifferError, InputMismatchError, UsageError
from tests.capture.program import run


@dataclasses.dataclass
class Batch:
    """As collate functions give it: fields, one set after `__init__`, one attribute besides, something remembered."""

    x: torch.Tensor
    y: torch.Tensor | None = None
    scale: float = 2.0
    rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.x = self.x + 1.0  # done again, it would be seen in the numbers
        self.rows = self.x.shape[0]
        self.factor = 3.0

    @cached_property
    def twice(self) -> torch.Tensor:
        return self.x * 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    first: Batch
    rest: list[Any]


class Fields(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers return."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair, more: Any = None) -> tuple[torch.Tensor, Batch]:
        batch = pair.first
        h = self.linear(batch.x) * batch.scale * batch.factor + pair.rest[0]
        h = h if batch.y is None else h + batch.y
        h = h if more is None else h * more["weight"]
        return h.square().sum() / batch.rows, dataclasses.replace(batch, x=h)


def pair(**fields: Any) -> Pair:
    torch.manual_seed(1)
    return Pair(Batch(torch.randn(3, 4), **fields), [torch.randn(4)])


WEIGHT = torch.tensor([[1.0], [2.0], [3.0]])


@pytest.mark.parametrize(
    "inputs",
    [(pair(),), (pair(y=WEIGHT), Fields(weight=WEIGHT)), (pair(scale=0.5), {"weight": WEIGHT})],
    ids=["fields", "mapping", "dict"],
)
def test_loss_gradients_and_result_are_those_of_eager(inputs: tuple[Any, ...]) -> None:
    model, eager = Net(), Net()
    ran = run(capture(model, inputs), model, inputs)
    loss, made = ran.result
    wanted_loss, wanted = eager(*inputs)
    wanted_loss.backward()
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    assert type(made) is Batch
    assert vars(made).keys() == vars(wanted).keys()
    torch.testing.assert_close(made.x, wanted.x)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(ran.gradients[name], parameter.grad)


def test_paths_name_fields() -> None:
    call = capture(Net(), (pair(y=WEIGHT),)).call
    assert [each.path for each in call.tensors] == ["pair.first.x", "pair.first.y", "pair.rest.0"]


def test_what_a_property_remembers_is_no_argument() -> None:
    inputs = pair()
    call = capture(Net(), (inputs,)).call
    assert inputs.first.twice is inputs.first.twice
    assert len(call.flatten((inputs,), {})) == 2


def test_other_values_and_types_are_told() -> None:
    call = capture(Net(), (pair(),)).call
    with pytest.raises(
        InputMismatchError, match=r"argument pair\.first\.scale is 0\.5, and the plan was made for 2\.0"
    ):
        call.flatten((pair(scale=0.5),), {})
    with pytest.raises(ArgumentsDifferError, match=r"differ in structure .* it lacks pair\.first"):
        call.flatten(({"first": 1, "rest": []},), {})
    with pytest.raises(UsageError, match=r"example input pair\.rest\.0 is of type object"):
        capture(Net(), (Pair(pair().first, [object()]),))
