"""Unlike devices, nodes and links taken for equal ones: each figure is that of the slowest.

Ranks that compute equal shards and meet in collectives all go at the pace of the slowest: no operator, kernel or
message of a synchronous program ends before it has ended there. So a program on unlike devices is priced on one that
has of every figure the worst.

Not modelled: which device is slowest may change from operator to operator, and what one waits for in one operator it
may make up in the next before they meet.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cost_models.device import DeviceSpec
from cost_models.node import LinkSpec, NodeSpec

_SIZES = 3
"""Sizes of a matrix product, in each of which its rate saturates."""


def weakest_device(devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return a device on which nothing runs faster, and no more fits, than on any of those given.

    Exact for products but for the quantisation into waves of tiles, which is that of the device with the slowest
    products: a count of tiles may suit it better than another device.
    """
    kinds = distinct(devices)
    if len(kinds) == 1:
        return kinds[0]
    named = replace(
        kinds[0],
        name=f"weakest of {' and '.join(dict.fromkeys(each.name for each in kinds))}",
        catalog="",
        kind="cpu" if any(each.kind == "cpu" for each in kinds) else kinds[0].kind,
        kernel_launch_s=max(each.kernel_launch_s for each in kinds),
        transcendentals_per_s=_least_given(each.transcendentals_per_s for each in kinds),
        host_s=max(each.host_s for each in kinds),
        host_waits=any(each.host_waits for each in kinds),
        released=max(each.released for each in kinds),
        fusion=min(each.fusion for each in kinds),
        sums_in_products=all(each.sums_in_products for each in kinds),
    )
    peak = {key: min(each.peak_flops[key] for each in kinds) for key in _common(each.peak_flops for each in kinds)}
    return _with_attention(_with_products(_with_memory(named, kinds), kinds, peak), kinds, peak)


