"""A few steps of a run measured with torch.profiler, written with the plan's names of streams and collectives.

Computation and collectives are separated as the rank's own thread sees them: `issue NAME` and `wait NAME` are the time
that it gives for a collective, and so its exposed time. On gloo the collective itself is the worker thread's event; on
other backends, whose host does not wait, it is drawn from its issue to the end of its wait.
"""

from __future__ import annotations

import atexit
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

from autopar.ir.tasks import COMPUTE, awaited, issuing

WARM_STEPS = 3
"""Steps before the measured ones: allocators, caches and links settle."""

MEASURED_STEPS = 5

RANGE = "autopar: "
"""Begins the names of our ranges among all that the profiler sees."""


def ranges(name: str) -> record_function:
    """Return the context in which what runs is recorded under a name."""
    return record_function(f"{RANGE}{name}")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A range that the profiler saw."""

    name: str
    start_us: float
    end_us: float


@dataclass
class StepProfiler:
    """Counts the steps of a run, measures some of them and writes `rankI.json` into a folder."""

    folder: Path
    rank: int
    device: torch.device
    plan: Mapping[str, str]
    """What `report.exposed.plan_note` tells of the plan that is run."""

    streams: dict[str, str] = field(default_factory=dict)
    """Of a collective, by its plan name, the stream it runs on."""

    _seen: int = field(init=False, default=0)
    _profile: Any = field(init=False, default=None)
    _done: bool = field(init=False, default=False)

    def know(self, *programs: fx.GraphModule) -> None:
        """Note on which streams the programs' collectives run."""
        for program in programs:
            for node in program.graph.nodes:
                if "collective" in node.meta and node.args and isinstance(node.args[-1], str):
                    self.streams[node.meta["collective"]] = node.args[-1]

    def step(self) -> None:
        """Note that a step begins."""
        if self._done:
            return
        if self._seen == WARM_STEPS:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
            self._profile = profile(activities=kinds)
            self._profile.__enter__()
            atexit.register(self.finish)
        elif self._seen == WARM_STEPS + MEASURED_STEPS:
            self.finish()
        self._seen += 1

    def finish(self) -> None:
        """Write what was measured; a run that ends early has measured fewer steps."""
        if self._done or self._profile is None:
            return
        self._done = True
        atexit.unregister(self.finish)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profile.__exit__(None, None, None)
        steps = self._seen - WARM_STEPS
        found = [
            Recorded(each.name, float(each.time_range.start), float(each.time_range.end))
            for each in self._profile.events()
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank{self.rank}.json").write_text(document(found, self.rank, steps, self.streams, self.plan))


def document(
    found: Sequence[Recorded], rank: int, steps: int, streams: Mapping[str, str], plan: Mapping[str, str]
) -> str:
    """Return the trace of one rank's measured steps, in the form of `report.trace`."""
    own = [
        Recorded(each.name.removeprefix(RANGE), each.start_us, each.end_us)
        for each in found
        if each.name.startswith(RANGE)
    ]
    own.sort(key=lambda each: each.start_us)
    workers = sorted((each for each in found if each.name.startswith("gloo:")), key=lambda each: each.start_us)
    first_us = own[0].start_us if own else 0.0
    tracks = {COMPUTE: 0}
    events: list[dict[str, Any]] = [_event(each, 0, rank, first_us) for each in own]
    for stream, each in _collectives(own, workers, streams):
        events.append(_event(each, tracks.setdefault(stream, len(tracks)), rank, first_us))
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
        *(
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
            for name, thread in tracks.items()
        ),
    ]
    lines = ",\n".join(json.dumps(each) for each in [*names, *events])
    about = json.dumps({"steps": steps, "rank": rank, "plan": plan})
    return f'{{"displayTimeUnit": "ms", "autopar": {about}, "traceEvents": [\n{lines}\n]}}\n'


def _event(each: Recorded, thread: int, rank: int, first_us: float) -> dict[str, Any]:
    return {
        "name": each.name,
        "cat": "collective" if thread else COMPUTE,
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": each.start_us - first_us,
        "dur": each.end_us - each.start_us,
    }


def _collectives(
    own: Sequence[Recorded], workers: Sequence[Recorded], streams: Mapping[str, str]
) -> list[tuple[str, Recorded]]:
    """Return each collective on its stream: as its worker ran it, or else from its issue to the end of its wait."""
    queues: dict[str, deque[Recorded]] = {}
    waits: dict[str, deque[float]] = {}
    for each in own:
        name = awaited(each.name)
        if name is None:
            continue
        if each.name == issuing(name):
            queues.setdefault(streams.get(name, "collectives"), deque()).append(
                Recorded(name, each.start_us, each.end_us)
            )
        else:
            waits.setdefault(name, deque()).append(each.end_us)
    found: list[tuple[str, Recorded]] = []
    exact = len(workers) == sum(len(queue) for queue in queues.values())
    for worker in workers if exact else ():
        stream = min((s for s, queue in queues.items() if queue), key=lambda s: queues[s][0].start_us)
        issued = queues[stream].popleft()
        found.append((stream, Recorded(issued.name, max(worker.start_us, issued.start_us), worker.end_us)))
    for stream, queue in queues.items():
        for issued in queue:
            ended = waits.get(issued.name)
            found.append((stream, Recorded(issued.name, issued.start_us, ended.popleft() if ended else issued.end_us)))
    return found
