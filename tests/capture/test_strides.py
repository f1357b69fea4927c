"""Views by strides: looked up in plain order, the batch apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.program import run

X = torch.randn(24, 32, 4, generator=torch.Generator().manual_seed(0))
Forward = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.of = nn.Linear(4, 4), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self.linear(x))


def windows(h: torch.Tensor) -> torch.Tensor:
    return h.as_strided((24, 7, 8, 4), (128, 16, 4, 1)).sin().square().sum()


def chunks_of_a_transpose(h: torch.Tensor) -> torch.Tensor:
    """What Longformer does: the batch is inside of the tokens in memory."""
    heads = h.transpose(0, 1).contiguous().transpose(0, 1).view(24, 2, 16, 4)
    size, stride = list(heads.size()), list(heads.stride())
    size[1], stride[1] = 3, stride[1] // 2
    return heads.as_strided(size, stride).sin().square().sum()


def diagonal(h: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(h, (24, 4, 4), (128, 5, 4)).sin().sum()


def channels_apart(h: torch.Tensor) -> torch.Tensor:
    return h.permute(2, 0, 1).as_strided((4, 3, 24), (1, 8, 128)).sin().sum()


KEPT = [windows, chunks_of_a_transpose, diagonal, channels_apart]


def across_the_batch(h: torch.Tensor) -> torch.Tensor:
    return h.as_strided((11, 128), (64, 1)).sin().square().sum()


def across_the_batch_of_a_transpose(h: torch.Tensor) -> torch.Tensor:
    return h.transpose(0, 1).as_strided((11, 128), (64, 1)).sin().square().sum()


def written(h: torch.Tensor) -> torch.Tensor:
    copy = h.transpose(0, 1).clone()
    copy.as_strided((24, 4, 4), (128, 5, 4)).mul_(2.0)
    return copy.sin().sum()


@pytest.mark.parametrize(
    "forward", [*KEPT, across_the_batch, across_the_batch_of_a_transpose, written], ids=lambda each: each.__name__
)
def test_the_program_computes_what_one_device_does(forward: Forward) -> None:
    model = Net(forward)
    wanted = model(X)
    wanted.backward()

    ran = run(capture(model, (X,)), model, (X,))

    torch.testing.assert_close(ran.result, wanted)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ran.gradients[name], parameter.grad)


@pytest.mark.parametrize("forward", KEPT, ids=lambda each: each.__name__)
def test_views_that_keep_the_batch_are_no_views_by_strides_of_it(forward: Forward) -> None:
    captured = capture(Net(forward), (X,))

    strided = captured.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    assert {each.args[0].target for each in strided} <= {torch.ops.aten.arange.start, torch.ops.aten.arange.default}


def test_others_start_from_plain_memory() -> None:
    captured = capture(Net(across_the_batch_of_a_transpose), (X,))

    strided = [node for node in captured.joint.graph.nodes if "as_strided" in str(node.target)]
    assert strided
    assert all(node.args[0].meta["val"].is_contiguous() for node in strided)


def test_what_lies_between_the_elements_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)strides \[128, 8, 1\], which has gaps.*test_strides.py:\d+"):
        capture(Net(lambda h: h[:, ::2].as_strided((24, 32), (128, 1)).sum()), (X,))
