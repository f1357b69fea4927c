"""Scans over a sequence: one operator, with the numbers of the function that the model calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from autopar.capture import capture
from autopar.capture.scans import _dtype, scans_as_operators
from autopar.ir.graph import Graph
from autopar.ir.repetition import Repetition
from autopar.ir.scan import ScanCall
from autopar.models.layer_work import layer_work
from autopar.own_scans import SCAN, _PicksOnce
from tests.capture.program import run
from tests.support import scans

MAMBA = modeling_mamba.mamba_selective_scan.__module__


class Delta(nn.Module):
    """A layer that calls a gated delta rule, two heads of values for each of keys."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.chosen, self.settings = function, settings
        self.made = nn.Linear(8, 2 * 4 * 2 + 4 * 6 + 4 + 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.made(x).split([8, 8, 24, 4, 4], dim=-1)
        heads = [each.unflatten(-1, (count, -1)) for each, count in ((q, 2), (k, 2), (v, 4))]
        out, _ = self.chosen(*heads, g=-g.exp(), beta=beta.sigmoid(), **self.settings)
        return out.square().mean()


class Kimi(nn.Module):
    """A layer that calls the delta rule of Kimi Linear."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.chosen, self.settings = function, settings
        self.made = nn.Linear(8, 8 + 8 + 12 + 8 + 2)

    def forward(self, x: Tensor) -> Tensor:
        *heads, g, beta = self.made(x).split([8, 8, 12, 8, 2], dim=-1)
        read = (*(each.unflatten(-1, (2, -1)) for each in heads), -g.unflatten(-1, (2, -1)).exp(), beta.sigmoid())
        out: Tensor = self.chosen(*read, **self.settings)[0]
        return out.square().mean()


class Convolved(nn.Module):
    """A layer that calls a causal convolution."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.chosen = function
        self.weight, self.bias = nn.Parameter(torch.rand(8, 4)), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.chosen(x.transpose(1, 2), self.weight, self.bias, activation="silu")
        return out.square().mean()


class Selective(nn.Module):
    """A layer that calls a selective scan."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.chosen, self.settings = function, settings
        self.made = nn.Linear(8, 6 + 6 + 4 + 4 + 6)
        self.A = nn.Parameter(torch.rand(6, 4))
        self.D = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        u, delta, b, c, z = self.made(x).transpose(1, 2).split([6, 6, 4, 4, 6], dim=1)
        out = self.chosen(u, delta, -self.A, b, c, D=self.D, z=z, delta_softplus=True, **self.settings)
        return (out[0] + out[1].sum() if isinstance(out, tuple) else out).square().mean()


class Chunked(nn.Module):
    """A layer that calls the scan of Mamba 2, two heads for each group."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.chosen, self.settings = function, settings
        self.made = nn.Linear(8, 4 * 3 + 4 + 2 * 5 + 2 * 5)
        self.A = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        x, dt, b, c = self.made(x).split([12, 4, 10, 10], dim=-1)
        read = (x.unflatten(-1, (4, 3)), dt, -self.A, b.unflatten(-1, (2, 5)), c.unflatten(-1, (2, 5)))
        out: Tensor = self.chosen(*read, chunk_size=4, dt_softplus=True, **self.settings)
        return out.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gated delta rule of transformers": lambda: Delta(modeling_qwen3_next.torch_chunk_gated_delta_rule),
    "gated delta rule, normalised": lambda: Delta(
        modeling_qwen3_next.torch_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True
    ),
    "gated delta rule of another library": lambda: Delta(scans.chunk_gated_delta_rule, scale=0.5),
    "delta rule of kimi, transformers": lambda: Kimi(modeling_kimi_linear.chunk_kimi_delta_attention),
    "delta rule of kimi, another library": lambda: Kimi(scans.chunk_kda, scale=0.5),
    "convolution of transformers": lambda: Convolved(modeling_mamba.causal_conv1d_fn),
    "selective scan of transformers": lambda: Selective(modeling_mamba.mamba_selective_scan),
    "selective scan of another library": lambda: Selective(scans.selective_scan_fn),
    "chunk scan of transformers": lambda: Chunked(modeling_mamba2.mamba2_chunk_scan),
    "chunk scan of another library": lambda: Chunked(scans.mamba_chunk_scan_combined, dt_limit=(0.1, 1.0)),
}


def scanned(graph: Graph) -> list[str]:
    """Return the scans of a program, forward and backward."""
    return [op.target.split(".")[1] for op in graph.ops if op.target.startswith("autopar_ops.scan")]


def agree(model: nn.Module, x: Tensor) -> Graph:
    """Hold a captured model's loss and gradients against its own; return the program."""
    captured = capture(model, (x,))
    found = run(captured, model, (x,))
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(found.result, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)
    return captured.graph


@pytest.mark.parametrize("name", MODELS)
def test_is_one_operator_with_the_functions_numbers(name: str) -> None:
    torch.manual_seed(0)
    assert scanned(agree(MODELS[name](), torch.randn(3, 7, 8))) == ["scan", "scan_backward"]


