"""Writes to the places that a mask tells: chosen at every place, with eager's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.program import run

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Writes(nn.Module):
    """Features [3, 4, 6] of a linear layer, some replaced; the learned vector has 6 values."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.token = nn.Parameter(torch.linspace(-1, 1, 6))
        self.write = write

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.write(self.up(x), mask, self.token).square().mean()


def _set(index: Callable[[torch.Tensor], object], value: Callable[[torch.Tensor], object]) -> Write:
    def write(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        h[index(mask)] = value(token)  # type: ignore[index,assignment]
        return h

    return write


WRITES: dict[str, Write] = {
    "places found first": _set(lambda m: torch.where(m), lambda _: 0.5),
    "places as a tuple": _set(lambda m: m.nonzero(as_tuple=True), lambda token: token),
    "number": _set(lambda m: m, lambda _: 0.5),
    "vector": _set(lambda m: m, lambda t: t),
    "row": _set(lambda m: m, lambda t: t[None]),
    "element": _set(lambda m: m, lambda t: t[0]),
    "all dims": _set(lambda m: m[..., None].expand(3, 4, 6), lambda t: t[0]),
    "whole dims before": _set(lambda m: (slice(None), m[0]), lambda t: t),
    "values of dims before": _set(lambda m: (slice(None), m[0]), lambda t: t[:3, None, None] * t),
    "whole dims behind": _set(lambda m: (m[:, 0], ...), lambda t: t),
    "values of dims behind": _set(lambda m: (m[:, 0],), lambda t: t[:4, None] * t),
    "index_put": lambda h, mask, token: h.index_put((mask,), token),
    "torch.index_put": lambda h, mask, token: torch.index_put(h, (mask,), token),
    "index_put_": lambda h, mask, token: h.index_put_((mask,), token),
}


def test_places_of_a_mask_that_changes_before_they_are_used_stay_what_they_were():
    def write(h: torch.Tensor, mask: torch.Tensor, _token: torch.Tensor) -> torch.Tensor:
        mask = mask.clone()
        places = torch.where(mask)
        mask[:] = False
        h[places] = 0.5
        return h

    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(Writes(write), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5))


@pytest.mark.parametrize("name", WRITES)
def test_write_by_a_mask_is_a_choice_with_eagers_values_and_gradients(name: str):
    model, inputs = Writes(WRITES[name]), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5)

    captured = capture(model, inputs)
    found = run(captured, model, inputs)
    loss = model(*inputs)
    loss.backward()

    called = {op.target for op in captured.graph.ops}
    assert not called & {"aten.index_put.default", "aten.nonzero.default"}
    assert called & {"aten.where.self", "aten.masked_fill.Scalar"}
    torch.testing.assert_close(found.result, loss)
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found.gradients[path], parameter.grad)


def _scaled(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h[mask] = h[mask] * token + 1
    return h


def _of_another(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    other = h * 2 + token
    h[mask] += other[mask]
    return h


def _outside(h: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    h[~mask] *= 0.5
    return h


def _log_of_positive(h: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    h = torch.where(mask[..., None], h.abs() + 1, 0.0)
    h[mask] = h[mask].log()
    return h


def _infinite_elsewhere(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    h = torch.where(mask[..., None], h, float("inf"))
    h[mask] = torch.tanh(h[mask]) - token
    return torch.where(mask[..., None], h, 0.0)


def _every_element(h: torch.Tensor, mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    where = mask[..., None].expand(3, 4, 6)
    h[where] /= 3
    h[where] -= token[0]
    return h


@pytest.mark.parametrize(
    "write", [_scaled, _of_another, _outside, _log_of_positive, _infinite_elsewhere, _every_element]
)
def test_what_a_mask_reads_and_writes_is_computed_with_eagers_values_and_gradients(write: Write):
    model, inputs = Writes(write), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5)

    found = run(capture(model, inputs), model, inputs)
    loss = model(*inputs)
    loss.backward()

    torch.testing.assert_close(found.result, loss)
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found.gradients[path], parameter.grad)


def _of_zeros_elsewhere(h: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    h[mask] = (h[mask] - 1).square().log()
    return h


def _changed_meanwhile(h: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    read = h[mask]
    h.mul_(2)
    h[mask] = read + 1
    return h


def _in_order(h: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    h[mask] = h[mask].cumsum(0)
    return h


@pytest.mark.parametrize("write", [_of_zeros_elsewhere, _changed_meanwhile, _in_order])
def test_what_would_differ_at_every_place_is_refused(write: Write):
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(Writes(write), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5))


def test_number_that_integers_cut_off_is_written_as_before():
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            counts = torch.ones(3, 4, dtype=torch.long)
            counts[mask] = 2.7
            return (super().forward(x).sum(-1) * counts).sum()

    model, inputs = Counts(5, 6), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5)

    found = run(capture(model, inputs), model, inputs)

    torch.testing.assert_close(found.result, model(*inputs))


@pytest.mark.parametrize("kind", ["as many values as places", "beside another index"])
def test_trained_values_that_places_are_counted_for_are_refused_with_the_line(kind: str):
    class Counted(Writes):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            if kind == "beside another index":
                h[mask, 0] = self.token[0]
            else:
                h[mask] = self.token.expand(12, 6)
            return h.sum()

    with pytest.raises(CaptureError) as caught:
        capture(Counted(WRITES["vector"]), (torch.randn(3, 4, 5), torch.ones(3, 4, dtype=torch.bool)))

    text = str(caught.value)
    assert "the result of indexing by a mask is data-dependent" in text
    assert "at tests/capture/test_masked.py:" in text
    assert "a mask instead of nonzero() or boolean indexing" in text
