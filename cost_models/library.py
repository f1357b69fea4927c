"""The communication library of a cluster: which algorithms it has, and what they cost beyond the wire.

NCCL (and RCCL) on GPUs pipeline chunks of a bounded size and change to a
low-latency protocol for small messages; gloo on CPU hosts does neither. The
constants are one set a library, for every fabric: what differs between fabrics
is the bandwidth and latency of their links (catalogue, `links` and `nics`).
"""

import math
from dataclasses import dataclass
from functools import cache

from cost_models import catalog


@dataclass(frozen=True)
class Library:
    """Constants of one communication library; sources are in the catalogue."""

    name: str
    """`nccl` or `gloo`."""

    tree_efficiency: float
    """Bandwidth of a double binary tree over that of a ring on the same links."""

    in_switch_efficiency: float
    """Bandwidth of in-switch reduction over that of a ring on the same links."""

    chunk_fill: float
    """Time to fill a pipeline of chunks, over that with the best chunk size, 2 sqrt(A N)."""

    fill_limit: float = math.inf
    """Largest fill in units of the latency A: chunks do not grow beyond the library's buffers."""

    ring_latency_factor: float = 1.0
    """Latency of a ring's message at full bandwidth over that of a small message."""

    low_latency_rate: float = 0.0
    """Bandwidth of the low-latency protocol over the full one; 0: the library has none."""


@cache
def catalogued_library(name: str) -> Library:
    """Return the library of the catalogue that is called `name`."""
    entry = catalog.entry("libraries", name)
    return Library(
        name=name,
        tree_efficiency=catalog.number(entry, "tree_efficiency"),
        in_switch_efficiency=catalog.number(entry, "in_switch_efficiency"),
        chunk_fill=catalog.number(entry, "chunk_fill"),
        fill_limit=catalog.number(entry, "fill_limit", math.inf),
        ring_latency_factor=catalog.number(entry, "ring_latency_factor", 1.0),
        low_latency_rate=catalog.number(entry, "low_latency_rate", 0.0),
    )


def library_of(device_kind: str) -> Library:
    """Return the library that devices of a kind (`gpu` or `cpu`) communicate with."""
    return catalogued_library("gloo" if device_kind == "cpu" else "nccl")


def nccl() -> Library:
    """Return NCCL's constants."""
    return catalogued_library("nccl")
