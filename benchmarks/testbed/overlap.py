"""How much communication the planned programs hide behind computation, beside DDP and FSDP2.

    python -m benchmarks.testbed.overlap --scenarios narrow_large_batch deep_square gpt_balanced

All programs of a scenario live in one process a rank, and steps alternate between them (ddp, fsdp2, plan, its
computation alone, its communication alone, ddp ...), so that a machine that grows slower does so for all. Plans:
`dp`, whole parameters on every rank, `shard`, parameters sharded at rest and gathered as the search likes, `zero`,
gathered for each phase and freed (zero=3), and `free`, what the search takes without stages. *Computation alone* is
the emitted program on process groups that do nothing; *communication alone* its collectives in their order on the
real groups, without operators between. What the process's threads work for them is its processor time, which no
schedule hides: a rank has one core. *Beside* is what that leaves possible here: all collectives are issued, on memory
of their own, then the computation alone runs, then all are waited for, as if nothing depended on anything.

    hidden        (computation + communication - step) / what could hide
    could hide    the smaller of communication and the computation left once the first of it could be issued
    ideal         the larger of computation alone and communication alone
    of possible   (computation + communication - step) / (computation + communication - beside)
    exposed       what the rank's own thread spends on issuing and waiting, beyond what it does on groups that do
                  nothing: the exposed time that `autopar show --compare` measures. That transfers take processor time
                  from the computation is not in it
    not waited    1 - exposed / what could hide

One line of JSON a plan: medians over steps, the median over rounds of each ratio. Lines go to stdout and to
benchmarks/results/overlap.jsonl; --table prints the last line of each case as Markdown. Needs root and iproute2; ends
with 77 where they are missing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, markdown, write
from benchmarks.testbed.compare import HERE, SKIP, cluster_of
from benchmarks.testbed.scenarios import SCENARIOS

_ALL = -1

PLANS: dict[str, dict[str, int]] = {
    "dp": {"dp_replicate": _ALL},
    "shard": {"dp_shard": _ALL},
    "zero": {"dp_shard": _ALL, "zero": 3},
    "free": {"pp": 1},
}
"""Plans, and what is fixed of each, `_ALL`: as many as there are ranks."""

DEFAULT = ("narrow_large_batch", "deep_square", "gpt_balanced")

COLUMNS = (
    "scenario", "plan", "computation", "communication", "ideal", "beside", "step", "DDP", "FSDP2", "hidden",
    "of possible", "not waited", "to ideal", "to DDP", "to FSDP2",
)  # fmt: skip


@dataclass
class Timer:
    """One program's step, and its seconds by round."""

    step: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)
    worked_s: list[float] = field(default_factory=list)
    """Processor seconds of this rank's process."""


@dataclass
class Issues:
    """When the collectives of a step were issued, and the time given to them, from the ranges of a profiled program."""

    at_s: dict[str, float] = field(default_factory=dict)
    given_s: float = 0.0
    """What the thread spent on issuing and waiting."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Note the moment of an issue, and how long it or a wait takes."""
        if name.startswith("issue "):
            self.at_s.setdefault(name.removeprefix("issue "), time.perf_counter())
        return self._timed() if name.startswith(("issue ", "wait ")) else nullcontext()

    def clear(self) -> None:
        """Begin a step."""
        self.at_s.clear()
        self.given_s = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.given_s += time.perf_counter() - start


