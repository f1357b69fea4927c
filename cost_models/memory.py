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


def process_bytes(tensor_bytes: float, device: DeviceSpec) -> float:
    """Return what `nvidia-smi` shows of a training process: tensors, what the allocator keeps beside them, context."""
    return tensor_bytes * (1.0 + ALLOCATOR_RESERVE) + device.reserved_bytes + COMMUNICATOR_BYTES


ALLOCATOR_RESERVE = 0.08
"""Share of live tensors that the caching allocator holds beside them at the peak: blocks that do not fit. Assumed."""

COMMUNICATOR_BYTES = 1.5 * 2**30
"""Buffers of NCCL's communicators, of which a 3D-parallel program has five to eight of 0.2 to 0.3 GiB each. Assumed."""


def usable_bytes(device: DeviceSpec, margin: float = 0.0) -> int:
    """Return the bytes left for tensors: capacity less context, less the fraction `margin` of the rest."""
    return int((device.memory_bytes - device.reserved_bytes) * (1.0 - margin))


def _check(optimizer: str, implementation: str) -> None:
    if optimizer not in _STATES:
        message = f"unknown optimizer {optimizer!r}{suggestion(optimizer, _STATES)}; known: {', '.join(_STATES)}"
        raise CostModelError(message)
    known = (*_TRAFFIC, "loop")
    if implementation not in known:
        message = f"unknown implementation {implementation!r}{suggestion(implementation, known)}; known: {known}"
        raise CostModelError(message)
