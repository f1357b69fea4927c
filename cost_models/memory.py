"""Bytes on a device that are not activations: optimizer state, rounding, context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.device import DeviceSpec, dtype_bytes
from cost_models.errors import CostModelError, suggestion

ALLOCATION_BYTES = 512
"""The CUDA caching allocator hands out multiples of this: kMinBlockSize, c10/cuda/CUDACachingAllocator."""

_CPU_ALIGNMENT_BYTES = 64
"""Alignment of torch's CPU allocator: gAlignment, c10/core/alignment.h."""

MASTER = "master_"
"""Before an optimizer's name: it updates float32 copies of parameters of 16 bits, and keeps its state in float32."""


def with_master(optimizer: str) -> str:
    """Return the name of the optimizer on float32 master copies (Megatron-LM, DeepSpeed, Apex O2)."""
    return optimizer if optimizer == "none" else MASTER + optimizer


def with_shards(optimizer: str, ranks: int) -> str:
    """Return the name of the optimizer each of whose `ranks` keeps and updates an equal part of the parameters."""
    return optimizer if optimizer == "none" or ranks == 1 else f"{optimizer}/{ranks}"


def shards_of(optimizer: str) -> tuple[str, int]:
    """Return the optimizer of one rank's part, and how many ranks share the parameters."""
    name, _, ranks = optimizer.partition("/")
    return name, int(ranks or 1)


def dtypes_of(optimizer: str, parameter: str) -> tuple[str, "DtypeOf"]:
    """Return the optimizer without its master copies, and the types of what it touches for a type of parameter."""
    plain = optimizer.removeprefix(MASTER)
    if optimizer != plain and dtype_bytes(parameter) < dtype_bytes("float32"):
        return plain, DtypeOf(parameter=parameter, gradient=parameter, state="float32", master="float32")
    return plain, DtypeOf(parameter=parameter, gradient=parameter, state=parameter)


_STATES: Mapping[str, int] = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}
"""State tensors of the size of the parameter."""

# Elements read and written per parameter: (parameter, gradient, state, temporary).
# fused: each tensor once in and, where it changes, once out. foreach, loop: one
# pass an ATen call, counted in torch/optim/{sgd,adam,adamw}.py of torch 2.13.
_TRAFFIC: Mapping[str, Mapping[str, tuple[int, int, int, int]]] = {
    "fused": {
        "none": (0, 0, 0, 0),
        "sgd": (2, 1, 0, 0),
        "sgd_momentum": (2, 1, 2, 0),
        "adam": (2, 1, 4, 0),
        "adamw": (2, 1, 4, 0),
    },
    "foreach": {
        "none": (0, 0, 0, 0),
        "sgd": (2, 1, 0, 0),
        "sgd_momentum": (2, 1, 5, 0),
        "adam": (2, 3, 8, 5),
        "adamw": (4, 3, 8, 5),
    },
}

