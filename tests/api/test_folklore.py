"""The free plan against what an expert would try by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from autopar.api import plan_captured
from autopar.capture import Captured
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from cost_models.cluster import ClusterSpec
from tests.support.remembering import remembered

_TIE = 1.02
"""A plan with fewer parts is taken where it is as fast within two per cent."""


class Block(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tagger(nn.Module):
    """Blocks of given widths between a table and a head."""

    def __init__(self, widths: tuple[int, ...], vocabulary: int, hidden: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, width) for width in widths)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tagger(widths: tuple[int, ...], vocabulary: int) -> Captured:
    with torch.device("meta"):
        return remembered(Tagger(widths, vocabulary), (torch.zeros(24, 32, dtype=torch.int64),))


def cluster(per_node: int, nodes: int, *, memory: str, links: str, nic: str) -> ClusterSpec:
    """Return small GPUs."""
    capacity = {"capacity": memory, "reserved": "0 B", "bandwidth": "200 GB/s"}
    joined = {"bandwidth": links, "latency": "10us", "topology": "switch"}
    return ClusterSpec.from_dict({
        "version": 1,
        "name": "small",
        "devices": {"small": {"preset": "a100-sxm-40gb", "memory": capacity, "compute": {"fp32": "200 GFLOP/s"}}},
        "nodes": {
            "host": {
                "device": "small", "count": per_node, "links": joined, "nic": {"bandwidth": nic, "latency": "30us"},
            },
        },
        "groups": [{"node": "host", "count": nodes}],
    })  # fmt: skip


def folklore(per_node: int, nodes: int) -> list[Mapping[str, int | str]]:
    """Return what is usually tried: one kind of parallelism, tensors inside nodes, stages across them."""
    every = per_node * nodes
    tried: list[Mapping[str, int | str]] = [
        {"dp_replicate": every}, {"dp_shard": every}, {"tp": every}, {"pp": every, "microbatch": 3},
    ]  # fmt: skip
    if per_node > 1 < nodes:
        tried += [{"tp": per_node, "dp_shard": nodes}, {"tp": per_node, "pp": nodes, "microbatch": 2}]
    return tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "vocabulary", "per_node", "nodes", "memory"),
    [
        pytest.param((1024,) * 2, 4096, 1, 2, "36 MiB", id="two hosts, little memory"),
        pytest.param((256, 1024), 512, 2, 2, "12 MiB", id="uneven layers, two nodes"),
    ],
)
def test_the_free_plan_is_no_slower_than_folklore(
    widths: tuple[int, ...], vocabulary: int, per_node: int, nodes: int, memory: str
):
    captured = tagger(widths, vocabulary)
    spec = cluster(per_node, nodes, memory=memory, links="4 GB/s", nic="1 Gbit/s")

    def plan(fix: Mapping[str, int | str]) -> Plan:
        return plan_captured(captured, "Tagger", spec, PlanOptions.parse(fix=fix, memory_margin=0.0), Silent())

    times = {}
    for fix in folklore(per_node, nodes):
        try:
            times[tuple(fix.items())] = plan(fix).estimates.step_time_s
        except InfeasibleError:
            continue
    free = plan({})

    assert times
    assert free.estimates.step_time_s <= _TIE * min(times.values()), times
    assert free.solver.bound <= min(times.values()) * (1 + 1e-9)
