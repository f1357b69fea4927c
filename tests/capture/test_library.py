"""Parts of torch's library that look at values when they are called, and are captured without looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.program import run

X, PLACES = torch.rand(4, 4), torch.tensor([1, 3, 0, 2])
SQUARE = 4 * torch.eye(4)
TARGETS = torch.tensor([[1, 2, 3], [2, 1, 0]])
LABELS = torch.tensor([[1, 3, -1, 0], [0, -1, 2, 2], [3, 2, 1, 0], [-1, 1, 2, 3]])  # those behind -1 do not count


def aligned(lengths: Any, inputs: Any, **options: Any) -> Callable[..., torch.Tensor]:
    """Return a loss of two alignments of four steps with padded targets."""
    return lambda h: functional.ctc_loss(
        torch.stack([h, h.sin()], 1).log_softmax(-1), TARGETS, inputs, lengths, **options
    ).sum()


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one-hot classes": lambda h: (functional.one_hot(PLACES, 4) * h).sum(),
    "likelihood": lambda h: -distributions.Normal(h, h.exp()).log_prob(X).mean(),
    "categories": lambda h: distributions.Categorical(logits=h).log_prob(PLACES).mean(),
    "divergence": lambda h: distributions.kl_divergence(
        distributions.Normal(h, h.exp()), distributions.Normal(torch.zeros(4), torch.ones(4))
    ).mean(),
    "variances": lambda h: functional.gaussian_nll_loss(h, X, h.exp(), full=True),
    "one variance a row": lambda h: functional.gaussian_nll_loss(h, X, h[:, 0].exp(), reduction="sum"),
    "one variance": lambda h: functional.gaussian_nll_loss(h, X, 0.5),
    "inverse": lambda h: torch.linalg.inv(SQUARE + h).sum(),
    "solution": lambda h: torch.linalg.solve(SQUARE + h, X).sum(),
    "alignment": aligned(torch.tensor([1, 2]), torch.tensor([4, 3])),
    "alignment of the longest": aligned([3, 2], [4, 4], reduction="sum", blank=0),
    "impossible alignment": aligned(torch.tensor([1, 2]), torch.tensor([3, 1]), zero_infinity=True, reduction="none"),
    "loads": lambda h: (h.softmax(-1).mean(0) * torch.bincount(PLACES, minlength=4)).sum(),
    "loads of a method": lambda h: (h.mean(0) * PLACES.bincount(minlength=6)[:4]).sum(),
    "weighed loads": lambda h: (h.mean(0) * torch.bincount(PLACES, X[0], 4)).sum(),
    "kind": lambda h: h.sum() if torch.jit.isinstance(h, torch.Tensor) else h.mean(),
    "margins of labels": lambda h: functional.multilabel_margin_loss(h, LABELS),
    "margins of labels of a sample": lambda h: functional.multilabel_margin_loss(h[0], LABELS[0], reduction="sum"),
    "pairs": lambda h: h[:, torch.combinations(torch.arange(4))].prod(-1).sin().sum(),
    "triples of values": lambda h: (torch.combinations(h[0], 3, True) * torch.arange(3)).cos().prod(1).sum(),
    "factor": lambda h: torch.linalg.cholesky(SQUARE + h @ h.mT).sum(),
}


class Net(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_program_computes_what_eager_does(loss: Callable[[torch.Tensor], torch.Tensor]):
    model = Net(loss)
    wanted = model(X)
    wanted.backward()

    captured = capture(model, (X,))
    found = run(captured, model, (X,))

    torch.testing.assert_close(found.result, wanted)
    torch.testing.assert_close(found.gradients, {name: each.grad for name, each in model.named_parameters()})
    assert not [op.target for op in captured.graph.ops if "assert" in op.target or "check" in op.target]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_masks_of_torchs_transformers_are_taken_as_they_are(kind: str):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = getattr(nn, f"Transformer{kind.title()}Layer")(8, 2, 16, dropout=0.0, batch_first=True)
            self.body = getattr(nn, f"Transformer{kind.title()}")(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.full((5, 5), float("-inf")).triu(1)
            made = self.body(x, mask) if kind == "encoder" else self.body(x, x, tgt_mask=mask)
            return made.square().mean()

    model, x = Masked(), torch.randn(3, 5, 8)
    wanted = model(x)
    wanted.backward()

    found = run(capture(model, (x,)), model, (x,))

    torch.testing.assert_close(found.result, wanted)
    torch.testing.assert_close(found.gradients, {name: each.grad for name, each in model.named_parameters()})


def test_checks_are_made_again_after_the_capture(monkeypatch: pytest.MonkeyPatch):
    # torch.compile, in another test of this process, turns them off for good.
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    capture(Net(LOSSES["likelihood"]), (X,))

    with pytest.raises(ValueError, match="to satisfy the constraint"):
        distributions.Normal(X, -X)
    with pytest.raises(ValueError, match="negative"):
        functional.gaussian_nll_loss(X, X, -X)


def test_a_value_beyond_the_stated_number_of_counts_fails():
    model = Net(lambda h: (h.mean(0)[:3] * torch.bincount(PLACES, minlength=3)).sum())

    with pytest.raises(RuntimeError, match="out of bounds"):
        run(capture(model, (X,)), model, (X,))


def test_an_operator_with_branches_of_its_own_is_named_with_the_way_out():
    def loss(h: torch.Tensor) -> torch.Tensor:
        return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)).sum()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="(?s)it calls the higher-order operator cond.*choose with torch.where"):
        capture(Net(loss), (X,))
