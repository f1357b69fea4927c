"""autopar: one PyTorch model and one cluster file in, a sharded program out.

    model = autopar.compile(model, "cluster.yaml", example_inputs=batch)

Names are resolved when first used, so that `import autopar` (and every command
that only reads plans) starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.version import __version__

if TYPE_CHECKING:
    from autopar.api import plan
    from autopar.api.compiling import compile
    from autopar.clusters import ClusterSpec
    from autopar.errors import (
        AutoparError,
        CaptureError,
        InfeasibleError,
        InputMismatchError,
        NotFiniteError,
        RanksDisagreeError,
        StalePlanError,
        UnknownOperatorError,
        UsageError,
    )
    from autopar.ir.plan import Plan
    from autopar.options import PlanOptions
    from autopar.runtime import input_part
    from autopar.runtime.clipping import clip_grad_norm_
    from autopar.runtime.consolidated import full_state_dict
    from autopar.runtime.optimizer_states import full_optimizer_state_dict, load_optimizer_state_dict
    from autopar.runtime.totals import sum_over_parameters

_HOME = {
    "clip_grad_norm_": "autopar.runtime.clipping",
    "compile": "autopar.api.compiling",
    "full_optimizer_state_dict": "autopar.runtime.optimizer_states",
    "full_state_dict": "autopar.runtime.consolidated",
    "input_part": "autopar.runtime",
    "load_optimizer_state_dict": "autopar.runtime.optimizer_states",
    "plan": "autopar.api",
    "sum_over_parameters": "autopar.runtime.totals",
    "ClusterSpec": "autopar.clusters",
    "Plan": "autopar.ir.plan",
    "PlanOptions": "autopar.options",
    "AutoparError": "autopar.errors",
    "CaptureError": "autopar.errors",
    "InfeasibleError": "autopar.errors",
    "InputMismatchError": "autopar.errors",
    "NotFiniteError": "autopar.errors",
    "RanksDisagreeError": "autopar.errors",
    "StalePlanError": "autopar.errors",
    "UnknownOperatorError": "autopar.errors",
    "UsageError": "autopar.errors",
}
"""Public name to the module that defines it."""

__all__ = [
    "AutoparError",
    "CaptureError",
    "ClusterSpec",
    "InfeasibleError",
    "InputMismatchError",
    "NotFiniteError",
    "Plan",
    "PlanOptions",
    "RanksDisagreeError",
    "StalePlanError",
    "UnknownOperatorError",
    "UsageError",
    "__version__",
    "clip_grad_norm_",
    "compile",
    "full_optimizer_state_dict",
    "full_state_dict",
    "input_part",
    "load_optimizer_state_dict",
    "plan",
    "sum_over_parameters",
]


if not TYPE_CHECKING:  # a type checker that saw it would take every name for one of ours

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'autopar' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
