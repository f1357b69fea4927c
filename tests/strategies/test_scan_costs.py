"""What a scan takes: operations of its products, less of them where it has fewer heads, and what its steps hold."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.costs.operators import flops, seconds
from autopar.costs.workspaces import workspace_bytes
from autopar.ir.graph import Op, Ref
from autopar.ir.placement import Layout, Replicate, Shard
from autopar.ir.scan import ScanCall
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta
from benchmarks.scans import published
from cost_models.device import DeviceSpec, catalogued_device

H100, CPU = catalogued_device("h100-sxm-80gb"), catalogued_device("cpu")
B, S, H, D, F = 2, 256, 8, 32, 512
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "gated_delta_rule": {
        "q": (B, S, H, D), "k": (B, S, H, D), "v": (B, S, H, D), "g": (B, S, H), "beta": (B, S, H)
    },
    "selective_scan": {"u": (B, F, S), "delta": (B, F, S), "A": (F, D), "B": (B, D, S), "C": (B, D, S)},
    "kimi_delta_rule": {
        "q": (B, S, H, D), "k": (B, S, H, D), "v": (B, S, H, D), "g": (B, S, H, D), "beta": (B, S, H)
    },
    "causal_convolution": {"x": (B, F, S), "weight": (F, 4), "bias": (F,)},
    "chunk_scan": {"x": (B, S, H, D), "dt": (B, S, H), "A": (H,), "B": (B, S, 1, 16), "C": (B, S, 1, 16)},
}  # fmt: skip
HEADS = {"gated_delta_rule": 2, "kimi_delta_rule": 2, "selective_scan": 1, "chunk_scan": 2, "causal_convolution": 1}
"""Which dimension of the output the heads, or the features, are."""


def scan(kind: str, backward: bool = False, **settings: Any) -> tuple[Op, list[TensorMeta]]:
    """Return a call of a scan, and the tensors it reads."""
    shapes = SHAPES[kind]
    call = ScanCall(kind, "library:function", tuple(shapes), tuple(map(len, shapes.values())), (), settings, "float32")
    read = [*([call.shape([*shapes.values()])] if backward else []), *shapes.values()]
    metas = [TensorMeta(shape, "float32") for shape in read]
    refs = [Ref(f"x{index}", 0) for index in range(len(metas))]
    args = (refs[0], tuple(refs[1:]), call.text) if backward else (tuple(refs), call.text)
    target = f"autopar_ops.scan{'_backward' if backward else ''}.default"
    made = metas[1:] if backward else [TensorMeta(call.shape([*shapes.values()]), "float32")]
    return Op(name="scan", kind="call", target=target, args=args, outputs=tuple(made)), metas


def whole(op: Op, metas: list[TensorMeta]) -> MeshStrategy:
    """Return the strategy that computes all of it on every rank."""
    read: tuple[Layout, ...] = ((Replicate(),),) * len(metas)
    axis = Strategy((Replicate(),) * len(metas), (Replicate(),) * len(op.outputs))
    return MeshStrategy((axis,), read, ((Replicate(),),) * len(op.outputs))


def halved(op: Op, metas: list[TensorMeta], kind: str) -> MeshStrategy:
    """Return the strategy that computes half of the heads, or of the features."""
    call = ScanCall.read(str(op.args[-1]))
    split = next(s for s in call.forward.strategies(2, [m.shape for m in metas]) if s.outputs[0] == Shard(HEADS[kind]))
    return MeshStrategy((split,), tuple((each,) for each in split.inputs), ((split.outputs[0],),))


def took(op: Op, metas: list[TensorMeta], strategy: MeshStrategy, device: DeviceSpec) -> float:
    return float(seconds(op, metas, [strategy], (2,), device)[0])


def test_operations_are_those_of_the_products() -> None:
    tokens, chunk = B * S * H, 64
    op, metas = scan("gated_delta_rule")
    inside = 2 * chunk * D + chunk * D  # keys with keys, queries with keys, and half of a product that solves for both
    assert flops(op, metas) == 2 * tokens * (inside + 2 * D * D + chunk * D + D * D)
    backward = scan("gated_delta_rule", backward=True)
    assert flops(*backward) == 2 * flops(op, metas)


@pytest.mark.parametrize("kind", SHAPES)
def test_half_of_the_heads_is_half_of_the_operations_and_bytes(kind: str) -> None:
    op, metas = scan(kind)
    split = halved(op, metas, kind)
    held = workspace_bytes(op, metas, [whole(op, metas), split], (2,), CPU)
    assert held is not None
    assert held[1] == pytest.approx(held[0] / 2)
    assert took(op, metas, split, CPU) < 0.8 * took(op, metas, whole(op, metas), CPU)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("device", [H100, CPU], ids=["gpu", "cpu"])
def test_backward_takes_forward_again_and_twice_its_time(kind: str, device: DeviceSpec) -> None:
    (op, metas), back = scan(kind), scan(kind, backward=True)
    forward = took(op, metas, whole(op, metas), device)
    assert took(*back, whole(*back), device) == pytest.approx(3 * forward, rel=0.2)


def test_a_chunk_is_as_long_as_the_call_says() -> None:
    (short, metas), (long, _) = (scan("chunk_scan", chunk_size=size) for size in (16, 128))
    assert flops(short, metas) < flops(long, metas)


def test_on_gpus_steps_start_no_kernels_of_their_own() -> None:
    op, metas = scan("selective_scan")
    assert took(op, metas, whole(op, metas), H100) < 10 * H100.kernel_launch_s
    assert took(op, metas, whole(op, metas), CPU) > S * CPU.kernel_launch_s


def test_prices_on_gpus_are_those_that_others_measured() -> None:
    at_work = [row for row in published() if row["measured_s"] > 5e-4]  # shorter ones wait for the host
    assert len(at_work) == 6
    assert all(abs(row["error"]) < 0.2 for row in at_work)
