"""Every different call of an operator that a real model's step makes, with the tensors it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture import Captured
from autopar.ir.graph import Op
from autopar.rewrite.random_ops import step_seed
from tests.strategies.one_op import Case
from tests.support.remembering import remembered

Signature = tuple[object, ...]


class _Recorder(fx.Interpreter):
    """Runs the joint graph on real tensors and keeps the first call of each signature."""

    def __init__(self, captured: Captured, seen: set[Signature]) -> None:
        super().__init__(captured.joint)
        self.cases: list[Case] = []
        self._ops: Mapping[str, Op] = captured.graph.by_name
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and keep what it was given."""
        op = self._ops.get(n.name)
        if op is not None and op.kind == "call":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            case = Case(op.target, _copied(args), _copied(kwargs), "empty" in op.target)
            signature = (op.target, *map(repr, (case.metas, case.op.args, case.op.kwargs)))
            if signature not in self._seen:
                self._seen.add(signature)
                self.cases.append(case)
        return super().run_node(n)


def _copied(value: Any) -> Any:
    """Return arguments as the program has them, tensors not shared with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, tuple | list) else value


def calls_of(model: torch.nn.Module, inputs: dict[str, Any], seen: set[Signature]) -> list[Case]:
    """Return the calls of one training step in float64 whose signatures are not in `seen` yet, and add them there."""
    model = model.double()
    inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    captured = remembered(model, inputs)
    generator = torch.Generator().manual_seed(0)
    given = []
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = [each for each in torch.utils._pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    for each, node in zip(captured.placeholders, captured.joint.graph.find_nodes(op="placeholder"), strict=True):
        if each.kind in {"parameter", "buffer"}:
            given.append(tensors[each.target].detach())
        elif each.kind == "constant":
            given.append(captured.constants[each.name])
        elif each.kind == "input":
            given.append(flat[each.index])
        else:
            val = node.meta["val"]
            given.append(torch.randn(val.shape, dtype=val.dtype, generator=generator))
    recorder = _Recorder(captured, seen)
    with torch.no_grad(), step_seed(0):
        recorder.run(*given)
    return recorder.cases