@pytest.mark.parametrize("name", MODELS)
def test_a_long_sequence_has_as_many_operators_as_a_short_one(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
        short, long = (capture(model, (torch.empty(2, steps, 8),)).graph for steps in (3, 5000))
    assert len(short.ops) == len(long.ops)


def test_functions_that_a_module_of_python_holds_are_found_and_given_back() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Selective(lambda *args, **kwargs: modeling_mamba.mamba_selective_scan(*args, **kwargs))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    before = modeling_mamba.mamba_selective_scan
    model = Calls()
    assert scanned(capture(model, (torch.randn(2, 5, 8),)).graph) == ["scan", "scan_backward"]
    assert modeling_mamba.mamba_selective_scan is before


def test_a_call_that_asks_for_the_last_state_is_unrolled() -> None:
    assert scanned(agree(Selective(scans.selective_scan_fn, return_last_state=True), torch.randn(2, 3, 8))) == []


def test_a_function_that_others_cannot_find_is_unrolled() -> None:
    def selective_scan_fn(u: Tensor, delta: Tensor, *rest: Tensor, **settings: Any) -> Tensor:
        return (u * delta).cumsum(2)

    assert scanned(agree(Selective(selective_scan_fn), torch.randn(2, 3, 8))) == []


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor,
    delta_softplus: bool,
    form: str = "",
    return_last_state: bool = False,
) -> Any:
    """Return a scan of another form than those of the libraries."""
    made = (u * functional.softplus(delta)).cumsum(2) * A.sum() + z * D[:, None] * (B * C).sum()
    if form == "kernel" and u.device.type == "meta":
        raise RuntimeError("0 active drivers")
    if return_last_state:
        return made, made[..., -1]
    return {"transposed": (made.transpose(1, 2).contiguous(), made.new_zeros(()))}.get(form, made)


def test_a_function_of_that_name_that_returns_something_else_is_unrolled() -> None:
    assert scanned(agree(Selective(selective_scan_fn, form="transposed"), torch.randn(2, 3, 8))) == []


def test_a_kernel_that_runs_on_its_device_alone_gives_the_type_it_is_given() -> None:
    graph = agree(Selective(selective_scan_fn, form="kernel").double(), torch.randn(2, 3, 8, dtype=torch.float64))
    scan = next(op for op in graph.ops if op.target == "autopar_ops.scan.default")
    assert scan.outputs[0] is not None
    assert scan.outputs[0].dtype == "float64"


def test_such_a_kernel_is_not_taken_for_one_that_gives_no_state() -> None:
    model = Selective(selective_scan_fn, form="kernel", return_last_state=True)
    assert scanned(agree(model, torch.randn(2, 3, 8))) == []


def test_layers_are_compared_by_the_operator_alone() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Selective(scans.selective_scan_fn) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            return sum((layer(x) for layer in self.layers), x.new_zeros(()))

    with torch.device("meta"):
        model, x = Deep(), torch.empty(2, 5, 8)
    _dtype.cache_clear()
    with scans_as_operators(model):
        work = layer_work(model, (x,), {"layers": Repetition(9)})
    assert work is not None
    found = [[name for name, *_ in work.operators["layers", number]] for number in range(9)]
    assert found[0].count("autopar_ops.scan.default") == 1
    assert all(each == found[0] for each in found)


def test_the_type_of_the_output_is_that_of_the_function() -> None:
    read = [torch.empty(2, 6, 5, dtype=torch.bfloat16), torch.empty(2, 6, 5), torch.empty(6, 4), torch.empty(2, 4, 5)]

    class Mixed(nn.Module):
        def forward(self, u: Tensor, delta: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return modeling_mamba.mamba_selective_scan(u, delta, a, b.bfloat16(), b.bfloat16(), D=a[:, 0])

    given = tuple(each.requires_grad_() for each in read)
    graph = capture(Mixed(), given).graph
    (scan,) = (op for op in graph.ops if op.target == "autopar_ops.scan.default")
    assert scan.outputs[0] is not None
    assert scan.outputs[0].dtype == str(Mixed()(*given).dtype).removeprefix("torch.") == "float32"


def test_autocast_around_the_operator_reaches_nothing_inside() -> None:
    read = [
        torch.randn(2, 5, 2, 4),
        torch.randn(2, 5, 2, 4),
        torch.randn(2, 5, 2, 4),
        -torch.rand(2, 5, 2),
        torch.rand(2, 5, 2),
    ]
    named = ("query", "key", "value", "g", "beta")
    function = f"{modeling_qwen3_next.__name__}:torch_chunk_gated_delta_rule"
    call = ScanCall("gated_delta_rule", function, named, (4, 4, 4, 3, 3), (), {}, "float32").text
    plain = SCAN(read, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(SCAN(read, call), plain)


def test_a_call_survives_its_text() -> None:
    call = ScanCall(
        "chunk_scan", f"{MAMBA}:f", ("x",), (4,), ("x",), {"dt_limit": (0.0, float("inf")), "z": None}, "float32"
    )
    assert ScanCall.read(call.text) == call


def test_places_picked_in_a_loop_have_the_gradient_of_a_tensor_taken_apart() -> None:
    def swept(x: Tensor) -> Tensor:
        kept = x * 2
        total = x.new_zeros(x.shape[0])
        for i in range(x.shape[1]):
            total = total * 0.9 + kept[:, i, 0] + kept[:, i].sum(1) + kept[:, i : i + 1].sum((1, 2)) + kept[i % 2, 0, 1]
        kept += x.square()  # what was taken apart before is stale now
        return total + kept[:, 0].sum(1)

    read = [torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    read[1].data.copy_(read[0].data)
    with _PicksOnce():
        mine = swept(read[0]).square().sum()
    theirs = swept(read[1]).square().sum()
    assert torch.equal(mine, theirs)
    for loss in (mine, theirs):
        loss.backward()
    torch.testing.assert_close(read[0].grad, read[1].grad, rtol=0, atol=1e-12)
