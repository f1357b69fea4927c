"""Two CPU hosts with as much memory as a test wants."""

from __future__ import annotations

from cost_models.cluster import ClusterSpec


def cluster(memory_bytes: int, hosts: int = 2) -> ClusterSpec:
    """Return two hosts, or more, of one rank each that holds at most so many bytes, nothing reserved."""
    return ClusterSpec.from_dict({
        "version": 1,
        "name": "two",
        "devices": {"core": {"preset": "cpu", "memory": {"capacity": f"{memory_bytes} B", "reserved": "0 B"}}},
        "nodes": {"host": {"device": "core", "count": 1, "nic": {"bandwidth": "1 Gbit/s", "latency": "100us"}}},
        "groups": [{"node": "host", "count": hosts}],
    })  # fmt: skip
