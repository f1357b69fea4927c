"""Seconds of collectives on each link level, alone and beside computation, as the runtime issues them.

A level is measured by groups of one rank an endpoint; where an endpoint has several ranks the others wait, so that a
group has the level for itself. Seconds are those of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.direct import DIRECT
from autopar.runtime.gloo import is_gloo, one_thread_backend
from autopar.runtime.measure_effort import THOROUGH, Effort
from autopar.runtime.ranks import Ranks

Sample = dict[str, Any]

_C10D = torch.ops._c10d_functional
_SIZES = tuple(4**i for i in range(2, 14))
"""Bytes of the whole tensor, 16 B to 64 MiB."""

_BESIDE_LEAST, _SMALL, _CALLS = 2**22, 2**14, 10
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")


@dataclass(frozen=True)
class Place:
    """Where this rank is on one level."""

    level: str
    fanout: int
    group: Any
    members: tuple[int, ...]
    takes_part: bool


def measure_links(levels: Mapping[str, int], ranks: Ranks, effort: Effort = THOROUGH) -> list[Sample]:
    """Return timed collectives of every level, given names and fanouts of the levels from inner to outer.

    All ranks must call this; all get the same. Sizes beyond the first that takes longer than `effort` allows are left
    out.
    """
    found: list[Sample] = []
    for place in _places(levels, ranks):
        longest: dict[str, float] = {}
        for size in _SIZES:
            for op in _OPS:
                if longest.get(op, 0.0) > effort.longest_s:
                    continue
                sample = _timed(op, size, place, ranks, effort)
                longest[op] = max(sample["seconds"])
                found.append(sample)
        if ranks.device.type == "cpu":
            found += _beside(place, ranks, effort)
    return found


def _places(levels: Mapping[str, int], ranks: Ranks) -> Iterator[Place]:
    inside = 1
    backend = one_thread_backend() if is_gloo(ranks.device.type) else None
    for name, fanout in levels.items():
        outside = inside * fanout
        if fanout > 1:
            mine: Place | None = None
            for first in range(ranks.world_size):
                if first % outside >= inside:
                    continue
                members = tuple(range(first, first + outside, inside))
                group = dist.new_group(list(members), backend=backend)
                if ranks.rank in members:
                    # Of the groups that leave the same endpoints only the first is at work.
                    mine = Place(name, fanout, group, members, takes_part=first % inside == 0)
            if mine is not None:
                yield mine
        inside = outside


def _timed(op: str, size: int, place: Place, ranks: Ranks, effort: Effort) -> Sample:
    """Return seconds of one collective; of small ones on a CPU also what the process's threads worked for it."""
    work = _work(op, size, place, ranks)
    runs = effort.runs if size < 2**20 else effort.few
    seconds = _slowest(work, place, ranks, runs)
    sample = {"level": place.level, "ranks": place.fanout, "op": op, "bytes": size, "seconds": seconds}
    if ranks.device.type == "cpu" and size <= _SMALL:
        sample["host_s"] = _host_s(work, place)
    return sample


def _host_s(work: Callable[[], Callable[[], object]], place: Place) -> float:
    """Return processor seconds of one call on this rank, all its threads together."""
    dist.barrier()
    if not place.takes_part:
        return 0.0
    start = time.process_time()
    for _ in range(_CALLS):
        work()()
    return (time.process_time() - start) / _CALLS


def _work(op: str, size: int, place: Place, ranks: Ranks) -> Callable[[], Callable[[], object]]:
    """Return what issues the collective and returns what waits for it."""
    p, name, device = place.fanout, place.group.group_name, ranks.device
    count = max(p, size // 4 // p * p)
    whole, part = torch.ones(count, device=device), torch.ones(count // p, device=device)
    wait = _C10D.wait_tensor
    if op == "all_reduce":
        return lambda: _later(wait, _C10D.all_reduce(whole, "sum", name))
    direct = is_gloo(device.type)  # as `runtime.gloo.by_messages` has it
    if op == "all_gather" and direct:
        return lambda: _later(wait, DIRECT.all_gather([part], p, name)[0])
    if op == "all_gather":
        return lambda: _later(wait, _C10D.all_gather_into_tensor(part, p, name))
    if op == "reduce_scatter" and direct:
        return lambda: _later(wait, DIRECT.reduce_scatter([whole], "sum", p, name)[0])
    if op == "reduce_scatter":
        return lambda: _later(wait, _C10D.reduce_scatter_tensor(whole, "sum", p, name))
    if op == "all_to_all":
        splits = [count // p] * p
        exchange = DIRECT.all_to_all if direct else _C10D.all_to_all_single
        return lambda: _later(wait, exchange(whole, splits, splits, name))
    me = place.members.index(ranks.rank)
    ahead, behind = place.members[(me + 1) % p], place.members[me - 1]
    there = torch.empty_like(whole)

    def passed_on() -> Callable[[], object]:
        if me % 2 == 0:
            sent = dist.isend(whole, ahead, group=place.group)
            return (sent.wait) if sent is not None else (lambda: None)
        received = dist.irecv(there, behind, group=place.group)
        return (received.wait) if received is not None else (lambda: None)

    return passed_on


def _later(wait: Callable[[Any], object], made: Any) -> Callable[[], object]:
    return lambda: wait(made)


def _slowest(work: Callable[[], Callable[[], object]], place: Place, ranks: Ranks, runs: int) -> list[float]:
    """Return, for each run after the first, the seconds of the slowest rank of all groups at work."""
    found = []
    for run in range(runs + 1):
        dist.barrier()
        took = 0.0
        if place.takes_part:
            _synchronize(ranks)
            start = time.perf_counter()
            work()()
            _synchronize(ranks)
            took = time.perf_counter() - start
        slowest = torch.tensor(took, device=ranks.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if run:
            found.append(float(slowest))
    return found


def _beside(place: Place, ranks: Ranks, effort: Effort) -> Iterator[Sample]:
    """Yield collectives beside matmuls that take longer: what the matmuls are delayed by is the core's own work.

    The least size is timed however long it takes.
    """
    a, b, out = (torch.randn(512, 512, device=ranks.device) for _ in range(3))

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    def computed(times: int) -> Callable[[], Callable[[], object]]:
        return lambda: lambda: compute(times)

    once_s = _median(_slowest(computed(8), place, ranks, effort.few)) / 8
    for op in ("all_reduce", "all_gather", "all_to_all"):
        for size in (s for s in _SIZES if s >= _BESIDE_LEAST):
            work = _work(op, size, place, ranks)
            alone_s = _median(_slowest(work, place, ranks, 1))
            if size > _BESIDE_LEAST and alone_s > 1.5 * effort.longest_s:
                break
            times = max(1, int(1.5 * alone_s / once_s))

            def both(times: int = times, work: Callable[[], Callable[[], object]] = work) -> Callable[[], object]:
                wait = work()
                compute(times)
                return wait

            yield {
                "level": place.level,
                "ranks": place.fanout,
                "op": op,
                "bytes": size,
                "compute_s": _median(_slowest(computed(times), place, ranks, 3)),
                "seconds": _slowest(both, place, ranks, 3),
                "beside": True,
            }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
