"""Code that asks whether it is compiled, and values that are known while it is traced: captured as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.program import run

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
X, MASK = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[1.0], [1.0], [0.0]])


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.of = nn.Linear(4, 4), forward

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.of(self.linear(x), mask)


def compiling() -> bool:
    return torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def differs(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.sum() * (3.0 if compiling() else 1.0)


def reads_the_mask(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if not compiling() and bool(mask.all()):
        return h.sum()
    return (h * mask).sum()


def asks_twice(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h = h if compiling() else h * 2.0
    return reads_the_mask(h, mask)


def needs_to_be_told_not_to(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = None if compiling() else torch.ones(3, 1)  # type: ignore[assignment]
    return reads_the_mask(h * made.to(h.dtype), mask)


def branch(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    at = torch.arange(4)[None]
    if (at.diff() != 1).any():
        return h.mean()
    return h.sum() if at.max() == 3 else h.square().sum()


def of_many_tokens(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    at = torch.arange(4096).expand(8192, 4096)  # a batch as models of hundreds of devices have it
    return h.mean() if (at.diff() != 1).any() else h.sum()


def number(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([1, 3])
    first, second = torch.split(h, sizes.tolist(), dim=1)
    scale = float(sizes.sum()) + int(sizes[1]) + sizes.max().item() + [5.0, 6.0][sizes[0]]
    return torch.sub(first.sum(), second.sum()) * scale


def written(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(4)
    part = seen[1:]
    part += 1.0
    seen[0] = 2.0
    return h.sum() if bool(seen.bool().all()) else h.mean()


SAME: list[Forward] = [
    differs,
    reads_the_mask,
    asks_twice,
    needs_to_be_told_not_to,
    branch,
    of_many_tokens,
    number,
    written,
]


@pytest.mark.parametrize("forward", SAME, ids=lambda each: each.__name__)
def test_the_program_computes_what_one_device_does(forward: Forward) -> None:
    model = Net(forward)
    wanted = model(X, MASK)
    wanted.backward()

    ran = run(capture(model, (X, MASK)), model, (X, MASK))

    torch.testing.assert_close(ran.result, wanted)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ran.gradients[name], parameter.grad)


def test_no_graph_of_cuda_is_being_captured() -> None:
    def forward(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return h.mean() if torch.cuda.is_current_stream_capturing() else h.sum()

    captured = capture(Net(forward), (X, MASK))

    assert not [op for op in captured.graph.ops if "mean" in op.target]


def of_the_input(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(3, 1)
    seen += mask
    return h.sum() if seen.all() else h.mean()


def drawn(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.sum() if torch.rand(1) > 0.5 else h.mean()


def unwritten(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.sum() if torch.empty(1) > 0.5 else h.mean()


@pytest.mark.parametrize("forward", [of_the_input, drawn, unwritten], ids=lambda each: each.__name__)
def test_values_of_data_and_of_chance_are_none_that_are_known(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="control flow depends on tensor values"):
        capture(Net(forward), (X, MASK))


class _Cast(nn.Module):
    """Casts a part of itself in forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(self.dtype)
        return torch.sum(self.linear(x))


def test_a_cast_of_a_module_that_changes_nothing_is_none() -> None:
    captured = capture(_Cast(torch.float32), (X,))

    assert not [op for op in captured.graph.ops if "_to_copy" in op.target]


def test_a_cast_of_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_told.py:\d+"):
        capture(_Cast(torch.float64), (X.double(),))


class _Table(nn.Module):
    """Makes its table of positions when it first sees inputs, as ConViT does."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1]) / x.shape[1]
        return torch.sum(self.linear(x) * self.table)


def test_a_buffer_of_another_size_is_told_with_the_call_that_makes_it() -> None:
    model = _Table()

    with pytest.raises(CaptureError, match=r"buffer 'table' of shape \[1\] becomes \[4\]") as raised:
        capture(model, (X,))
    assert "run the model once on these inputs before it is compiled" in str(raised.value)

    model(X)
    capture(model, (X,))
