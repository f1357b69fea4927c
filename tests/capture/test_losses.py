"""Cross entropy's backward is one operator, and what it makes is torch's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.costs import workspaces
from autopar.own_operators import CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_BACKWARD_, PART_BYTES
from autopar.runtime.witness import allocated, storage_bytes

ATEN = torch.ops.aten
MERGED = "autopar_ops.cross_entropy_backward.default"


class Classifier(nn.Module):
    """A linear layer and cross entropy; `options` are those of `cross_entropy`."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)
        self.options = options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of [b, 4] features."""
        return functional.cross_entropy(self.head(x), labels, **self.options)


def targets(model: nn.Module) -> list[str]:
    captured = capture(model, (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))
    return [op.target for op in captured.graph.ops]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_two_backwards_of_cross_entropy_become_one(reduction: str):
    found = targets(Classifier(reduction=reduction))

    assert found.count(MERGED) == 1
    assert not {"aten.nll_loss_backward.default", "aten._log_softmax_backward_data.default"} & set(found)


def test_a_smoothed_loss_keeps_both_since_its_gradient_is_not_of_targets_alone():
    found = targets(Classifier(label_smoothing=0.1))

    assert MERGED not in found
    assert "aten._log_softmax_backward_data.default" in found


# Of the two large shapes a part is not the whole: 20 rows of 50257 classes, 3 images of 150.
SHAPES = ((9, 7), (20, 50257), (3, 7, 2, 5), (3, 150, 40, 50))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("into", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_torchs_bit_for_bit(
    weighted: bool, reduction: str, shape: tuple[int, ...], into: bool, dtype: torch.dtype
):
    torch.manual_seed(0)
    logits = torch.randn(shape, dtype=dtype, requires_grad=True)
    labels = torch.randint(shape[1], (shape[0], *shape[2:]))
    labels.view(-1)[::3] = -100
    weight = torch.rand(shape[1], dtype=dtype) if weighted else None
    loss = functional.cross_entropy(logits, labels, weight=weight, reduction=reduction)
    grad = torch.randn_like(loss)
    loss.backward(grad)
    scores = logits.detach().log_softmax(1)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    forward = ATEN.nll_loss2d_forward if len(shape) == 4 else ATEN.nll_loss_forward
    total = forward(scores, labels, weight, number, -100)[1]
    before = scores.clone()

    made = (CROSS_ENTROPY_BACKWARD_ if into else CROSS_ENTROPY_BACKWARD)(
        grad, scores, labels, weight, number, -100, total
    )

    assert torch.equal(made, logits.grad)
    assert (made.data_ptr() == scores.data_ptr()) == into
    assert into or torch.equal(scores, before)


def test_the_cost_model_knows_how_much_is_made_at_a_time():
    assert workspaces.PART_BYTES == PART_BYTES


class Segmentation(nn.Module):
    """Two images, each with more scores than are made at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Conv2d(4, 32, 1)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.classify(image), labels)


def test_a_sample_larger_than_a_part_is_counted_whole():
    image, labels = torch.randn(2, 4, 256, 256), torch.randint(32, (2, 256, 256))
    model = Segmentation()
    plan = autopar.plan(model, "cpu:1", example_inputs=(image, labels), optimizer="none")
    compiled = autopar.compile(model, "cpu:1", example_inputs=(image, labels), plan=plan)
    compiled(image, labels).backward()

    held, _ = allocated(lambda: compiled(image, labels).backward())

    measured = held + storage_bytes([*compiled.parameters(), image, labels])
    predicted = plan.estimates.peak_memory_bytes - plan.estimates.memory.reserved
    assert predicted == pytest.approx(measured, rel=0.02)
