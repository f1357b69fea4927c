"""What is held for a moment only: workspaces of kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.costs.liveness import local_bytes
from autopar.costs.losses import loss_kernels
from autopar.costs.operators import score_bytes, trains_mask
from autopar.costs.recurrent import is_recurrent, recurrent_bytes
from autopar.costs.scans import is_scan, scan_bytes
from autopar.ir.graph import Op
from autopar.ir.placement import local_shape
from autopar.ir.strategy import MeshStrategy
from autopar.ir.table import Floats
from autopar.ir.tensor import TensorMeta
from cost_models.device import DeviceSpec

_CONVOLUTION = "aten.convolution.default"
_CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_CROSS_ENTROPY_BACKWARD = "autopar_ops.cross_entropy_backward.default"

PART_BYTES = {"cpu": 1 << 20, "other": 1 << 26}
"""What cross entropy's backward makes at a time of the gradient that log_softmax is given (`own_operators.py`)."""


def workspace_bytes(
    op: Op, metas: Sequence[TensorMeta], strategies: Sequence[MeshStrategy], sizes: tuple[int, ...], device: DeviceSpec
) -> Floats | None:
    """Return the bytes that one instance of an operator holds on one device while it runs, for each strategy.

    On CPUs oneDNN convolves on copies in a blocked layout, unless the kernel is 1 x 1: forward copies what it reads,
    and frees that before the result is put in the plain layout; backward copies the image and the gradient, then the
    blocked weight gradient is put in the plain layout. Held against torch 2.13's allocator on nine shapes (strides,
    groups, 3 to 256 channels): exact for seven. Cross entropy's backward holds a part of its gradient, a recurrent
    layer's the gates of its forward, a scan what its steps make. Workspaces of other kernels and of cuDNN are not
    modelled: `None`. Of a published stack's cross entropy it is what its kernels hold, below zero where they write over
    what they read.
    """
    if theirs := loss_kernels(op, device.cross_entropy):
        of_scores = [local_bytes(metas[theirs.scores], each.inputs[theirs.scores], sizes) for each in strategies]
        return theirs.held * np.array(of_scores)
    if op.target == _CROSS_ENTROPY_BACKWARD:
        part = PART_BYTES["cpu" if device.kind == "cpu" else "other"]
        split = [any(axis.lowering for axis in each.axes) for each in strategies]
        parts = []
        for each, apart in zip(strategies, split, strict=True):
            whole = local_bytes(metas[1], each.inputs[1], sizes)
            rows = 1 if each.inputs[1] is None else local_shape(metas[1].shape, each.inputs[1], sizes)[0]
            # A sample is never cut: that of an image may be more than a part.
            parts.append(0.0 if apart else min(whole, max(part, whole / max(rows, 1))))
        return np.array(parts)
    if trains_mask(op) or is_recurrent(op) or is_scan(op):
        shapes = [[local_shape(m.shape, at, sizes) for m, at in zip(metas, s.inputs, strict=True)] for s in strategies]
        dtype = next(meta.dtype for meta in metas if meta.is_floating)
        if is_recurrent(op):
            return recurrent_bytes(op, shapes, dtype)
        if is_scan(op):
            return scan_bytes(op, shapes, dtype, device)
        return None if device.kind == "cpu" else np.array([score_bytes(op, metas, each) for each in shapes])
    if device.kind != "cpu" or op.target not in {_CONVOLUTION, _CONVOLUTION_BACKWARD}:
        return None
    backward = op.target == _CONVOLUTION_BACKWARD
    first = 1 if backward else 0
    if math.prod(metas[first + 1].shape[2:]) == 1:
        return None
    found = []
    for strategy in strategies:
        held = [local_bytes(meta, at, sizes) for meta, at in zip(metas, strategy.inputs, strict=True)]
        image, weight = held[first], held[first + 1]
        found.append(max(weight, image + held[0]) if backward else image + weight)
    return np.array(found)
