"""Machines of one run end together, whichever of them fails, and say where it began."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store
from torch.distributed.launcher import api as launcher

from autopar._torch_launch import hook_agent
from autopar.cli.launching import TORCHRUN
from autopar.cli.machines import GRACE_S, SILENT_S, End, MachineFailedError, Machines
from autopar.cli.run import rank_flags
from autopar.cli.torchrun import lost_others

KILLED = End(1, 137, "train.py: rank 1 (process 7) was ended by SIGKILL; all ranks were stopped")
LOST = End(0, 5, "train.py: rank 0 lost rank 1", lost=True)


class Clock:
    """Time that only passes where somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Gone(Store):
    """The store of a machine that is no more."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def machines(store: Store, node: int, clock: Clock, count: int = 2) -> Machines:
    return Machines(store, node, count, clock, clock.wait)


def test_a_machine_whose_ranks_ended_well_waits_for_all_others():
    store, clock = HashStore(), Clock()
    first, second = machines(store, 0, clock), machines(store, 1, clock)

    def later(seconds: float) -> None:
        clock.wait(seconds)
        if clock.now > 5:
            Machines(store, 1, 2, clock, clock.wait).succeed()
        else:
            second.go_on()

    first.pause = later
    first.succeed()

    assert 5 < clock.now < 6


def test_a_machine_whose_ranks_ended_well_fails_with_one_whose_did_not():
    store, clock = HashStore(), Clock()
    machines(store, 1, clock).fail(KILLED)

    told = r"on machine 1 \(--node-rank 1\), train.py: rank 1 .* SIGKILL.* those of this machine had ended with 0"
    with pytest.raises(MachineFailedError, match=told) as found:
        machines(store, 0, clock).succeed()

    assert found.value.end.status == 137


def test_ranks_have_time_to_find_by_themselves_what_they_miss():
    store, clock = HashStore(), Clock()
    ours = machines(store, 0, clock)
    ours.go_on()
    machines(store, 1, clock).fail(KILLED)

    clock.wait(2)
    ours.go_on()
    clock.wait(GRACE_S - 1)
    ours.go_on()
    clock.wait(1.5)
    with pytest.raises(MachineFailedError, match=r"SIGKILL.* those of this machine were stopped"):
        ours.go_on()


def test_a_machine_that_was_asked_to_end_ends_all_at_once():
    store, clock = HashStore(), Clock()
    machines(store, 1, clock).fail(End(1, 143, "torchrun was ended by SIGTERM", asked=True))

    with pytest.raises(MachineFailedError, match="SIGTERM"):
        machines(store, 0, clock).go_on()


def test_ranks_that_only_lost_others_end_with_what_ended_those():
    store, clock = HashStore(), Clock()
    machines(store, 1, clock).fail(KILLED)

    assert machines(store, 0, clock).fail(LOST) == KILLED


def test_ranks_that_failed_by_themselves_are_the_first():
    store, clock = HashStore(), Clock()
    own = End(0, 3, "train.py: rank 0 ended with status 3")
    machines(store, 1, clock).fail(KILLED)

    assert machines(store, 0, clock).fail(own) is own


def test_where_all_lost_others_each_tells_its_own():
    store, clock = HashStore(), Clock()
    machines(store, 1, clock).fail(End(1, 5, "lost rank 0", lost=True))

    assert machines(store, 0, clock).fail(LOST) is LOST


def test_a_machine_that_gives_no_sign_of_life_is_not_waited_for():
    store, clock = HashStore(), Clock()

    with pytest.raises(MachineFailedError, match=r"on machine 1 .* has not been heard of for 60 s"):
        machines(store, 0, clock).succeed()

    assert SILENT_S < clock.now < SILENT_S + GRACE_S + 5


def test_without_the_first_machine_the_others_end_too():
    clock = Clock()
    ours = machines(Gone(), 1, clock)

    with pytest.raises(MachineFailedError, match=r"on machine 0 .* torchrun has ended or cannot be reached"):
        ours.succeed()
    assert ours.fail(End(1, 5, "lost", lost=True)).status == 5


@pytest.mark.parametrize(("lost", "expected"), [((True, True), True), ((True, False), False)])
def test_machines_of_which_one_rank_failed_by_itself_have_not_only_lost_others(lost: tuple[bool, ...], expected: bool):
    class Failure:
        exitcode = 1

        def __init__(self, lost: bool) -> None:
            self.error_file_data = {"message": {"lost": lost}}

    assert lost_others(dict(enumerate(map(Failure, lost)))) is expected


def test_torchruns_agent_asks_in_place_of_its_barrier(monkeypatch: pytest.MonkeyPatch):
    plain = launcher.LocalElasticAgent
    monkeypatch.setattr(launcher, "LocalElasticAgent", plain)
    asked: list[Any] = []

    hook_agent(asked.append, asked.append)
    agent = launcher.LocalElasticAgent.__new__(launcher.LocalElasticAgent)
    agent._worker_group = "group"
    agent._exit_barrier()

    assert asked == ["group"]
    assert {"_exit_barrier", "_monitor_workers"} <= vars(plain.__mro__[1]).keys() | vars(plain).keys()


def both(script: Path, tmp_path: Path) -> list[subprocess.Popen[str]]:
    with socket.create_server(("", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    return [
        subprocess.Popen(
            [*TORCHRUN, *rank_flags(1, 2, node, endpoint), str(script)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        for node in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_two_machines_end_with_the_status_of_the_rank_that_failed(failing: int, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '{failing}': time.sleep(2); sys.exit(7)\n")

    ended = [(each.communicate(timeout=60)[1], each.returncode) for each in both(script, tmp_path)]

    assert [status for _, status in ended] == [7, 7]
    assert f"train.py: rank {failing} (process " in ended[1 - failing][0]
