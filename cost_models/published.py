"""Published measurements of collectives and matmuls: one row of a table to measured and predicted seconds.

A row is read as it was published. What it does not say is an error that names
the column; only what `nccl-tests` defines (bus bandwidth) is worked out.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cost_models import catalog
from cost_models.cluster import ClusterSpec
from cost_models.cluster_file import preset_node, shorthand_node
from cost_models.collectives import OPS, collective_s
from cost_models.compute import matmul_s
from cost_models.device import catalogued_device
from cost_models.errors import CostModelError
from cost_models.node import NodeGroup, NodeSpec
from cost_models.topology import Hop, axis_hops, links_share

MIB = 2**20

_BUS_FACTOR: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "point_to_point": lambda p: 1.0,
}
"""Bus bandwidth over algorithm bandwidth for p ranks: nccl-tests, doc/PERFORMANCE.md."""

_OP_NAMES = {each.replace("_", ""): each for each in OPS} | {"alltoall": "all_to_all", "sendrecv": "point_to_point"}

# What a hardware text calls a device, the longer names first: "GB200" is no B200.
_DEVICE_TEXTS = (
    (r"\bGB200\b", "gb200"),
    (r"\bGH200\b", "gh200"),
    (r"\bB300\b", "b300"),
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200"),
    (r"\bH100\b.*\bPCIe\b", "h100-pcie-80gb"),
    (r"\bH100\b", "h100-sxm-80gb"),
    (r"\bA100\b.*\b40 ?GB\b.*\bPCIe\b|\bA100\b.*\bPCIe\b.*\b40 ?GB\b", "a100-pcie-40gb"),
    (r"\bA100\b.*\bPCIe\b", "a100-pcie-80gb"),
    (r"\bA100\b.*\b40 ?GB\b", "a100-sxm-40gb"),
    (r"\bA100\b", "a100-sxm-80gb"),
    (r"\bV100\b", "v100-32gb"),
    (r"\bMI355X\b", "mi355x"),
    (r"\bMI325X\b", "mi325x"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI250X\b", "mi250x"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA10G\b", "a10g"),
    (r"\bRTX ?4090\b", "rtx-4090"),
)
_INSTANCES = ("p4de", "p4d", "p5en", "p5", "p6-b200")
_NODE_DEVICES = 8


@dataclass(frozen=True)
class Priced:
    """One published figure beside this model's; errors are relative to the published time."""

    line: int
    """Line of the file."""

    label: str
    source: str
    group: str
    """Rows that differ in size only: within it, predictions should have the order of the measurements."""

    part: str
    """The part of the file that errors are given for separately, such as `below 1 MiB`; empty: none."""

    measured_s: float
    predicted_s: float
    measured_bytes: float | None = None
    """Peak memory of a device, where the row has one."""

    predicted_bytes: float | None = None

    device_bytes: float | None = None
    """What a device of the row has; all that ran on it fitted."""

    assumed: str = ""
    """What the row does not say and was assumed to price it; empty: nothing."""

    @property
    def is_too_large(self) -> bool:
        """Return whether more is predicted than the device has, on which it did run."""
        if self.predicted_bytes is None or self.device_bytes is None:
            return False
        return self.predicted_bytes > self.device_bytes

    @property
    def memory_error(self) -> float | None:
        """Return predicted over measured peak memory, less 1; None where none was measured."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def error(self) -> float:
        """Return predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Collective:
    """One row of a table of collectives."""

    hardware: str
    nodes: int
    ranks: int
    op: str
    algorithm: str
    size_bytes: float
    measured_s: float


def price_collective(row: Mapping[str, str], line: int) -> Priced:
    """Return a row of `collectives.csv` with the time that the model gives it.

    Raises `CostModelError` for what the row does not say or the catalogue does not know.
    """
    read = read_collective(row)
    predicted_s = collective_s(read.op, read.size_bytes, collective_hops(read), read.algorithm)
    how = "" if read.algorithm == "auto" else f" ({read.algorithm})"
    ranks = f"{read.ranks} ranks on {read.nodes} node{'s' if read.nodes > 1 else ''}"
    return Priced(
        line=line,
        label=f"{read.op}{how} of {read.size_bytes:.0f} bytes, {ranks}, {read.hardware}",
        source=row["source"],
        group=f"{read.hardware}|{read.nodes}|{read.ranks}|{read.op}|{read.algorithm}",
        part="below 1 MiB" if read.size_bytes < MIB else "1 MiB and above",
        measured_s=read.measured_s,
        predicted_s=float(predicted_s),
    )


def read_collective(row: Mapping[str, str]) -> Collective:
    """Return what a row of `collectives.csv` says.

    The time is the one that the notes print, else follows from `busbw` or `algbw`, in GB/s.
    """
    op, algorithm = _operation(row["op"])
    nodes, ranks = _whole(row, "nodes"), _whole(row, "gpus")
    if ranks < 2 or ranks % nodes:
        raise CostModelError(f"{ranks} GPUs on {nodes} nodes: needs at least 2 GPUs, as many on every node")
    size = _positive(row, "bytes")
    measured_s = _measured_s(row, op, ranks, size)
    return Collective(row["hardware"], nodes, ranks, op, algorithm, size, measured_s)


