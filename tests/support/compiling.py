"""Compiled modules for tests of the runtime, under decisions made without a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.capture import Captured
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Decisions
from autopar.rewrite import batch_axes, batch_layout, rewrite
from autopar.runtime import Program, Ranks, Runner, compiled
from tests.support.decide import decide
from tests.support.remembering import remembered

Decide = Callable[[Captured], Decisions]


def compile_with(
    model: nn.Module,
    example: Any,
    mesh: Mesh,
    *,
    decide_by: Decide | None = None,
    local_inputs: bool = False,
    **how: Any,
) -> nn.Module:
    """Return the model compiled for calls like the example; parameters are sharded at rest wherever they divide."""
    ranks = Ranks.join("cpu")
    chosen = decide_by or (lambda captured: decide(captured.graph, mesh, zero=True, gather="per_phase"))

    def program_for(training: bool, grad: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
        captured = remembered(model, dict(kwargs) if kwargs else args, training=training, with_backward=grad)
        return _program(captured, chosen(captured), ranks.rank, local_inputs)

    first = remembered(model, example, training=True)
    ready = [_program(first, chosen(first), ranks.rank, local_inputs)]

    def planned_first(training: bool, grad: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
        return ready.pop() if training and grad and ready else program_for(training, grad, args, kwargs)

    backend, split = how.pop("backend", None), batch_axes(first.graph, chosen(first)) if local_inputs else ()
    batch = batch_layout(mesh, split) if split else None
    return compiled(model, Runner(chosen(first), ranks, planned_first, backend=backend, batch=batch), **how)


def _program(captured: Captured, decisions: Decisions, rank: int, local_inputs: bool) -> Program:
    split = batch_axes(captured.graph, decisions) if local_inputs else ()
    programs = rewrite(captured.joint, captured.graph, decisions, rank, split=split)
    return Program(captured.call, captured.result, captured.placeholders, captured.constants, programs)
