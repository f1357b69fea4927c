"""How a command's ranks ended, told in a line and by its exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from autopar.cli.launching import TORCHRUN, wait_for
from autopar.cli.run import rank_flags
from autopar.cli.torchrun import cannot_meet, verdict
from autopar.errors import AutoparError, StalePlanError
from autopar.runtime.errors import message_lost
from autopar.runtime.last_words import FILE, last_words


def failed(tmp_path: Path, rank: int, exitcode: int, error: BaseException | None = None, **told: Any) -> ProcessFailure:
    file = tmp_path / f"error{rank}.json"
    if error is not None:
        words = last_words(error)
        words["message"].update(told)
        file.write_text(json.dumps(words))
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(file))


def lost_peer() -> AutoparError:
    return message_lost(1, 1, "x", "forward of stage 0, micro-batch 0", "Connection closed by peer", sending=False)


def test_a_ranks_own_status_is_the_commands(tmp_path: Path):
    text, status = verdict({0: failed(tmp_path, 0, -signal.SIGTERM), 1: failed(tmp_path, 1, 3)}, "train.py")

    assert text == (
        "train.py: rank 1 (process 101) ended with status 3; see its own output above; all ranks were stopped"
    )
    assert status == 3


def test_a_rank_that_a_signal_ended_is_told_by_its_name(tmp_path: Path):
    text, status = verdict({1: failed(tmp_path, 1, -signal.SIGKILL)}, "train.py")

    assert "rank 1 (process 101) was ended by SIGKILL" in text
    assert status == 128 + signal.SIGKILL


def test_an_error_of_autopar_ends_the_command_with_its_status(tmp_path: Path):
    text, status = verdict({0: failed(tmp_path, 0, 1, StalePlanError("made for another model\nplan again"))}, "t.py")

    assert "rank 0 (process 100) ended with status 5: StalePlanError: made for another model; all ranks" in text
    assert status == 5


def test_the_first_to_fail_is_the_one_that_lost_no_other(tmp_path: Path):
    failures = {
        0: failed(tmp_path, 0, 1, lost_peer(), extraInfo={"timestamp": "1"}),
        1: failed(tmp_path, 1, 1, ValueError("my own"), extraInfo={"timestamp": "2"}),
    }

    text, status = verdict(failures, "train.py")

    first, then = text.splitlines()
    assert "rank 1 (process 101) ended with status 1: ValueError: my own" in first
    assert then.startswith("    then rank 0 (process 100) ended with status 5: PeerLostError: rank 1 (stage 1) did not")
    assert status == 1


def test_machines_that_cannot_meet_are_told_what_to_give():
    text = cannot_meet("host:29500", RuntimeError("The server socket has failed to listen. \nmore"))

    assert text.startswith("the machines cannot meet at host:29500: The server socket has failed to listen\ngive all")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("autopar.errors.StalePlanError('old')", {"message": "StalePlanError: old", "errorCode": 5, "lost": False}),
        ("ValueError('mine')", {"message": "ValueError: mine", "errorCode": 1, "lost": False}),
    ],
)
def test_what_ends_a_rank_is_left_for_torchrun(raised: str, told: dict[str, Any], tmp_path: Path):
    code = (
        "import autopar.errors\nfrom autopar.runtime.last_words import keep_last_words\n"
        f"keep_last_words()\nraise {raised}\n"
    )
    file = tmp_path / "below" / "error.json"

    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, FILE: str(file)}, check=False)

    assert done.returncode == 1
    assert told.items() <= json.loads(file.read_text())["message"].items()


def test_a_rank_that_ends_by_itself_leaves_nothing(tmp_path: Path):
    code = "from autopar.runtime.last_words import keep_last_words; keep_last_words(); raise SystemExit(3)"

    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, FILE: str(tmp_path / "e")}, check=False)

    assert done.returncode == 3
    assert not (tmp_path / "e").exists()


def test_ctrl_c_ends_what_was_started_once_and_is_told_when_it_has_ended():
    # It would take a second request, as one Ctrl-C at a terminal makes two of, for an order to stop at once.
    child = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); time.sleep(0.5); print('ended well'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)\n"
    )
    code = (
        "import sys\nfrom autopar.cli.launching import wait_for\n"
        f"try: wait_for([sys.executable, '-c', {child!r}], {{}})\nexcept KeyboardInterrupt: sys.exit(130)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "up\n"
        os.killpg(outer.pid, signal.SIGINT)
        os.killpg(outer.pid, signal.SIGINT)

        assert outer.stdout.read() == "ended well\n"
        assert outer.wait() == 130


@pytest.mark.slow
def test_torchrun_ends_with_the_status_of_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n")

    status = wait_for([*TORCHRUN, "--nproc-per-node=2", "--standalone", str(script)], os.environ)

    said = capfd.readouterr().err
    assert status == 7
    assert "rank 1 (process " in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_machines_have_the_ranks_of_their_node_rank_whichever_comes_first(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['GROUP_RANK'], os.environ['RANK'])\n")
    with socket.create_server(("", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    both = [[*TORCHRUN, *rank_flags(1, 2, node, endpoint), str(script)] for node in (1, 0)]
    started = []
    for command in both:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        time.sleep(3)

    assert [each.communicate(timeout=60)[0] for each in started] == ["1 1\n", "0 0\n"]
