"""Cross entropy of published stacks costs what their kernels move, and holds what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.costs.operators import seconds
from autopar.costs.workspaces import workspace_bytes
from autopar.ir.graph import Graph, Op
from autopar.ir.strategy import MeshStrategy
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.frameworks import stack_of
from tests.support.remembering import remembered

ROWS, CLASSES = 64, 4096
SCORES = ROWS * CLASSES * 4
LOSS = ("aten._log_softmax.default", "aten.nll_loss_forward.default", "autopar_ops.cross_entropy_backward.default")


class Traffic(TorchDispatchMode):
    """Adds up the bytes of logits that operators read and make."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "index" not in str(func):
            whole = [each for each in tree_leaves((args, out)) if isinstance(each, torch.Tensor)]
            self.bytes += sum(t.nbytes for t in whole if t.numel() == ROWS * CLASSES)
        return out


def _megatrons() -> int:
    """Return the bytes of the operators that vocab-parallel cross entropy consists of, after the cast and before it."""
    logits, labels = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    row = torch.arange(ROWS)
    with Traffic() as found:
        top = logits.max(dim=-1)[0]
        logits.sub_(top[:, None])
        scores = logits[row, labels]
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        (total.log() - scores).mean()
        logits.div_(total[:, None])
        logits[row, labels] -= 1
        logits.mul_(torch.full((ROWS, 1), 1 / ROWS))
    return found.bytes


def _device(cross_entropy: str) -> DeviceSpec:
    """Return a device that moves a byte a second, and does nothing else that takes time."""
    plain = {"memory_bytes_per_s": 1.0, "memory_efficiency": 1.0, "memory_half_bytes": 0.0, "kernel_launch_s": 0.0}
    others = replace(catalogued_device("a100-sxm-80gb"), own_programs=False)
    return replace(others, cross_entropy=cross_entropy, **plain)  # type: ignore[arg-type]


class Head(nn.Module):
    """A classifier of features of 16 bits, its loss in float32 or as they are."""

    def __init__(self, *, float32: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES, bias=False, dtype=torch.bfloat16)
        self.float32 = float32

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of [b, 8] features."""
        logits = self.linear(x)
        return functional.cross_entropy(logits.float() if self.float32 else logits, labels)


def _graph(*, float32: bool = True) -> Graph:
    inputs = torch.randn(ROWS, 8, dtype=torch.bfloat16), torch.zeros(ROWS, dtype=torch.long)
    return remembered(Head(float32=float32), inputs).graph


def _alone(graph: Graph, op: Op) -> MeshStrategy:
    return MeshStrategy((), tuple(() for _ in op.refs), tuple(() for _ in op.outputs))


def _bytes(cross_entropy: str, graph: Graph, also: str = "") -> float:
    """Return the bytes that the loss, and operators of the name `also`, are priced to move."""
    device = _device(cross_entropy)
    ops = [op for op in graph.ops if op.target in (*LOSS, also)]
    assert len(ops) >= 3
    each = [seconds(op, [graph.meta(r) for r in op.refs], [_alone(graph, op)], (), device)[0] for op in ops]
    return float(sum(each))


def _held(cross_entropy: str, graph: Graph) -> list[float]:
    found = []
    for op in graph.ops:
        if op.target in LOSS:
            metas = [graph.meta(ref) for ref in op.refs]
            held = workspace_bytes(op, metas, [_alone(graph, op)], (), _device(cross_entropy))
            found.append(0.0 if held is None else float(held[0]))
    return found


def test_megatrons_loss_moves_what_its_operators_move():
    assert _bytes("vocab_parallel", _graph()) == pytest.approx(_megatrons(), rel=0.01)


def test_compiled_into_few_kernels_it_moves_half_of_that():
    few, many = (_bytes(f"vocab_parallel{way}", _graph()) for way in ("_fused", ""))

    assert few == pytest.approx(many / 2, rel=0.01)


def test_a_loss_reads_one_score_a_row_of_all_that_it_is_given():
    graph = _graph()
    op = next(op for op in graph.ops if op.target == "aten.nll_loss_forward.default")

    moved = seconds(op, [graph.meta(ref) for ref in op.refs], [_alone(graph, op)], (), _device(""))[0]

    assert moved < SCORES / 100


def test_torchs_own_loss_holds_the_cast_logits_and_the_gradient_of_its_scores():
    assert _held("torch", _graph()) == pytest.approx([SCORES, 0, SCORES])


def test_megatrons_loss_has_its_gradient_where_its_softmax_was():
    assert _held("vocab_parallel", _graph()) == pytest.approx([0, 0, -SCORES])


def test_flash_attns_loss_and_two_metrics_move_as_much_as_torchs_and_hold_nothing():
    graph = _graph(float32=False)

    assert _bytes("composer", graph) == pytest.approx(_bytes("torch", _graph(), "aten._to_copy.default"), rel=0.1)
    assert _held("composer", graph) == [0, 0, 0]


KINDS = {
    "megatron-lm": "vocab_parallel", "gpt-neox": "vocab_parallel", "megatron-deepspeed": "vocab_parallel",
    "NeMo": "vocab_parallel_fused", "megatron-core": "vocab_parallel_fused", "composer-fsdp": "composer",
    "llm-foundry": "composer", "pytorch fsdp": "torch", "torchtitan": "torch", "maxtext": "",
}  # fmt: skip


@pytest.mark.parametrize("framework", KINDS)
def test_a_framework_has_the_loss_that_it_runs(framework: str):
    device = stack_of(framework, compiled=False).on(catalogued_device("a100-sxm-80gb"), 2024)

    assert device.cross_entropy == KINDS[framework]


@pytest.mark.parametrize(("year", "loss"), [(2024, "torch"), (2025, "")])
def test_torchtitan_compiles_its_loss_later_than_its_layers(year: int, loss: str):
    assert stack_of("torchtitan", compiled=True).of_year(year).cross_entropy == loss


def test_what_is_compiled_has_the_loss_of_a_compiler():
    assert stack_of("torchtitan", compiled=True).cross_entropy == ""
