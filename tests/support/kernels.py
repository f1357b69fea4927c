"""Stand-ins for mamba_ssm, causal_conv1d and flash-linear-attention, as a machine with a GPU has them.

They compute on real tensors alone, as kernels do, and refuse those that only have a shape.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tests.support import scans

USED: list[str] = []
"""Names of kernels that ran on values, in order."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:
    """Return the gated delta rule of normalised queries and keys."""
    assert initial_state is None
    assert not output_final_state
    assert use_qk_l2norm_in_kernel
    q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
    return scans.chunk_gated_delta_rule(q, k, v, g, beta, scale=q.shape[-1] ** -0.5)


def _declined(*args: Any, **kwargs: Any) -> None:
    """Compute no whole layer: its parts are called then."""


def _kernel(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(run)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        read = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(each.is_meta or type(each) not in {Tensor, torch.nn.Parameter} for each in read):
            raise RuntimeError(f"{name}: pointer argument cannot be accessed")
        USED.append(name)
        return run(*args, **kwargs)

    return kernel


def install() -> None:
    """Put the packages where imports find them; transformers must not have been imported before."""
    packages: dict[str, dict[str, Callable[..., Any]]] = {
        "causal_conv1d": {"causal_conv1d_fn": scans.causal_conv1d_fn},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "mamba_ssm.ops.selective_scan_interface": {
            "selective_scan_fn": scans.selective_scan_fn,
            "mamba_inner_fn": _declined,
        },
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": scans.mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": _declined,
        },
    }
    for path, functions in packages.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            module = sys.modules.setdefault(name, types.ModuleType(name))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        for name, run in functions.items():
            setattr(sys.modules[path], name, _kernel(run, name))
