"""Kernels that read memory as it lies get their inputs as eager operators would give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.rewrite.in_memory import _WISHES
from autopar.rewrite.marks import Mark
from autopar.rewrite.shapes import propagate

aten = torch.ops.aten
_ALL = [True, True, True]


def _calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return one call of each operator of the table, by name."""
    torch.manual_seed(0)
    image, gradient = torch.randn(3, 8, 4, 6).double(), torch.randn(3, 8, 4, 6).double()
    weight, width = torch.randn(8).double(), torch.randn(6).double()
    _, mean, scale = aten.native_group_norm(image, weight, weight, 3, 8, 24, 2, 1e-5)
    _, means, scales = aten.native_layer_norm(image, [6], width, width, 1e-5)
    heads = [torch.randn(2, 3, 6, 8).double() for _ in range(4)]
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(*heads[:3], 0.0, True)
    _, places = aten.fractional_max_pool2d(image, [2, 2], [2, 3], torch.rand(3, 8, 2).double())
    calls = (
        (aten.native_group_norm.default, (image, weight, weight, 3, 8, 24, 2, 1e-5)),
        (aten.native_group_norm_backward.default, (gradient, image, mean, scale, weight, 3, 8, 24, 2, _ALL)),
        (aten.native_layer_norm_backward.default, (gradient, image, [6], means, scales, width, width, _ALL)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (*heads[:3], 0.0, True)),
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            (heads[3], *heads[:3], out, sums, 0.0, True),
        ),
        (aten._pdist_forward.default, (torch.randn(5, 4).double(), 2.0)),
        (
            aten.fractional_max_pool2d_backward.default,
            (torch.randn(3, 8, 2, 3).double(), image, [2, 2], [2, 3], places),
        ),
    )
    return {target._schema.name: (target, args) for target, args in calls}


def _program(target: Any, args: tuple[Any, ...]) -> fx.GraphModule:
    """Return the program of one operator whose tensors are placeholders that lie in memory as `args` do."""
    graph = fx.Graph()
    given: list[Any] = []
    for place, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            node = graph.placeholder(f"given_{place}")
            node.meta = {"val": arg, "autopar": Mark(node.name, "forward")}
            given.append(node)
        else:
            given.append(arg)
    made = graph.call_function(target, tuple(given))
    made.meta["autopar"] = Mark("made", "forward")
    graph.output(made)
    gm = fx.GraphModule({}, graph)
    propagate(gm, {}, by="test")
    gm.recompile()
    return gm


def _turned(value: torch.Tensor) -> torch.Tensor:
    """Return equal values whose dimensions lie in memory in the opposite order."""
    dims = tuple(reversed(range(value.dim())))
    return value.permute(dims).contiguous().permute(dims)


CASES = [
    pytest.param(name, place, id=f"{name}: {place}")
    for name, (target, args) in _calls().items()
    for place in _WISHES[target]
    if args[place].dim() > 1
]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_kernel_that_looks_at_no_strides_gives_the_same_for_inputs_that_lie_otherwise(name: str, place: int):
    target, args = _calls()[name]
    turned = (*args[:place], _turned(args[place]), *args[place + 1 :])

    gm = _program(target, turned)

    tensors = [each for each in turned if isinstance(each, torch.Tensor)]
    torch.testing.assert_close(gm(*tensors), target(*args), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", _calls())
def test_inputs_that_lie_as_eager_gives_them_are_not_copied(name: str):
    gm = _program(*_calls()[name])

    assert not gm.graph.find_nodes(op="call_function", target=aten.clone.default)


def test_pictures_whose_channels_lie_together_stay_so():
    target, args = _calls()["aten::native_group_norm_backward"]
    last = args[1].to(memory_format=torch.channels_last)

    gm = _program(target, (args[0], last, *args[2:]))

    (copy,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copy.args[0].name == "given_0"
    assert copy.kwargs == {"memory_format": torch.channels_last}