# Tensors of the size of the parameter that a step makes and drops, one parameter after another: the root of the second
# moment and what it is divided by, torch/optim/{adam,adamw}.py of torch 2.13 with neither foreach nor fused.
_TEMPORARIES: Mapping[str, int] = {"none": 0, "sgd": 0, "sgd_momentum": 0, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class DtypeOf:
    """Data types of what an optimizer touches."""

    parameter: str = "float32"
    gradient: str = "float32"
    state: str = "float32"
    master: str = ""
    """Type of a separate master copy that is updated in place of the parameter; empty: none."""


def optimizer_state_bytes(optimizer: str, dtypes: DtypeOf | None = None) -> int:
    """Return the bytes of state per parameter: AdamW in float32 keeps 8, a float32 master copy 4 more.

    Step counters, one scalar a tensor, are left out.
    """
    dtypes = dtypes or DtypeOf()
    _check(optimizer, "fused")
    master = dtype_bytes(dtypes.master) if dtypes.master and optimizer != "none" else 0
    return _STATES[optimizer] * dtype_bytes(dtypes.state) + master


def optimizer_traffic_bytes(optimizer: str, dtypes: DtypeOf | None = None, implementation: str = "foreach") -> int:
    """Return the bytes read and written per parameter in one step."""
    dtypes = dtypes or DtypeOf()
    _check(optimizer, implementation)
    parameter, gradient, state, temporary = _TRAFFIC["fused" if implementation == "fused" else "foreach"][optimizer]
    updated = dtype_bytes(dtypes.master or dtypes.parameter)
    copied_out = dtype_bytes(dtypes.parameter) if dtypes.master and parameter else 0
    if dtypes.master and gradient:
        # The gradient is cast, its norm taken and scaled, in float32, before the optimizer reads it.
        copied_out += 4 * dtype_bytes(dtypes.master)
    return (
        parameter * updated
        + gradient * dtype_bytes(dtypes.gradient)
        + state * dtype_bytes(dtypes.state)
        + temporary * dtype_bytes(dtypes.state)
        + copied_out
    )


def optimizer_temporaries(optimizer: str) -> int:
    """Return the tensors of the size of one parameter that a step of torch's plain optimizer makes and drops."""
    _check(optimizer, "loop")
    return _TEMPORARIES[optimizer]


def allocated_bytes(tensor_bytes: float | npt.NDArray[Any], device_kind: str = "gpu") -> npt.NDArray[np.float64]:
    """Return what the allocator takes for tensors of `tensor_bytes`.

    Compare `torch.cuda.max_memory_allocated`; fragmentation, which
    `max_memory_reserved` contains, is not modelled.
    """
    step = ALLOCATION_BYTES if device_kind == "gpu" else _CPU_ALIGNMENT_BYTES
    rounded: npt.NDArray[np.float64] = np.ceil(np.asarray(tensor_bytes, dtype=np.float64) / step) * step
    return rounded


@dataclass(frozen=True, slots=True)
class Flat:
    """Contiguous copies that software makes of gradients, on one device; see `flat_bytes`."""

    beside: float = 0.0
    """Bytes of those that are there while activations are."""

    before_step: float = 0.0
    """Bytes of those that are made when backward has let go of all activations, for the optimizer's step."""

    @property
    def both(self) -> float:
        """Return the bytes of all of them."""
        return self.beside + self.before_step


_NO_COPIES = Flat()


def process_bytes(resting: float, moving: float, device: DeviceSpec, *, groups: int, flat: Flat = _NO_COPIES) -> float:
    """Return what `nvidia-smi` shows of a training process.

    `resting` bytes of tensors stay throughout (parameters, gradients, optimizer); `moving` ones come and go, and the
    allocator keeps more than their peak, and what `flat` copies need that find no room among them, as far as the device
    has it: before an allocation fails it gives back what is unused (`release_cached_blocks` of
    c10/cuda/CUDACachingAllocator.cpp). Needed is what is there at once. To these come the context, and what NCCL takes
    for each of `groups` process groups.
    """
    around = resting + device.reserved_bytes + groups * COMMUNICATOR_BYTES
    needed = around + at_once_bytes(moving, flat)
    kept = around + moving * (1.0 + ALLOCATOR_SLACK) + flat.both
    return max(needed, min(kept, float(device.memory_bytes)))


def at_once_bytes(moving: float, flat: Flat) -> float:
    """Return the most that tensors which come and go take at once, with the copies that software makes of gradients."""
    return max(moving + flat.beside, flat.both)


ALLOCATOR_SLACK = 0.237
"""Share of the tensors that come and go which the caching allocator holds beside them at the peak.

The median over 19 published logs of Megatron-LM (benchmarks/data/allocator_logs.csv): reserved bytes less those
allocated at the peak, over those allocated at the peak less those that stay. With it reserved bytes are off by 4 % in
the median.
"""

COMMUNICATOR_BYTES = 688 * 2**20
"""What a process group of more than two devices takes of each, once it has reduced: four A100 with NVLink, see
https://github.com/NVIDIA/nccl/issues/964 (read 2026-11-22; 544 MB for groups of two)."""

FLAT_BUCKET = 500_000_000
"""Elements of the buffer in which DeepSpeed reduces gradients: its default `reduce_bucket_size`."""


def flat_bytes(parameters: float, state_bytes: float, gradient_item: int, *, zero: int, replicas: int) -> Flat:
    """Return the bytes of the contiguous copies that DeepSpeed makes beside the tensors, on one device.

    Each is one allocation of gigabytes, for which freed activations are no room: segments of the caching allocator are
    never joined. `parameters`: how many the device holds; `state_bytes`: of Adam's state and float32 copies, 12 each of
    those that it updates. Before a step the gradients of these are flattened and cast to float32
    (`single_grad_partition` of runtime/zero/stage_1_and_2.py; without ZeRO casts and their flattened copy lie side by
    side, runtime/fp16/fused_optimizer.py), at stage 3 in runs of at most 1e9 (`sub_group_size`). Gradients that are
    summed in float32 are updated from where they lie, and a micro-batch's own are beside them
    (runtime/bf16_optimizer.py).
    """
    bucket = min(float(FLAT_BUCKET), parameters) * gradient_item if replicas > 1 else 0.0
    if gradient_item == dtype_bytes("float32"):
        return Flat(bucket + 2.0 * parameters)
    updated = state_bytes / _MIXED_STATE
    if zero == WHOLLY_SHARDED:
        updated = min(updated, _SUB_GROUP)
    copied = dtype_bytes("float32") + (gradient_item if zero else dtype_bytes("float32"))
    return Flat(bucket, updated * copied)


_MIXED_STATE = 12
"""Bytes a parameter of Adam's two moments and the copy that it updates, in float32."""

_SUB_GROUP = 1e9

WHOLLY_SHARDED = 3
"""ZeRO stage at which parameters are sharded at rest."""


def _check(optimizer: str, implementation: str) -> None:
    if optimizer not in _STATES:
        message = f"unknown optimizer {optimizer!r}{suggestion(optimizer, _STATES)}; known: {', '.join(_STATES)}"
        raise CostModelError(message)
    known = (*_TRAFFIC, "loop")
    if implementation not in known:
        message = f"unknown implementation {implementation!r}{suggestion(implementation, known)}; known: {known}"
        raise CostModelError(message)
