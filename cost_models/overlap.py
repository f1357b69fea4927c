"""Communication that computation beside it does not hide.

    exposed = max(0, comm - efficiency * compute)

`efficiency` is below 1 because communication kernels take multiprocessors and
memory bandwidth from the computation (and, on CPU, the cores themselves).

On a GPU what they take grows with the bytes that they move, not with how long they
wait for a link: NCCL gives a ring as many channels, each a multiprocessor, as its
rate needs, and every byte that passes a device is written, read and written again.

    efficiency = 1 - accesses * B / W
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cost_models.catalog import Figure
from cost_models.device import DeviceSpec
from cost_models.errors import CostModelError
from cost_models.formula import Formula, Number, registry
from cost_models.topology import Hop

FORMULAS: Mapping[str, Formula] = registry(
    Formula(
        "exposed",
        "Max(0, comm - efficiency*compute)",
        (
            ("comm", "communication that may overlap, s"),
            ("compute", "computation beside it, s"),
            ("efficiency", "fraction of the computation that hides communication"),
        ),
        "the linear relaxation that the search solves: z >= comm - efficiency * compute, z >= 0",
    ),
    Formula(
        "gpu_efficiency",
        "Max(0, 1 - accesses*B/W)",
        (
            ("accesses", "accesses of memory for a byte that passes a device"),
            ("B", "bandwidth that the group reaches, byte/s"),
            ("W", "memory bandwidth that is reached, byte/s"),
        ),
        "memory traffic of a ring (Patarasuk & Yuan 2009), taken from the computation beside it",
    ),
)

EFFICIENCY: Mapping[str, Figure] = {
    "cpu": Figure(
        0.81,
        "fraction",
        "measured",
        "shared/testbed/netrun.py, 2 hosts at 1 Gbit/s: 0.29 s of all-reduce beside 0.32 s of matmul end after 0.35 s"
        " together, so (0.29 + 0.32 - 0.35) / 0.32 of the computation hid communication",
    ),
    "host": Figure(
        0.0,
        "fraction",
        "measured",
        "over loopback gloo burns the core that the computation needs; nothing overlaps",
    ),
}
"""Overlap efficiency of a CPU, and `host` for one whose level is loopback."""

ACCESSES: dict[str, Figure] = {
    "gpu": Figure(
        4.9,
        "count",
        "fitted",
        "benchmarks/refit.py on benchmarks/data/training_steps.csv; 4.2 to 6.3 without one source. 3 of a ring's kernel"
        " (written by the neighbour, read, written on), the others stand for the multiprocessors that run it",
    ),
}
"""Accesses of a device's memory for each byte of a collective that passes it."""


def overlap_efficiency(device: DeviceSpec, hops: Sequence[Hop], topology: str) -> float:
    """Return the fraction of the computation that hides a collective of a group that crosses `hops`.

    `topology` is that of the outermost level. Raises `CostModelError` for a kind of device that is not known.
    """
    if device.kind == "gpu":
        bandwidth = device.memory_bytes_per_s * device.memory_efficiency
        ring = min((hop.achieved_bytes_per_s for hop in hops), default=0.0)
        accesses = float(ACCESSES["gpu"].value)
        return float(FORMULAS["gpu_efficiency"].evaluate(accesses=accesses, B=ring, W=bandwidth))
    key = "host" if topology == "host" else device.kind
    if key not in EFFICIENCY:
        message = f"no overlap efficiency for device kind {device.kind!r}; known: gpu, cpu"
        raise CostModelError(message)
    return float(EFFICIENCY[key].value)


def exposed_s(comm_s: Number, compute_s: Number, efficiency: float) -> npt.NDArray[np.float64]:
    """Return the seconds of communication that stay exposed beside `compute_s`."""
    return FORMULAS["exposed"].evaluate(comm=comm_s, compute=compute_s, efficiency=efficiency)