def collective_cluster(read: Collective) -> ClusterSpec:
    """Return the row's devices as a cluster: no more of them than took part."""
    node = _node(read.hardware, read.ranks // read.nodes)
    return ClusterSpec(read.hardware, (NodeGroup(node, read.nodes),))


def collective_hops(read: Collective) -> tuple[Hop, ...]:
    """Return the levels that a group of all ranks of the row crosses."""
    return axis_hops(collective_cluster(read).levels, (read.ranks,), 0)


def price_matmul(row: Mapping[str, str], line: int) -> Priced:
    """Return a row of `matmul_achievable.csv` with the time that the model gives the row's best shape.

    Raises `CostModelError` for what the row does not say or the catalogue does not know.
    """
    device = catalogued_device(device_named(row["gpu"], "gpu"))
    dtype = row["dtype"].partition("_")[0]  # fp8_e4m3fn: the exponent's width does not change the rate
    shape = re.fullmatch(r"(\d+)x(\d+)x(\d+)", row["best_shape_mxnxk"].strip())
    if shape is None or "0" in shape.groups():
        raise CostModelError(f"best_shape_mxnxk is {row['best_shape_mxnxk']!r}, not such as 4096x4096x8192")
    m, n, k = (int(size) for size in shape.groups())
    measured_s = 2 * m * n * k / (_positive(row, "achieved") * 1e12)
    return Priced(
        line=line,
        label=f"{dtype} matmul {m} x {n} x {k} on {row['gpu']}",
        source=row.get("source") or "matmul_achievable",
        group=dtype,
        part=dtype,
        measured_s=measured_s,
        predicted_s=float(matmul_s(1, m, n, k, dtype, device)),
    )


def _node(hardware: str, per_node: int) -> NodeSpec:
    """Return a node of the row's hardware with `per_node` of its devices in use.

    A device uses its own adapter, so that part of a node has that part of its
    adapters; where devices are joined pairwise (`mesh`, `cube-mesh`), also of its links.
    """
    words = hardware.lower()
    preset = next((each for each in _INSTANCES if re.search(rf"\b{each}\b", words)), None)
    device = device_named(hardware, "hardware")
    full = preset_node(preset) if preset else shorthand_node(device, max(_NODE_DEVICES, per_node))
    if full.device.name != device or per_node > full.count:
        raise CostModelError(f"hardware {hardware!r} is no {full.name} with {per_node} devices of {device}")
    links, nic = full.links, full.nic
    if links is not None and per_node > 1:
        used = links_share(links.topology, per_node, full.count)
        links = replace(links, bytes_per_s=links.bytes_per_s * used)
    if nic is not None:
        rate = re.search(r"\b(?:(\d+) ?x ?)?(\d+) ?Gb(?:it)?/s per node", hardware)
        nominal = int(rate[1] or 1) * int(rate[2]) * 1e9 / 8 if rate else nic.bytes_per_s
        nic = replace(nic, bytes_per_s=nominal * per_node / full.count)
    return replace(full, count=per_node, links=links, nic=nic)


def device_named(text: str, column: str) -> str:
    """Return the catalogue's name of the device that a text names.

    Raises `CostModelError` naming `column` where the catalogue has no such device.
    """
    for pattern, name in _DEVICE_TEXTS:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    if text in catalog.names("devices"):
        return text
    raise CostModelError(f"{column} {text!r} names no device of the catalogue (see autopar cluster list)")


def _operation(text: str) -> tuple[str, str]:
    """Return operation and algorithm of a text such as `all_reduce ring (NVLS off)`."""
    name, _, rest = text.strip().partition(" ")
    op = _OP_NAMES.get(re.sub(r"[-_]", "", name.lower()))
    if op is None:
        raise CostModelError(f"op {text!r} is no collective; known: {', '.join(OPS)}")
    said = rest.lower()
    if "ring" in said:
        return op, "ring"
    if "nvls" in said:
        return op, "in_switch"
    return op, "tree" if "tree" in said else "auto"


def _measured_s(row: Mapping[str, str], op: str, ranks: int, size: float) -> float:
    printed = re.search(r"time ([\d.]+) us", row.get("notes") or "")
    if printed:
        return float(printed[1]) * 1e-6
    for column, factor in (("busbw", _BUS_FACTOR[op](ranks)), ("algbw", 1.0)):
        if row.get(column):
            return size * factor / (_positive(row, column) * 1e9)
    raise CostModelError("gives no time: none in notes, and busbw and algbw are empty")


def _positive(row: Mapping[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise CostModelError(f"{column} is {row[column]!r}, not a number above 0")
    return value


def _whole(row: Mapping[str, str], column: str) -> int:
    value = _positive(row, column)
    if value != int(value):
        raise CostModelError(f"{column} is {row[column]!r}, not a whole number")
    return int(value)
