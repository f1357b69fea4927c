"""What this machine has, without torch."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from cost_models import catalog
from cost_models.cluster_file import shorthand_node
from cost_models.errors import ClusterError, suggestion
from cost_models.node import NodeSpec

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]


def detect_node(cpu_ranks: int | None = None) -> NodeSpec:
    """Return this machine as a node: its NVIDIA devices, else its CPU cores; or `cpu_ranks` on these, where given.

    Links and compute rates are the catalogue's for the recognised device, not
    measured. Raises `ClusterError` for a device that the catalogue lacks and
    for devices that differ.
    """
    lines = [] if cpu_ranks else _nvidia_smi()
    if not lines:
        return _cpu_node(cpu_ranks)
    if len(set(lines)) > 1:
        message = f"this machine mixes devices ({'; '.join(lines)}); describe it in a cluster file with two groups"
        raise ClusterError(message)
    name, _, memory_mib = lines[0].rpartition(",")
    node = shorthand_node(recognise(name.strip(), int(memory_mib)), len(lines))
    device = replace(node.device, memory_bytes=int(memory_mib) * 2**20)
    return replace(node, device=device)


def recognise(name: str, memory_mib: int) -> str:
    """Return the catalogue name of a device as nvidia-smi calls it, such as `NVIDIA A100-SXM4-80GB`."""
    upper = name.upper()
    for model, found in _MODELS:
        if all(part in upper for part in model):
            return found if isinstance(found, str) else found[memory_mib > _SMALL_MIB]
    known = catalog.names("devices")
    message = (
        f"the catalogue has no device {name!r}{suggestion(name, known)};"
        " describe it in a cluster file under `devices:` (memory, compute)"
    )
    raise ClusterError(message)


_SMALL_MIB = 48 * 1024
_MODELS: tuple[tuple[tuple[str, ...], str | tuple[str, str]], ...] = (
    (("A100", "PCI"), ("a100-pcie-40gb", "a100-pcie-80gb")),
    (("A100",), ("a100-sxm-40gb", "a100-sxm-80gb")),
    (("H100", "PCI"), "h100-pcie-80gb"),
    (("H100",), "h100-sxm-80gb"),
    (("H200",), "h200"),
    (("B200",), "b200"),
    (("V100", "16"), "v100-16gb"),
    (("V100",), "v100-32gb"),
    (("L40S",), "l40s"),
    (("A10G",), "a10g"),
    (("4090",), "rtx-4090"),
    (("L4",), "l4"),
)


def _nvidia_smi() -> list[str]:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _cpu_node(ranks: int | None) -> NodeSpec:
    cores = _cores()
    count = ranks or max(1, int(cores))
    node = shorthand_node("cpu", count)
    if count > cores:
        node = replace(node, cores=cores)
    memory_bytes = _memory_bytes()
    if memory_bytes is None:
        return node
    return replace(node, device=replace(node.device, memory_bytes=memory_bytes // count))


def _cores() -> float:
    """Return the cores that this process may use: those it is bound to, or fewer by its control group's limit."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _CPU_QUOTA.read_text().strip().partition(" ") if _CPU_QUOTA.is_file() else ("max", "", "")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def _memory_bytes() -> int | None:
    """Return the machine's memory, or its control group's limit where that is less."""
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and (text := group.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits, default=None)
