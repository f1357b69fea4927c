"""How much work the ranks of one machine do at once: products a second of one rank alone, and of all of them."""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.runtime.measure_effort import THOROUGH, Effort
from autopar.runtime.measure_kernels import Clock, copies
from autopar.runtime.ranks import Ranks

_ROUND_S = 0.4
"""Long enough for the system's scheduler to share cores evenly."""

_SIZES = (512, 1024, 1024)
"""m, n, k: a layer of some width, weights that no cache holds."""


@dataclass(frozen=True)
class MeasuredCores:
    """What was found on the machine that does least at once."""

    ranks: int
    """Of the machine."""

    cores: tuple[float, ...]
    """Of each round: products a second of all its ranks together over those of one rank alone."""

    @property
    def value(self) -> float:
        """Return the median, and at most one core a rank."""
        return min(float(self.ranks), statistics.median(self.cores))


def measure_cores(ranks: Ranks, effort: Effort = THOROUGH) -> MeasuredCores | None:
    """Return how many ranks' worth of work the ranks of a machine do at once; all ranks must call this.

    `None` on devices other than CPU cores, for machines of one rank, and where machines have unlike numbers of ranks or
    ranks that are no run. Ranks that do not compute wait for a message; all machines are at work at the same time.
    """
    size = machine_ranks(ranks.gather(_machine()))
    if ranks.device.type != "cpu" or size is None or size == 1:
        return None
    products = _Products()
    found: list[tuple[float, ...]] = []
    for _ in range(effort.runs):
        alone = ranks.gather(_rate(products, at_work=ranks.rank % size == 0))
        together = ranks.gather(_rate(products, at_work=True))
        firsts = range(0, ranks.world_size, size)
        found.append(tuple(sum(together[first : first + size]) / alone[first] for first in firsts))
    return min((MeasuredCores(size, each) for each in zip(*found, strict=True)), key=lambda each: each.value)


def machine_ranks(machines: Sequence[str]) -> int | None:
    """Return how many ranks each machine has, given that of every rank; `None` where these are no equal runs."""
    size = Counter(machines)[machines[0]]
    runs = [set(machines[first : first + size]) for first in range(0, len(machines), size)]
    apart = len(runs) == len(set(machines)) and all(len(run) == 1 for run in runs)
    return size if apart and len(machines) % size == 0 else None


class _Products:
    """Products with operands that take turns, so that caches do not hold them."""

    def __init__(self) -> None:
        m, n, k = _SIZES
        clock = Clock(torch.device("cpu"))
        self._turns = itertools.cycle(copies(clock.random(m, k), clock.random(k, n), clock.random(m, n)))
        self.next()

    def next(self) -> None:
        a, b, out = next(self._turns)
        torch.mm(a, b, out=out)


def _rate(products: _Products, *, at_work: bool) -> float:
    """Return the products a second of this rank, from when all ranks are there; 0 if it only waits for the others."""
    if dist.is_initialized():
        dist.barrier()
    done, start, spent = 0, time.perf_counter(), 0.0
    while at_work and spent < _ROUND_S:
        products.next()
        done, spent = done + 1, time.perf_counter() - start
    return done / spent if done else 0.0


def _machine() -> str:
    """Return what tells running systems apart: network namespaces and containers of one have the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="utf-8").strip() if boot.is_file() else socket.gethostname()
