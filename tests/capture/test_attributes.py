"""Python attributes that forward changes: refused where the program depends on them, told where only users do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.program import run

X = torch.randn(4, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step, self.flip, self.history = 0, False, []
        self.mean, self.loss, self.table = torch.zeros(4), None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.linear(x)).square().mean()

    def change(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _model(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    kind: Any = type(change.__name__, (Base,), {"change": change})
    made: nn.Module = kind()
    return made


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return x * self.step


def alternates(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.flip = not self.flip
    return x.flip(0) if self.flip else x


def averages(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return x - self.mean


def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.history.append(1.0)
    return x * len(self.history)


def counts_below(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.linear.calls = getattr(self.linear, "calls", 0) + 1
    return x / self.linear.calls


@pytest.mark.parametrize(
    ("change", "path"),
    [(counts, "step"), (alternates, "flip"), (averages, "mean"), (grows, "history"), (counts_below, "linear.calls")],
)
def test_what_forward_computes_with_and_changes_is_refused_by_name(change: Any, path: str):
    model = _model(change)
    with pytest.raises(
        CaptureError, match=f"computes with the attribute {path}, and changes it at every call"
    ) as error:
        capture(model, (X,))
    assert "register_buffer" in str(error.value)
    assert model.step == 0  # capturing changed nothing
    assert model.history == []


def logs(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.history.append(x.detach().mean())
    return x


def tells(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.loss = x.square().mean()
    return x


def counts_idly(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return x


@pytest.mark.parametrize(("change", "path"), [(logs, "history"), (tells, "loss"), (counts_idly, "step")])
def test_what_forward_sets_for_others_is_told_by_name(change: Any, path: str):
    with pytest.warns(UserWarning, match=f"changes the attribute {path} at every call, .* return it from forward"):
        capture(_model(change), (X,))


def keeps_a_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = torch.arange(x.shape[1], dtype=x.dtype)
    return x + self.table


def notes_a_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.input_dtype = x.dtype
    return x.to(self.input_dtype)


def counts_and_forgets(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    x = x * self.step
    self.step = 0
    return x


@pytest.mark.parametrize("change", [keeps_a_table, notes_a_type, counts_and_forgets])
def test_what_forward_keeps_for_itself_is_no_matter(change: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = capture(_model(change), (X,))

    model = _model(change)
    torch.testing.assert_close(run(captured, model, (X,)).result, model(X).detach())


def test_what_the_user_compiled_is_not_run_on_tensors_without_memory():
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, _example: Any) -> Callable[..., Any]:
        ran.append("compiled")
        return graph.forward

    class Compiled(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(torch.tanh, backend=backend)

        def change(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            return self.inner(x)

    with pytest.warns(UserWarning, match="changes the attribute"):
        capture(Compiled(), (X,))

    assert not ran
