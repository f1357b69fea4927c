"""Communication that computation beside it does not hide.

    exposed = max(0, comm - efficiency * compute)

`efficiency` is below 1 because communication kernels take multiprocessors and
memory bandwidth from the computation (and, on CPU, the cores themselves).
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cost_models.catalog import Figure
from cost_models.errors import CostModelError
from cost_models.formula import Formula, Number, registry

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
)

EFFICIENCY: Mapping[str, Figure] = {
    "gpu": Figure(
        0.74,
        "fraction",
        "fitted",
        "sharded data parallelism in benchmarks/data/training_steps.csv: computation beside NCCL lacks 16 to 24 of"
        " 108 to 132 multiprocessors, memory bandwidth and clock",
    ),
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
"""Overlap efficiency by kind of device, and `host` for a CPU whose level is loopback."""


def overlap_efficiency(device_kind: str, topology: str) -> Figure:
    """Return the overlap efficiency of a device kind on links of `topology`, with its source."""
    key = "host" if topology == "host" else device_kind
    if key not in EFFICIENCY:
        message = f"no overlap efficiency for device kind {device_kind!r}; known: gpu, cpu"
        raise CostModelError(message)
    return EFFICIENCY[key]


def exposed_s(comm_s: Number, compute_s: Number, efficiency: float) -> npt.NDArray[np.float64]:
    """Return the seconds of communication that stay exposed beside `compute_s`."""
    return FORMULAS["exposed"].evaluate(comm=comm_s, compute=compute_s, efficiency=efficiency)
