"""Clusters of unlike devices: at whose pace ranks go that work in step, and what the others could do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.figures import format_bytes
from autopar.ir.plan import Stage, Warned
from cost_models.cluster import ClusterSpec
from cost_models.device import DeviceSpec
from cost_models.units import format_rate
from cost_models.weakest import distinct, same_figures, strongest_peaks


def peak_share(cluster: ClusterSpec, dtype: str) -> float:
    """Return the peak of the slowest device over the mean of all, to which MFU refers; 1 where all are equal."""
    if cluster.is_homogeneous:
        return 1.0
    peaks = [each.flops_for(dtype) for each in cluster.devices]
    return min(peaks) * len(peaks) / sum(peaks)


def named(devices: Sequence[DeviceSpec]) -> str:
    """Return devices as people read them, equal ones counted: `8 x h100, 8 x a100`."""
    kinds = distinct(devices)
    return ", ".join(f"{sum(same_figures(kind, each) for each in devices)} x {kind.name}" for kind in kinds)


def waiting(cluster: ClusterSpec, stages: Sequence[Stage], dtype: str) -> Iterator[Warned]:
    """Yield what devices wait for that share a stage, or the whole program, with slower ones."""
    devices = cluster.devices
    for ranks in dict.fromkeys(stage.ranks for stage in stages):
        found = [devices[rank] for rank in ranks]
        if len(distinct(found)) < 2:
            continue
        peak = min(each.flops_for(dtype) for each in found)
        least = min(each.memory_bytes for each in found)
        yield Warned(
            code="unlike-devices",
            text=(
                f"{named(found)} work in step: all go at the pace of the slowest "
                f"({_rate(peak)} of up to {_rate(strongest_peaks(found)[dtype])} in {dtype}) and hold no more than the "
                f"smallest ({format_bytes(least)} of up to {format_bytes(max(e.memory_bytes for e in found))}); "
                "pipeline stages on devices of one kind each (--fix pp=N) do not wait so"
            ),
            location=f"ranks {ranks[0]} to {ranks[-1]}",
        )


def _rate(peak: float) -> str:
    return format_rate(peak, "FLOP/s")