def measure(scenario: str, plans: dict[str, Path], cluster: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what rank 0 of the testbed found of every program.

    Raises:
        RuntimeError: a rank failed, or the run took too long.
    """
    asked = {
        "scenario": scenario,
        "plans": {name: str(path) for name, path in plans.items()},
        "cluster": str(cluster),
        "rounds": args.rounds,
        "hand": args.hand,
    }
    command = [
        *(sys.executable, str(HERE / "netrun.py"), "--hosts", str(args.hosts), "--rate", args.rate, "--tag", args.tag),
        *("--ranks-per-host", str(args.ranks_per_host), "--timeout", str(args.timeout), "--"),
        *(sys.executable, "-m", "benchmarks.testbed.overlap", "--as-rank", json.dumps(asked)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{scenario} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def as_rank(asked: dict[str, Any]) -> None:
    """Time all programs on this rank; rank 0 prints the seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    idle = _idle_group()
    timers: dict[str, Timer] = {}
    for name in asked["hand"]:
        timers[name] = Timer(_hand(name, asked["scenario"]))
    issues: dict[str, Issues] = {}
    for name, plan in asked["plans"].items():
        issues[name], issues[f"{name}_computation"] = Issues(), Issues()
        step, model = _planned(asked, plan, issues[name])
        step()
        timers[name] = Timer(step)
        computation = _planned(asked, plan, issues[f"{name}_computation"], idle)[0]
        issue, wait = _collectives(step)
        timers[f"{name}_computation"] = Timer(computation)
        timers[f"{name}_communication"] = Timer(functools.partial(_beside, issue, wait, None))
        timers[f"{name}_beside"] = Timer(functools.partial(_beside, issue, wait, computation))
        del model
    left: dict[str, list[float]] = {name: [] for name in asked["plans"]}
    given: dict[str, list[float]] = {name: [] for name in issues}
    for number in range(asked["rounds"] + 2):
        for name, timer in timers.items():
            dist.barrier()
            for each in issues.values():
                each.clear()
            start, worked_s = time.perf_counter(), time.process_time()
            timer.step()
            end, worked_s = time.perf_counter(), time.process_time() - worked_s
            taken = torch.tensor(end - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number < 2:
                continue
            timer.seconds.append(taken.item())
            timer.worked_s.append(worked_s)
            if name in issues:
                given[name].append(issues[name].given_s)
            plan = name.removesuffix("_computation")
            if plan != name:
                bulk = [at for issue, at in issues[name].at_s.items() if " loss" not in issue]
                left[plan].append(end - min(bulk, default=end))
    if dist.get_rank() == 0:
        seconds = {name: each.seconds for name, each in timers.items()}
        worked = {name: statistics.median(each.worked_s) for name, each in timers.items()}
        print(json.dumps({"seconds": seconds, "worked_s": worked, "left": left, "given": given}), flush=True)
    dist.barrier()


def _idle_group() -> str:
    """Return the name of a process group whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  makes the backend known

    name: str = dist.new_group(list(range(dist.get_world_size())), backend="fake").group_name
    return name


def _hand(name: str, scenario: str) -> Callable[[], Any]:
    import torch

    from benchmarks.testbed.step import STRATEGIES

    program = STRATEGIES[name](SCENARIOS[scenario], argparse.Namespace())
    optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-3)

    def step() -> None:
        program.model(*program.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _planned(asked: dict[str, Any], plan: str, issues: Issues, idle: str = "") -> tuple[Callable[[], Any], Any]:
    """Return the step of a plan, and the model; with `idle`, collectives go to the group of that name."""
    import torch

    import autopar
    from autopar.runtime.executable import compile_graph
    from autopar.runtime.module import runner_of

    model, batch = SCENARIOS[asked["scenario"]].build()
    compiled = autopar.compile(
        model,
        asked["cluster"],
        example_inputs=batch,
        plan=autopar.Plan.load(plan),
        optimizer="adamw",
        backend=functools.partial(compile_graph, ranges=issues),
    )
    runner = runner_of(compiled)
    if runner is None:
        raise RuntimeError("the model was not compiled")
    if idle:
        for stream in runner.groups.names:
            runner.groups.names[stream] = idle
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)

    def step() -> None:
        compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, compiled


def _beside(issue: Callable[[], Any], wait: Callable[[Any], None], computation: Callable[[], Any] | None) -> None:
    made = issue()
    if computation is not None:
        computation()
    wait(made)


def _collectives(step: Callable[[], Any]) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """Return what issues the collectives of a step in their order, on memory of its own, and what waits for them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    seen: list[tuple[Any, tuple[Any, ...]]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in {"_c10d_functional", "autopar_direct", "autopar_levels"} and "wait" not in str(func):
                seen.append((func, tree_map_only(torch.Tensor, torch.zeros_like, args)))
            return func(*args, **(kwargs or {}))

    with Record():
        step()

    def issue() -> list[Any]:
        made: list[Any] = []
        for func, args in seen:
            found = func(*args)
            made += found if isinstance(found, list | tuple) else [found]
        return made

    def wait(made: list[Any]) -> None:
        for each in made:
            torch.ops._c10d_functional.wait_tensor(each)

    return issue, wait


def row(scenario: str, name: str, found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the line of one plan."""
    seconds, left = found["seconds"], found["left"][name]
    parts = (name, f"{name}_computation", f"{name}_communication", f"{name}_beside")
    step, computation, communication, beside = (seconds[key] for key in parts)
    middle = {key: statistics.median(each) for key, each in seconds.items()}
    could = min(middle[f"{name}_communication"], statistics.median(left))
    hidden = statistics.median(a + b - c for a, b, c in zip(computation, communication, step, strict=True))
    possible = statistics.median(a + b - c for a, b, c in zip(computation, communication, beside, strict=True))
    given = found["given"]
    exposed = statistics.median(a - b for a, b in zip(given[name], given[f"{name}_computation"], strict=True))
    ideal = [max(pair) for pair in zip(computation, communication, strict=True)]
    made = {
        "benchmark": "overlap",
        "scenario": scenario,
        "rate": args.rate,
        "hosts": args.hosts,
        "ranks_per_host": args.ranks_per_host,
        "plan": name,
        "measured_s": middle[name],
        "min_s": min(step),
        "max_s": max(step),
        "repeats": len(step),
        "computation_s": middle[f"{name}_computation"],
        "communication_s": middle[f"{name}_communication"],
        "communication_processor_s": found["worked_s"][f"{name}_communication"],
        "computation_left_s": statistics.median(left),
        "ideal_s": max(middle[f"{name}_computation"], middle[f"{name}_communication"]),
        "hidden_share": round(hidden / could, 4) if could > 0 else None,
        "beside_s": middle[f"{name}_beside"],
        "hidden_of_possible": round(hidden / possible, 4) if possible > 0 else None,
        "exposed_s": exposed,
        "not_waited_share": round(1 - exposed / could, 4) if could > 0 else None,
        "ratio_to_ideal": _ratio(step, ideal),
    }
    for hand in args.hand:
        made[f"{hand}_s"] = middle[hand]
        made[f"ratio_to_{hand}"] = _ratio(step, seconds[hand])
    return made


def _ratio(mine: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(mine, others, strict=True)), 4)


def rows_of(lines: Iterator[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the last line of each case as a row of the table."""
    last = {(each["scenario"], each["plan"], each["hosts"], each["ranks_per_host"]): each for each in lines}
    made = []
    for each in last.values():
        cells = {"scenario": each["scenario"].replace("_", " "), "plan": each["plan"]}
        for key in ("computation", "communication", "ideal", "beside", "ddp", "fsdp2"):
            if f"{key}_s" in each:
                cells[key.upper() if key in {"ddp", "fsdp2"} else key] = f"{each[f'{key}_s']:.3f}"
        cells["step"] = f"{each['measured_s']:.3f}"
        shares = {"hidden": "hidden_share", "of possible": "hidden_of_possible", "not waited": "not_waited_share"}
        for key, share in ((key, each.get(column)) for key, column in shares.items()):
            cells[key] = f"{share:.0%}" if share is not None else ""
        for key, title in (("ideal", "ideal"), ("ddp", "DDP"), ("fsdp2", "FSDP2")):
            cells[f"to {title}"] = f"{each[f'ratio_to_{key}']:.2f}"
        made.append(cells)
    return made


def main() -> int:
    """Measure every scenario asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(DEFAULT))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--hand", nargs="*", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1, help="which talk over its loopback interface")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each program")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds a scenario may take")
    parser.add_argument("--tag", default="ov", help="prefix of the network namespaces")
    parser.add_argument("--cluster", type=Path, help="cluster file instead of the testbed's own, calibrated one")
    parser.add_argument("--table", action="store_true", help="of the lines there are; nothing is run")
    parser.add_argument("--output", type=Path, default=RESULTS / "overlap.jsonl")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        as_rank(args.as_rank)
        sys.stdout.flush()
        os._exit(0)  # FSDP2's threads on gloo now and then abort the interpreter's own way out
    if args.table:
        print(markdown(rows_of(map(json.loads, args.output.read_text().splitlines())), COLUMNS))
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("overlap: needs root, ip and tc (apt-get install -y iproute2)", file=sys.stderr)
        return SKIP
    import autopar

    ranks = args.hosts * args.ranks_per_host
    with tempfile.TemporaryDirectory() as folder:
        calibrated = HERE / f"cluster_{args.rate}_calibrated.yaml"
        own = args.ranks_per_host == 1 and args.hosts == 2 and calibrated.is_file()
        cluster = args.cluster or (
            calibrated if own else cluster_of(args.rate, args.hosts, args.ranks_per_host, Path(folder))
        )
        for scenario in args.scenarios:
            plans = {}
            for name in args.plans:
                model, batch = SCENARIOS[scenario].build()
                fix = {key: ranks if value == _ALL else value for key, value in PLANS[name].items()}
                plan = autopar.plan(model, cluster, example_inputs=batch, optimizer="adamw", fix=fix)
                plans[name] = Path(folder) / f"{scenario}_{name}.json"
                plan.save(plans[name])
            found = measure(scenario, plans, cluster, args)
            for name in args.plans:
                write(row(scenario, name, found, args), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
