"""Programs for GPUs: their kernels stand where the CPU's stood and are given what they take.

No GPU runs here: what the kernels compute is stood in for by their definition, with their signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.capture import Captured
from autopar.ir.mesh import Axis, Mesh
from autopar.own_attention import BLOCK_ATTENTION
from autopar.rewrite import Programs, rewrite
from autopar.rewrite.device import GpuAttention, kernels_for
from autopar.rewrite.random_ops import seeded
from autopar.strategies import axis_strategies
from tests.support.decide import decide
from tests.support.remembering import remembered

aten = torch.ops.aten
DROPPED = 0.25
ALONE = Mesh((Axis("tp", 1, "device"),))
PAIR = Mesh((Axis("tp", 2, "device"),))


class Attends(nn.Module):
    """Attention under a mask that the caller gives, causal, or neither; positions made in forward.

    Queries may share keys, and be those of the first half of positions alone.
    """

    def __init__(
        self,
        causal: bool,
        dtype: torch.dtype,
        heads: int = 2,
        *,
        half: bool = False,
        drops: bool = False,
        trained: int = 0,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, trained, trained, dtype=dtype)) if trained else None
        self.causal, self.heads, self.half, self.dropout = causal, heads, half, DROPPED if drops else 0.0
        self.inner = nn.Linear(16, 16, dtype=dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + (torch.arange(x.shape[1], device=x.device) / 16).to(x.dtype)[None, :, None]
        q = self.inner(x).view(2, x.shape[1], 2, 8).transpose(1, 2)
        k, v = (q * 2)[:, : self.heads], (q + 1)[:, : self.heads]
        if self.half:
            q = q[:, :, : x.shape[1] // 2]
        mask = mask if self.bias is None else self.bias
        made = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout, is_causal=self.causal, enable_gqa=self.heads < 2
        )
        return made.float().square().mean()


def attention(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float | None) -> torch.Tensor:
    """Return attention by its definition; rows of a bias must be aligned, as the kernel demands."""
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(-2) % 16 == 0 or bias.stride(-2) == 0
        assert bias.stride(-1) == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        made = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return by_position(made)


def by_position(value: torch.Tensor) -> torch.Tensor:
    """Return the value as the kernels lay it out in memory: positions outside heads."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def gradients(grad: Any, q: Any, k: Any, v: Any, *how: Any) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        return tuple(by_position(each) for each in torch.autograd.grad(attention(*leaves, *how), leaves, grad))


def flash(q: Any, k: Any, v: Any, dropout: float, causal: bool, debug: bool = False, *, scale: Any = None) -> Any:
    assert not causal or q.shape[2] == k.shape[2], "the mask would end at the last key"
    state = torch.tensor([7, 9])
    return attention(q, k, v, None, causal, scale), q.sum(-1), None, None, q.shape[2], k.shape[2], state, state[0], q


def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
    dropout: float, causal: bool, seed: Any, offset: Any, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert (max_q, max_k, cum_q, cum_k) == (q.shape[2], k.shape[2], None, None)
    assert seed.tolist() == [7, 9]
    assert offset.item() == 7
    assert out.shape == q.shape
    torch.testing.assert_close(sums, q.sum(-1))
    return gradients(grad, q, k, v, None, causal, scale)


