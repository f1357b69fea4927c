"""Measuring the machine at hand, and imports of others' measurements, composed to a calibration."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.errors import UsageError
from autopar.progress import Progress, Silent
from cost_models.calibration import Calibration, LevelFigures, Machine, level_figures
from cost_models.calibration_fit import Fitted, fit_device, fit_level, median_s, quartile_spread
from cost_models.cluster import ClusterSpec
from cost_models.node import Level

if TYPE_CHECKING:
    from autopar.runtime.ranks import Ranks

T = TypeVar("T")


def described(cluster: str | None) -> ClusterSpec | None:
    """Return the cluster that is named, without the calibration it may name; none if none is."""
    if cluster is None:
        return None
    if Path(cluster).is_file():
        return ClusterSpec.from_file(cluster, calibrate=False)
    return ClusterSpec.parse(cluster)


def is_launched(variables: Mapping[str, str]) -> bool:
    """Return whether this process is a rank that torchrun or the like has started."""
    return "RANK" in variables and "WORLD_SIZE" in variables


def measured(spec: ClusterSpec | None, *, quick: bool = False, progress: Progress | None = None) -> Calibration | None:
    """Return what the ranks found, on the first of them; none on the others. `quick`: of fewer sizes and runs.

    Raises:
        UsageError: the ranks are not those of the cluster's inner levels.
    """
    import torch
    import torch.distributed as dist

    from autopar.runtime.measure_cores import measure_cores
    from autopar.runtime.measure_effort import QUICK, THOROUGH
    from autopar.runtime.measure_kernels import hardware, measure_kernels
    from autopar.runtime.measure_links import measure_links
    from autopar.runtime.ranks import Ranks

    ranks = Ranks.join()
    if ranks.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world_size)))
    spec = (spec or _detected(ranks.world_size, local)).alone
    levels = _measured_levels(spec, ranks.world_size, local)
    effort = QUICK if quick else THOROUGH
    progress = progress if progress is not None and ranks.rank == 0 else Silent()
    progress.phase(f"cores of {ranks.world_size} ranks")
    cores = measure_cores(ranks, effort)
    shared = _Sharing(cores.value, cores.ranks) if cores else _Sharing()
    progress.phase("matmuls, memory, kernels")
    kernels = _slowest(list(ranks.gather(shared.in_turns(ranks, lambda: measure_kernels(ranks.device, effort)))))
    fanouts = {each.name: each.fanout for each in levels}
    progress.phase(f"collectives on {', '.join(fanouts)}")
    links = measure_links(fanouts, ranks, effort) if ranks.world_size > 1 else []
    if dist.is_initialized():
        dist.barrier()
    if ranks.rank:
        return None
    device, figures = fit_device(spec.device, shared.alone(kernels, shared.at_once))
    machine = _machine(
        spec, hardware(ranks.device), ranks.world_size // local, local, "gloo" if ranks.device.type == "cpu" else "nccl"
    )
    if cores is not None:
        machine = replace(machine, cores=cores.value, nodes_per_machine=max(1, cores.ranks // local))
        figures.append(Fitted("cores", cores.value, "count", quartile_spread(cores.cores), 0.0, len(cores.cores)))
    return Calibration(
        machine=machine,
        device=device,
        device_figures=tuple(figures),
        levels=_fitted(levels, links, shared),
        samples=(*kernels, *links),
    )


@dataclass(frozen=True)
class _Sharing:
    """Ranks of a machine that share its cores: what was timed while several compute, as of one that computes alone."""

    cores: float = inf
    ranks: int = 1
    """Of a machine."""

    @property
    def at_once(self) -> int:
        """Return how many ranks of a machine compute without taking turns on cores, as far as these are whole."""
        return max(1, min(self.ranks, round(min(self.cores, self.ranks))))

    def in_turns(self, ranks: Ranks, measure: Callable[[], T]) -> T | None:
        """Return what this rank measured in its turn; no more ranks of a machine measure at once than it has cores.

        A kernel of some microseconds that shares a core runs undisturbed, or waits for a whole slice of the other rank:
        timings of it do not tell how long it takes on average.
        """
        found: T | None = None
        for first in range(0, self.ranks, self.at_once):
            if first <= ranks.rank % self.ranks < first + self.at_once:
                found = measure()
            ranks.gather(None)
        return found

    def alone(self, samples: Iterable[Mapping[str, Any]], at_work: int) -> list[Mapping[str, Any]]:
        """Return samples that were timed while so many ranks of a machine were at work, with the seconds of one."""
        share = min(1.0, self.cores / at_work)
        return [{**each, **{key: _times(each[key], share) for key in _STRETCHED if key in each}} for each in samples]

    def on_links(self, level: Level, inside: int, samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a level's samples, of groups of one in `inside` ranks: cores do what is beside them, and loopback."""
        alone = self.alone(samples, max(1, self.ranks // inside))
        by_cores = [level.topology == "host" or bool(each.get("beside")) for each in samples]
        return [one if mine else each for one, each, mine in zip(alone, samples, by_cores, strict=True)]


_STRETCHED = ("seconds", "old_s", "compute_s")
"""Of a sample, what takes longer while others compute; processor seconds (`host_s`) do not."""


def _times(seconds: Any, share: float) -> Any:
    return [each * share for each in seconds] if isinstance(seconds, list | tuple) else seconds * share


def imported(files: Sequence[Path], spec: ClusterSpec | None) -> Calibration:
    """Return the levels that outputs of nccl-tests show, inner levels fitted first.

    Raises:
        CostModelError: a file is no such output, or of another number of devices than the cluster's levels have.
    """
    from cost_models.detect import recognise
    from cost_models.errors import ClusterError
    from cost_models.nccl_tests import read_nccl_tests

    runs = [(path, read_nccl_tests(path)) for path in files]
    first = runs[0][1]
    nodes = max(run.hosts for _, run in runs)
    local = max(run.ranks // run.hosts for _, run in runs)
    if spec is None:
        spec = ClusterSpec.parse(f"{recognise(first.device, _gibibytes(first.device) * 1024)}:{local}x{nodes}")
    levels = spec.levels
    sizes = [math.prod(each.fanout for each in levels[: i + 1]) for i in range(len(levels))]
    by_level: dict[str, list[dict[str, Any]]] = {}
    for path, run in runs:
        if run.ranks not in sizes:
            joined = ", ".join(f"{level.name} {size}" for level, size in zip(levels, sizes, strict=True))
            raise ClusterError(
                f"{path}: {run.ranks} ranks on {run.hosts} hosts are none of the cluster's levels ({joined} devices);"
                " name the cluster that was measured with -c"
            )
        level = levels[sizes.index(run.ranks)].name
        by_level.setdefault(level, []).extend({**each, "level": level} for each in run.samples)
    samples = tuple(each for found in by_level.values() for each in found)
    machine = _machine(spec, first.device, nodes, local, "nccl")
    return Calibration(machine=machine, device=None, levels=_fitted(levels, samples), samples=samples)


def _gibibytes(device: str) -> int:
    """Return the memory that a device's name tells, such as `NVIDIA H100 80GB HBM3`; 80 GiB where it does not."""
    numbers = [word[:-2] for word in device.replace("-", " ").split() if word.endswith("GB")]
    return next((int(each) for each in numbers if each.isdigit()), 80)


def _detected(world: int, local: int) -> ClusterSpec:
    node = ClusterSpec.detect().groups[0].node
    device = node.device.catalog or node.device.name
    return ClusterSpec.parse(f"{device}:{local}x{world // local}" if world > local else f"{device}:{local}")


def _measured_levels(spec: ClusterSpec, world: int, local: int) -> tuple[Level, ...]:
    """Return the levels, inner to outer, that the ranks make up."""
    levels = spec.levels
    for count in range(len(levels) + 1):
        if math.prod(each.fanout for each in levels[:count]) == world and (count == 0 or levels[0].fanout == local):
            return levels[:count]
    made_up = " x ".join(f"{each.name} {each.fanout}" for each in levels)
    raise UsageError(
        f"{world} ranks, {local} a machine, are not the inner levels of cluster {spec.name!r} ({made_up});"
        " start as many as its nodes have devices (--ranks), or name another cluster with -c"
    )


def _machine(spec: ClusterSpec, hardware: str, nodes: int, local: int, library: str) -> Machine:
    from importlib.metadata import version

    return Machine(
        hardware=hardware,
        kind=spec.device.kind,
        catalog=spec.device.catalog or spec.device.name,
        library=library,
        nodes=nodes,
        devices_per_node=local,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=version("torch"),
    )


def _slowest(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each kernel that all ranks timed, with the seconds of the rank that took longest for it."""
    timed = [{_what(each): each for each in samples} for samples in of_ranks]
    return [
        max((samples[what] for samples in timed), key=median_s)
        for what in timed[0]
        if all(what in samples for samples in timed)
    ]


def _what(sample: Mapping[str, Any]) -> str:
    return str([(key, value) for key, value in sample.items() if key not in {"seconds", "old_s"}])


def _fitted(
    levels: Sequence[Level], samples: Sequence[Mapping[str, Any]], shared: _Sharing = _Sharing()
) -> tuple[LevelFigures, ...]:
    now = list(levels)
    made: list[LevelFigures] = []
    for place, level in enumerate(levels):
        inside = math.prod(each.fanout for each in levels[:place])
        of = shared.on_links(level, inside, [each for each in samples if each["level"] == level.name])
        if not of:
            continue
        figures: list[Fitted]
        now[place], figures = fit_level(now, place, of)
        made.append(level_figures(now[place], figures))
    return tuple(made)
