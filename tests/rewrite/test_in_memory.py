"""Kernels that read memory as it lies get their inputs as eager operators would give them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import fx

from autopar.own_operators import CROSS_ENTROPY_BACKWARD
from autopar.rewrite.in_memory import _WISHES
from autopar.rewrite.marks import Mark
from autopar.rewrite.random_ops import step_seed
from autopar.rewrite.shapes import propagate
from autopar.strategies.call import overload
from tests.strategies.calls import all_calls
from tests.strategies.one_op import Case

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
    kernel, sizes = torch.randn(4, 6, 3).double(), torch.randn(4, 1, 1).double()
    made, norms = aten._weight_norm_interface(kernel, sizes)
    scores, classes = torch.randn(3, 5, 4, 6).double().log_softmax(1), torch.randint(5, (3, 4, 6))
    loss = (scores, classes, None, 1, -100, torch.tensor(72.0).double())
    calls = (
        (aten._weight_norm_interface.default, (kernel, sizes)),
        (aten._weight_norm_interface_backward.default, (torch.randn_like(made), kernel, sizes, norms, 0)),
        (aten.nll_loss2d_backward.default, (torch.tensor(1.0).double(), *loss)),
        (CROSS_ENTROPY_BACKWARD, (torch.tensor(1.0).double(), *loss)),
        (aten.view_as_complex.default, (torch.randn(3, 4, 2).double(),)),
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


_SETTLED_ELSEWHERE = {
    "aten.view.default", "aten._unsafe_view.default",  # `rewrite.operators` makes them reshapes
    "aten._reshape_alias.default",  # is told strides
    "aten._grouped_mm.default", "aten.view_as_complex_copy.default",  # refuse, in so many words
    "aten._linalg_det.default",  # factors the transposed matrix, as its own backward does
}  # fmt: skip


def test_every_other_kernel_looks_at_strides():
    blind = set()
    for case in all_calls():
        target = overload(case.target)
        if case.shapes_only or torch.Tag.pointwise in target.tags or target in _WISHES:
            continue
        for place, arg in enumerate(case.args):
            if isinstance(arg, torch.Tensor) and arg.dim() > 1:
                given = (*case.args[:place], _turned(arg), *case.args[place + 1 :])
                if not _gives(case, given):
                    blind.add(case.target)

    assert blind <= _SETTLED_ELSEWHERE


def _gives(case: Case, args: tuple[Any, ...]) -> bool:
    """Return whether an operator makes of other arguments what it makes of its own."""
    try:
        with step_seed(0), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*non-contiguous")  # of searchsorted: it copies
            made = overload(case.target)(*args, **case.kwargs)
    except RuntimeError:
        return False
    got = made if isinstance(made, tuple | list) else (made,)
    pairs = [(a, b) for a, b in zip(got, case.whole, strict=True) if b is not None]
    return all(torch.allclose(a, b, **_tolerance(b.dtype), equal_nan=True) for a, b in pairs)


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return how far sums of the same numbers in another order are apart."""
    return {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-8}


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