def efficient(q: Any, k: Any, v: Any, bias: Any, sums: bool, dropout: float, causal: bool, *, scale: Any = None) -> Any:
    assert sums
    assert q.shape[1] == k.shape[1] == v.shape[1], "the kernel has no groups of queries"
    padded = torch.zeros(*q.shape[:2], -(-q.shape[2] // 32) * 32)
    return attention(q, k, v, bias, causal, scale), padded, torch.tensor(7), torch.tensor(9)


def efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any,
    dropout: float, wanted: list[bool], causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert (seed.item(), offset.item(), list(wanted)[:3]) == (7, 9, [True, True, True])
    assert sums.shape[-1] % 32 == 0
    of_bias = None
    if wanted[3]:
        assert bias is not None
        with torch.enable_grad():
            leaf = bias.detach().requires_grad_()
            (of_bias,) = torch.autograd.grad(attention(q, k, v, leaf, causal, scale), leaf, grad)
    return (*gradients(grad, q, k, v, bias, causal, scale), of_bias)


def cudnn(
    q: Any, k: Any, v: Any, bias: Any, sums: bool, dropout: float, causal: bool, debug: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    assert (bias, sums, dropout) == (None, True, 0.0)
    state = torch.tensor([7, 9])
    made = q.sum(-1, keepdim=True)
    return attention(q, k, v, None, causal, scale), made, None, None, q.shape[2], k.shape[2], state, state[0], q


def cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any, bias: Any, cum_q: Any, cum_k: Any,
    max_q: int, max_k: int, dropout: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert bias is None
    torch.testing.assert_close(sums, q.sum(-1, keepdim=True))
    of = (cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset)
    return flash_backward(grad, q, k, v, out, sums.squeeze(-1), *of, scale=scale)


def dropping(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel's stand-in that is given what it draws from; it drops nothing."""

    def run(salt: int, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(salt, int)
        assert DROPPED in [each for each in args if isinstance(each, float)]
        return kernel(*args, **kwargs)

    return run


STAND_INS = {
    seeded("aten._scaled_dot_product_flash_attention.default"): dropping(flash),
    seeded("aten._scaled_dot_product_efficient_attention.default"): dropping(efficient),
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}


def run(programs: Programs, captured: Captured, model: nn.Module, example: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the loss and gradients of the programs, the GPU's kernels and device stood in for."""
    assert programs.backward is not None
    for gm in (programs.forward, programs.backward):
        for node in gm.graph.nodes:
            node.target = STAND_INS.get(node.target, node.target)
            if "device" in node.kwargs:
                assert node.kwargs["device"] == torch.device("cuda")
                node.update_kwarg("device", torch.device("cpu"))
        gm.recompile()
    held = dict(model.named_parameters())
    inputs = [each for each in example if each is not None]
    starts = [each for each in captured.placeholders if each.kind != "tangent"]
    given = [inputs[each.index] if each.kind == "input" else held[each.target] for each in starts]
    with torch.no_grad():
        made = programs.forward(*given)
        source = {"input": given, "output": made, "value": made[len(programs.outputs) + len(programs.mutations) :]}
        saved = [source[each.source][each.index] for each in programs.saved]
        return [made[0], *programs.backward(*saved, torch.ones(()))]


@dataclass(frozen=True)
class Case:
    """Attention as one caller has it."""

    kernel: str
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    length: int = 8
    masked: bool = False
    heads: int = 2
    half: bool = False
    drops: bool = False
    trained: bool = False
    """Whether a mask of one row of heads and samples is a parameter."""

    turned: bool = False
    """Whether a mask is given whose rows are columns in memory, and one column of which is for all keys."""

    hopper: bool = False
    """Whether the device is one for which torch prefers cuDNN."""

    seeded: bool = False
    """Whether what is dropped is drawn from the step's seed, as on several ranks, or as torch's generator has it."""


CASES = {
    "flash": Case("flash"),
    "flash, causal": Case("flash", causal=True),
    "flash, queries share keys": Case("flash", heads=1),
    "single precision": Case("efficient", causal=True, dtype=torch.float32),
    "mask": Case("efficient", length=16, masked=True),
    "mask whose rows are not aligned": Case("efficient", dtype=torch.float32, length=6, masked=True),
    "queries share keys": Case("efficient", causal=True, dtype=torch.float32, heads=1),
    "queries share keys, mask": Case("efficient", length=16, masked=True, heads=1),
    "causal, fewer queries than keys": Case("efficient", causal=True, half=True),
    "trained mask": Case("efficient", length=16, trained=True),
    "trained mask, queries share keys": Case("efficient", dtype=torch.float32, length=6, trained=True, heads=1),
    "trained mask, drops scores": Case("efficient", length=16, trained=True, drops=True),
    "a mask of columns": Case("efficient", length=16, masked=True, turned=True),
    "a mask of columns, not aligned": Case("efficient", dtype=torch.float32, length=6, masked=True, turned=True),
    "cuDNN": Case("cudnn", hopper=True),
    "cuDNN, causal": Case("cudnn", hopper=True, causal=True),
    "cuDNN, queries share keys": Case("cudnn", hopper=True, heads=1),
    "cuDNN drops nothing": Case("flash", hopper=True, causal=True, drops=True),
    "cuDNN has no single precision": Case("efficient", hopper=True, dtype=torch.float32),
    "cuDNN needs more than one key": Case("flash", hopper=True, length=1),
    "drops scores": Case("flash", causal=True, drops=True),
    "drops scores by a seed": Case("flash", causal=True, drops=True, seeded=True),
    "drops scores by a seed, mask": Case("efficient", length=16, masked=True, drops=True, seeded=True),
    "drops scores, queries share keys": Case("efficient", dtype=torch.float32, length=6, heads=1, drops=True),
    "drops scores, mask": Case("efficient", length=16, masked=True, drops=True),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    monkeypatch.setattr("autopar.rewrite.device._prefers_cudnn", lambda _: case.hopper)
    dtype, length = case.dtype, case.length
    torch.manual_seed(0)
    model = Attends(case.causal, dtype, case.heads, half=case.half, drops=case.drops, trained=length * case.trained)
    mask = torch.randn(2, 1, length, length).to(dtype) if case.masked else None
    mask = mask[:, :, :1].mT if mask is not None and case.turned else mask
    example = (torch.randn(2, length, 16).to(dtype), *([mask] if case.masked else []))
    captured = remembered(model, example)
    graph = captured.graph
    drawn = {
        op.name: (axis_strategies(op, [graph.meta(ref) for ref in op.refs], 2, ()).strategies[0],)
        for op in graph.ops
        if case.seeded and op.target == str(BLOCK_ATTENTION)
    }
    programs = rewrite(
        captured.joint, graph, decide(graph, PAIR if case.seeded else ALONE, operators=drawn), 0, device="cuda"
    )

    kernels = {
        str(node.target).split(".")[1] for node in programs.forward.graph.nodes if "attention" in str(node.target)
    }
    model.dropout = 0.0
    got = run(programs, captured, model, example)

    want = model(*example)
    want.backward()
    assert kernels == {f"_scaled_dot_product_{case.kernel}_attention{'_default' if case.seeded else ''}"}
    wanted = [want.detach(), *(each.grad for each in model.parameters())]
    for mine, its in zip(got, wanted, strict=True):
        error = (mine.float() - its.float()).norm() / its.float().norm()
        assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("capability", "largest"), [((7, 5), 0), ((8, 0), 256), ((8, 9), 192), ((9, 0), 256)])
def test_what_heads_flash_attention_takes_is_the_device_s(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], largest: int
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a build with cuDNN looks at each

    assert [each.flash_head for each in kernels_for("cuda") if isinstance(each, GpuAttention)] == [largest]


@pytest.mark.parametrize(
    ("capability", "version", "deterministic", "found"),
    [
        ((9, 0), 91000, False, True), ((10, 0), 91000, False, True), ((8, 0), 91000, False, False),
        ((9, 0), 90500, False, False), ((9, 0), 91000, True, False),
    ],
)  # fmt: skip
def test_cudnn_is_taken_where_torch_prefers_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: int, deterministic: bool, found: bool
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)

    assert [each.cudnn for each in kernels_for("cuda") if isinstance(each, GpuAttention)] == [found]


def test_the_cpu_keeps_its_kernels():
    captured = remembered(Attends(True, torch.float32), (torch.randn(2, 8, 16),))
    programs = rewrite(captured.joint, captured.graph, decide(captured.graph, ALONE), 0)

    assert any("flash_attention_for_cpu" in str(node.target) for node in programs.forward.graph.nodes)