def _with_memory(device: DeviceSpec, kinds: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return a device with the smallest and slowest memory of those given."""
    reached = min(each.memory_bytes_per_s * each.memory_efficiency for each in kinds)
    bandwidth = min(each.memory_bytes_per_s for each in kinds)
    return replace(
        device,
        memory_bytes=min(each.memory_bytes for each in kinds),
        reserved_bytes=max(each.reserved_bytes for each in kinds),
        memory_bytes_per_s=bandwidth,
        memory_efficiency=reached / bandwidth,
        # Half of the rate is reached where moving takes as long as starting: the longest start at the least rate.
        memory_half_bytes=reached
        * max(each.memory_half_bytes / (each.memory_bytes_per_s * each.memory_efficiency) for each in kinds),
        fresh_bytes=int(_least_given(each.fresh_bytes for each in kinds)),
        fresh_bytes_per_s=_least_given(each.fresh_bytes_per_s for each in kinds),
    )


def _with_products(device: DeviceSpec, kinds: Sequence[DeviceSpec], peak: Mapping[str, float]) -> DeviceSpec:
    """Return a device with the slowest matrix products and convolutions of those given."""
    product = {key: min(each.peak_flops[key] * each.matmul_efficiency_for(key) for each in kinds) for key in peak}
    slowest = min(kinds, key=lambda each: _over(each, product))
    convolving = [each.for_convolutions() for each in kinds] if any(k.convolution_efficiency for k in kinds) else []
    convolution = {
        key: min(each.peak_flops[key] * each.matmul_efficiency_for(key) for each in convolving)
        for key in (peak if convolving else ())
    }
    return replace(
        device,
        peak_flops=dict(peak),
        matmul_efficiency={key: product[key] / peak[key] for key in peak},
        default_matmul_efficiency=min(each.default_matmul_efficiency for each in kinds),
        matmul_half=_halves(kinds, product),
        matmul_best=_bests(kinds, peak),
        convolution_efficiency={key: rate / peak[key] for key, rate in convolution.items()},
        convolution_half=_halves(convolving, convolution) if convolving else kinds[0].convolution_half,
        multiprocessors=slowest.multiprocessors,
    )


def _with_attention(device: DeviceSpec, kinds: Sequence[DeviceSpec], peak: Mapping[str, float]) -> DeviceSpec:
    """Return a device with the slowest attention of those given."""
    return replace(
        device,
        attention_efficiency=min(
            (each.peak_flops[key] * each.attention_efficiency / peak[key] for each in kinds for key in peak),
            default=min(each.attention_efficiency for each in kinds),
        ),
        attention_half=max(each.attention_half for each in kinds),
        attention_block=max(each.attention_block for each in kinds),
        early_attention_efficiency=min(each.early_attention_efficiency or each.attention_efficiency for each in kinds),
        vendor_attention_efficiency=min(
            each.vendor_attention_efficiency or each.attention_efficiency for each in kinds
        ),
    )


def weakest_link(links: Sequence[LinkSpec]) -> LinkSpec | None:
    """Return links that are as slow as the slowest of those given; `None` of none."""
    if not links:
        return None
    slowest = min(links, key=lambda link: link.bytes_per_s * link.efficiency)
    return replace(
        slowest,
        latency_s=max(link.latency_s for link in links),
        call_overhead_s=max(link.call_overhead_s for link in links),
        in_switch_reduction=all(link.in_switch_reduction for link in links),
    )


def weakest_node(nodes: Sequence[NodeSpec]) -> NodeSpec:
    """Return a node of the weakest device, links and adapter of nodes with equally many devices."""
    # Of machines whose ranks share cores, that counts where a rank has least of one.
    tightest = min(nodes, key=_cores_of_each)
    return NodeSpec(
        name=" and ".join(dict.fromkeys(node.name for node in nodes)),
        device=weakest_device([node.device for node in nodes]),
        count=nodes[0].count,
        links=weakest_link([node.links for node in nodes if node.links is not None]),
        nic=weakest_link([node.nic for node in nodes if node.nic is not None]),
        cores=tightest.cores,
        nodes_per_machine=tightest.nodes_per_machine,
    )


def strongest_peaks(devices: Sequence[DeviceSpec]) -> dict[str, float]:
    """Return the highest dense peak of any of the devices in FLOP/s, by data type."""
    peaks: dict[str, float] = {}
    for each in devices:
        peaks |= {key: max(rate, peaks.get(key, 0.0)) for key, rate in each.peak_flops.items()}
    return peaks


def distinct(devices: Iterable[DeviceSpec]) -> list[DeviceSpec]:
    """Return devices that differ in more than their names, in order."""
    found: list[DeviceSpec] = []
    for each in devices:
        if not any(same_figures(each, other) for other in found):
            found.append(each)
    return found


def same_figures(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Return whether two devices are equal but for their names."""
    return one is other or replace(one, name="", catalog="") == replace(other, name="", catalog="")


def same_node(one: NodeSpec, other: NodeSpec) -> bool:
    """Return whether two nodes are equal but for names."""
    alike = same_figures(one.device, other.device)
    return alike and replace(one, name="", device=other.device) == replace(other, name="")


def _cores_of_each(node: NodeSpec) -> float:
    return node.cores / (node.count * node.nodes_per_machine) if node.cores else math.inf


def _common(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the data types that all have a rate for, in the first one's order."""
    first, *others = mappings
    return [key for key in first if all(key in each for each in others)]


def _over(device: DeviceSpec, rates: Mapping[str, float]) -> float:
    """Return how many times the given rates of large products a device reaches, of the data type where it is least."""
    reached = (device.peak_flops[key] * device.matmul_efficiency_for(key) / rate for key, rate in rates.items())
    return min(reached, default=1.0)


def _halves(kinds: Sequence[DeviceSpec], rates: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the sizes at half the rate, such that no product of any size is faster than on one of the devices.

    (m + hm) (n + hn) (k + hk) / rate grows least where each size takes a third of the difference in rate.
    """
    shares = [_over(each, rates) ** (-1.0 / _SIZES) for each in kinds]
    hm, hn, hk = (
        max(each.matmul_half[size] * share for each, share in zip(kinds, shares, strict=True)) for size in range(_SIZES)
    )
    return hm, hn, hk


def _bests(kinds: Sequence[DeviceSpec], peak: Mapping[str, float]) -> dict[str, float]:
    """Return the least of the rates known to be the best of any product, by data type, over the peaks given."""
    rates = {key: _least_given(each.peak_flops[key] * each.matmul_best.get(key, 0.0) for each in kinds) for key in peak}
    return {key: rate / peak[key] for key, rate in rates.items() if rate}


def _least_given(rates: Iterable[float]) -> float:
    """Return the least of those that are known; 0 stands for what sets no limit."""
    return min((rate for rate in rates if rate), default=0.0)
