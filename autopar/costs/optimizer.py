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
    meta = op.outputs[0]
    temporaries = memory.optimizer_temporaries(optimizer)
    fresh = compute.fresh_s(numels * (meta.item_bytes if meta is not None else 0), device)
    return np.asarray(compute.optimizer_s(numels, optimizer, device) + temporaries * fresh, dtype=np.float64)


def state_bytes(op: Op, layout: Layout, sizes: tuple[int, ...], optimizer: str) -> float:
    """Return the bytes of the optimizer state of one parameter on one device."""
    meta = op.outputs[0]
    dtype = meta.dtype if meta is not None else "float32"
    per_element = memory.optimizer_state_bytes(optimizer, memory.DtypeOf(parameter=dtype, gradient=dtype, state=dtype))
    return float(local_numel(op, layout, sizes) * per_element)
