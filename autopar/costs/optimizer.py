"""What the optimizer costs: seconds of its step, bytes of its state, on the local part of a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.ir.graph import Op
from autopar.ir.placement import Layout, local_shape
from autopar.ir.table import Floats
from cost_models import compute, memory
from cost_models.device import DeviceSpec


def local_numel(op: Op, layout: Layout, sizes: tuple[int, ...]) -> int:
    """Return the elements of a parameter that one device holds at rest."""
    meta = op.outputs[0]
    if meta is None:
        raise ValueError(f"parameter {op.target} is no tensor")
    return math.prod(local_shape(meta.shape, layout, sizes))


def optimizer_seconds(
    op: Op, layouts: Sequence[Layout | None], sizes: tuple[int, ...], optimizer: str, device: DeviceSpec
) -> Floats:
    """Return the seconds of the optimizer step of one parameter for each layout at rest."""
    numels = np.array([local_numel(op, layout, sizes) for layout in layouts if layout is not None], dtype=np.float64)
    own, ranks = memory.shards_of(optimizer)
    plain, dtypes = memory.dtypes_of(own, _dtype(op))
    # Optimizers on master copies are fused kernels over all tensors (Apex, DeepSpeed); torch's own is foreach.
    how = "fused" if dtypes.master else "foreach"
    found = compute.optimizer_s(numels / ranks, plain, device, dtypes=dtypes, implementation=how)
    meta = op.outputs[0]
    fresh = compute.fresh_s(numels / ranks * (meta.item_bytes if meta is not None else 0), device)
    return np.asarray(found + memory.optimizer_temporaries(plain) * fresh, dtype=np.float64)


def least_optimizer_s(ops: Sequence[Op], optimizer: str, device: DeviceSpec) -> Floats:
    """Return the least seconds of the optimizer step of each parameter, whole; of a part, it is that part of them."""
    own, ranks = memory.shards_of(optimizer)
    found = np.zeros(len(ops))
    for dtype in {_dtype(op) for op in ops}:
        plain, dtypes = memory.dtypes_of(own, dtype)
        numels = np.array([local_numel(op, (), ()) if _dtype(op) == dtype else 0 for op in ops], dtype=np.float64)
        how = "fused" if dtypes.master else "foreach"
        found += compute.optimizer_s(numels / ranks, plain, device, dtypes=dtypes, implementation=how)
    return found


def state_bytes(op: Op, layout: Layout, sizes: tuple[int, ...], optimizer: str) -> float:
    """Return the bytes of the optimizer state of one parameter on one device, a master copy included."""
    own, ranks = memory.shards_of(optimizer)
    plain, dtypes = memory.dtypes_of(own, _dtype(op))
    return float(local_numel(op, layout, sizes) * memory.optimizer_state_bytes(plain, dtypes) / ranks)


def _dtype(op: Op) -> str:
    meta = op.outputs[0]
    return meta.dtype if meta is not None else "float32"
