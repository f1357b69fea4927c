"""What a user reads when a model or its example inputs cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError, UsageError

X = torch.randn(4, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Branches(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # here
            return self.linear(x)
        return x


class Items(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * torch.ones(int(x.sum().item()))  # here


class Selects(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x > 0].sum()  # here


class Routes(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (rows,) = torch.where(x.argmax(-1) == 1)  # here
        return torch.zeros_like(x).index_add(0, rows, self.linear(x[rows])).sum()


class Averages(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()  # here


class Breaks(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # here
        return self.linear(x)


class Mismatches(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ x[:2])  # here


class Bytes(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(4).to(torch.uint8)
        return nn.functional.cross_entropy(self.linear(x), labels)  # here


class Raises(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such batch")  # here


class Turns(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        x.requires_grad = True  # here
        return self.linear(x).sum()


class Cache:
    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept


class Caches(Base):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        y = self.linear(x)
        return y.sum(), Cache(y)


CASES: list[tuple[type[nn.Module], tuple[str, ...]]] = [
    (Branches, ("its control flow depends on tensor values", "choose with torch.where")),
    (Items, ("a shape or Python number depends on tensor values", "no .item()")),
    (Selects, ("how many rows a mask selects depends on tensor values", "let the mask weigh them")),
    (
        Routes,
        (
            "how many rows a mask selects depends on tensor values",
            "(weight * (index == e)).sum(-1, keepdim=True)",
            "by unsqueeze(-1)",
        ),
    ),
    (Turns, ("its forward turns on the gradient of a tensor", "freeze_feature_encoder()")),
    (Averages, ("one over a count that is a tensor", "make momentum a number")),
    (Breaks, ("it calls something that leaves the graph", "move that call out of forward")),
    (Mismatches, ("its forward raises on inputs of these shapes", "[4, 4] X [2, 4]")),
    (Bytes, ("classes of a loss that are uint8", "y.long()")),
    (Raises, ("its forward raises", "no such batch", "run the model once on these example inputs")),
]


@pytest.mark.parametrize(("model", "parts"), CASES, ids=[each.__name__ for each, _ in CASES])
def test_reason_line_and_way_out_are_shown(model: type[nn.Module], parts: tuple[str, ...]):
    with pytest.raises(CaptureError) as caught:
        capture(model(), (X,))

    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert text.startswith(f"{model.__name__} cannot be captured as one static graph: ")
    if "returning intermediate with requires_grad_()" not in text:  # of torch 2.15, which does not say where it was
        assert f"at tests/capture/test_errors.py:{_line_of(model)}\n" in text
    assert all(part in text for part in parts), text


def test_an_output_of_an_unknown_kind_is_told_from_what_cannot_be_traced():
    with pytest.raises(
        CaptureError, match=r"neither a tensor nor a container(.|\n)*call has use_cache=True: leave that out"
    ):
        capture(Caches(), (X,))


class Clamps(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.linear(x)
        self.linear.weight.data.clamp_(-1, 1)  # here
        return read.sum()


def test_trained_parameter_that_forward_changes_once_it_is_read_is_named_with_its_line():
    with pytest.raises(CaptureError) as caught:
        capture(Clamps(), (X,))

    text = str(caught.value)
    assert "its forward changes the trained parameter linear.weight" in text
    assert f"at tests/capture/test_errors.py:{_line_of(Clamps)}\n" in text
    assert "after optimizer.step()" in text


def _line_of(model: type[nn.Module]) -> int:
    forward: Any = model.forward
    with open(forward.__code__.co_filename) as file:  # noqa: PTH123
        lines = file.read().splitlines()
    first = forward.__code__.co_firstlineno
    return next(i for i in range(first, first + 6) if "# here" in lines[i - 1])


class Plain(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x)


def _parallel() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    return model


MESSAGES: dict[str, tuple[Callable[[], tuple[Any, Any]], type[AutoparError], str]] = {
    "no module": (lambda: ("model", (X,)), UsageError, "the model is of type str, and must be a torch.nn.Module"),
    "no tuple": (lambda: (Plain(), 5), UsageError, "example_inputs are of type int, and must be a tuple"),
    "missing": (lambda: (Plain(), {"y": X}), UsageError, "missing a required argument: 'x'"),
    "unexpected": (lambda: (Plain(), {"x": X, "z": 1}), UsageError, "unexpected keyword argument 'z'"),
    "kind": (lambda: (Plain(), (X, [object()])), UsageError, "example input y.0 is of type object"),
    "no tensors": (lambda: (Plain(), (1,)), UsageError, "hold no tensor"),
    "lazy": (lambda: (nn.LazyLinear(3), (X,)), CaptureError, "weight has no shape yet"),
    "sparse": (lambda: (_parallel(), (X,)), CaptureError, "only plain dense tensors"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_wrong_model_or_inputs_are_refused(name: str):
    make, kind, message = MESSAGES[name]
    model, inputs = make()

    with pytest.raises(kind) as caught:
        capture(model, inputs)

    assert message in str(caught.value)


def test_torch_says_nothing_while_it_fails(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(CaptureError):
        capture(Mismatches(), (X,))

    assert not caplog.records
    assert capfd.readouterr() == ("", "")


class Begins(Base):
    """Scales by what its first batch measures, as ActNorm does; keeps a table, too, the same at every call."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        scale, self.begun = torch.ones(4), False
        if trained:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.begun:
            self.table = self.linear.weight.detach().mul(0.0).add(1.0).triu_(1)
            with torch.no_grad():
                self.scale.copy_(x.std(0))  # here
            self.begun = True
        return self.linear(x / self.scale @ self.table).sum()


@pytest.mark.parametrize("trained", [True, False])
def test_what_the_first_call_alone_sets_is_set_before(trained: bool):
    model = Begins(trained=trained)
    with pytest.raises(CaptureError, match="sets parameters or buffers at its first call alone") as caught:
        capture(model, (X,))
    assert f"at tests/capture/test_errors.py:{_line_of(Begins)}\n" in str(caught.value)
    assert str(caught.value).count("\n  at ") == 1

    model(X)

    assert not any(each.kind == "mutation" for each in capture(model, (X,)).graph.outputs)


class Table(nn.Module):
    """A table of words whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().mean()  # here


def test_sparse_gradients_of_embeddings_are_named():
    with pytest.raises(
        CaptureError, match=r"(?s)makes a sparse tensor.*test_errors\.py.*nn\.Embedding\(sparse=False\)"
    ):
        capture(Table(), (torch.arange(4),))
