"""The command line: what goes to stdout, what to stderr, and the exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import autopar
from autopar.cli import main
from autopar.cli.launching import wait_for
from autopar.cli.run import environment, launch_command
from autopar.errors import CaptureError, InfeasibleError, StalePlanError, UsageError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from cost_models.errors import ClusterError

Out = pytest.CaptureFixture[str]


@pytest.fixture
def saved(small_plan: Plan, slower_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with plan.json, slower.json, truncated.json, edited.json and train.py; the current one."""
    small_plan.save(tmp_path / "plan.json")
    slower_plan.save(tmp_path / "slower.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "truncated.json").write_text(text[: len(text) // 2])
    (tmp_path / "edited.json").write_text(text.replace('"per_phase"', '"once"'))
    (tmp_path / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Planner = Callable[..., Plan]


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Planner], None]:
    """Put a function in the place of the search."""

    def use(function: Planner) -> None:
        api = ModuleType("autopar.api")
        api.plan_reference = function
        monkeypatch.setitem(sys.modules, "autopar.api", api)
        monkeypatch.setattr(autopar, "api", api, raising=False)

    return use


def test_plan_saves_prints_a_table_and_ends_with_the_summary(
    saved: Path, small_plan: Plan, planner: Callable[[Planner], None], capsys: Out
):
    seen = []

    def search(model: str, cluster: str, options: PlanOptions, progress: object) -> Plan:
        seen.append((model, cluster, options))
        return small_plan

    planner(search)
    status = main(
        ["plan", "zoo:mlp", "-c", "cpu:4", "--batch", "16", "--fix", "tp=4", "--set", "n=2", "-o", "out/new.json"]
    )
    out, err = capsys.readouterr()

    assert status == 0
    assert seen == [("zoo:mlp", "cpu:4", PlanOptions.parse(batch=16, fix={"tp": 4}, set={"n": 2}))]
    assert Plan.load("out/new.json") == small_plan
    assert out == ""
    assert err.splitlines()[-1].startswith(
        "plan: dp_shard=2 x tp=4, step 200 us, peak memory 3.00 MiB of 72.00 GiB, MFU"
    )


@pytest.mark.parametrize("flags", [["--json"], ["-o", "-"]])
def test_plan_prints_the_plan_on_stdout(
    flags: list[str], saved: Path, small_plan: Plan, planner: Callable[[Planner], None], capsys: Out
):
    planner(lambda *_: small_plan)

    assert main(["plan", "zoo:mlp", "-c", "cpu:4", *flags]) == 0
    assert capsys.readouterr().out == (saved / "plan.json").read_text()


def test_an_interrupted_search_saves_its_best_plan_and_exits_with_130(
    saved: Path, small_plan: Plan, planner: Callable[[Planner], None], capsys: Out
):
    stopped = replace(small_plan, solver=replace(small_plan.solver, status="interrupted"))
    planner(lambda *_: stopped)

    assert main(["plan", "zoo:mlp", "-c", "cpu:4", "-o", "best.json"]) == 130
    assert Plan.load("best.json") == stopped
    assert capsys.readouterr().err.splitlines()[-1] == "autopar: interrupted; the best plan so far is in best.json"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UsageError("no such model"), 2, "autopar: no such model\n"),
        (ClusterError("no such cluster"), 2, "autopar: no such cluster\n"),
        (InfeasibleError("nothing fits"), 3, "autopar: nothing fits\n"),
        (CaptureError("data-dependent"), 4, "autopar: data-dependent\n"),
        (StalePlanError("for another model"), 5, "autopar: for another model\n"),
        (KeyboardInterrupt(), 130, "autopar: interrupted\n"),
    ],
)
def test_every_kind_of_error_has_its_exit_status_and_no_traceback(
    error: BaseException, status: int, text: str, planner: Callable[[Planner], None], capsys: Out
):
    def fail(*_: object) -> Plan:
        raise error

    planner(fail)

    assert main(["plan", "zoo:mlp", "-c", "cpu:4"]) == status
    assert capsys.readouterr() == ("", text)


def test_an_internal_error_shows_its_traceback_and_exits_with_70(planner: Callable[[Planner], None], capsys: Out):
    def fail(*_: object) -> Plan:
        raise ZeroDivisionError("of ours")

    planner(fail)

    assert main(["plan", "zoo:mlp", "-c", "cpu:4"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: of ours" in err
    assert (
        err.splitlines()[-1]
        == "autopar: internal error: this is a fault of autopar, and the traceback above shows where"
    )


WRONG = [
    (["frobnicate"], "no such command 'frobnicate'"),
    (["plan"], "missing argument 'MODEL' (see autopar plan --help)"),
    (["plan", "zoo:mlp"], "missing option '-c' / '--cluster' (see autopar plan --help)"),
    (["plan", "zoo:mlp", "-c", "cpu:4", "--batsch", "3"], "no such option: --batsch"),
    (["plan", "zoo:mlp", "-c", "cpu:4", "--batch", "0"], "--batch 0: must be a whole number of at least 1"),
    (["plan", "zoo:mlp", "-c", "cpu:4", "--fix", "pt=2"], "--fix pt: unknown key 'pt' (did you mean 'tp'?)"),
    (["plan", "zoo:mlp", "-c", "cpu:4", "--fix", "tp=2", "--forbid", "tp"], "--fix tp=2 and --forbid tp contradict"),
    (["plan", "zoo:mlp", "-c", "cpu:4", "--constraint", "w@tp"], "--constraint 'w@tp': does not read as a constraint"),
    (["plan", "zoo:mlp", "-c", "cpu:4", "-o", "train.py/x.json"], "cannot write train.py/x.json: "),
    (["plan", "zoo:mlp", "-c", "cpu:4", "-o", "/proc/plan.json"], "cannot write /proc/plan.json: "),
    (["plan", "zoo:mlp", "-c", "cpu:4", "-o", "."], "cannot write .: Is a directory; choose another -o FILE"),
    (["show", "none.json"], "cannot read the plan none.json: No such file or directory"),
    (["show", "."], "cannot read the plan .: Is a directory"),
    (["show", "truncated.json"], "truncated.json is cut short: it ends within the JSON text, in line"),
    (["show", "edited.json"], "edited.json was edited after autopar wrote it: decisions.parameters changed."),
    (["show", "train.py"], "train.py is no JSON: Expecting value in line 1, column 1"),
    (["show", "plan.json", "--format", "dott"], "one of table, json, dot, mermaid, html, trace (did you mean 'dot'"),
    (["show", "plan.json", "--format", "trace"], "the plan holds no timeline: it was written by an older autopar"),
    (["show", "plan.json", "-f", "html", "--compare", "out"], "--compare prints a table; leave out --format html"),
    (["show", "plan.json", "-f", "dot", "-o", "train.py/x"], "cannot write train.py/x: "),
    (["explain", "plan.json", "nothing"], "the plan has no parameter, operator or module 'nothing'"),
    (["diff", "plan.json"], "missing argument 'B'"),
    (["check", "plan.json", "--format", "xml"], "--format xml: must be one of text, json, github, junit, sarif"),
    (["check", "plan.json", "--policy", "none.toml"], "cannot read the policy none.toml: No such file or directory"),
    (["check", "plan.json", "-c", "dgx-h10"], "'dgx-h10' is no cluster (did you mean 'dgx-h100'?)"),
    (["schema", "plans"], "there is no schema 'plans' (did you mean 'plan'?); schemas are plan, cluster"),
    (["cluster", "show", "cpu:0"], "the number of devices per node must be a whole number of at least 1"),
    (["cluster", "validate", "none.yaml"], "cluster file 'none.yaml' cannot be read: No such file or directory"),
    (["run", "plan.json", "--", "none.py"], "there is no script 'none.py'; write `autopar run PLAN -- train.py ARGS`"),
    (["run", "plan.json", "--", "-m"], "-m needs the name of a module"),
    (["run", "truncated.json", "--", "train.py"], "truncated.json is cut short"),
    (["run", "plan.json", "--nnodes", "3", "--", "train.py"], "8 ranks cannot be shared evenly by --nnodes 3 machines"),
    (["run", "plan.json", "--nnodes", "2", "--", "train.py"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    (["run", "plan.json", "--node-rank", "1", "--", "train.py"], "--node-rank 1 is no machine of --nnodes 1"),
    (["run", "plan.json", "--nnodes", "2", "--rdzv-endpoint", "here", "--", "train.py"], "here: must be HOST:PORT"),
    (["run", "plan.json", "--nnodes", "2", "--rdzv-endpoint", "a:70000", "--", "train.py"], "a port of 1 to 65535"),
    (["run", "plan.json", "--rdzv-endpoint", "here:29500", "--", "train.py"], "say with --nnodes N how many, or leave"),
    (["run", "plan.json", "train.py", "--steps", "2"], "flags of the script go behind --: autopar run PLAN -- SCRIPT"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_wrong_input_is_told_in_one_message_and_exits_with_2(argv: list[str], message: str, saved: Path, capsys: Out):
    status = main(argv)
    out, err = capsys.readouterr()

    assert (status, out) == (2, "")
    assert err.startswith(f"autopar: {message}") or message in err.splitlines()[0]
    assert "Traceback" not in err


def test_calibrate_ends_with_the_status_and_the_one_message_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: Out, tmp_path: Path
):
    def unlike(*_: object, **__: object) -> None:
        raise UsageError("1 rank is not the inner level of cluster 'cpu:4'")

    def one_rank(command: list[str], *_: object) -> int:
        with monkeypatch.context() as rank:
            rank.setenv("RANK", "0")
            rank.setenv("WORLD_SIZE", "1")
            rank.setattr("autopar.api.calibrating.measured", unlike)
            assert main(command[command.index("autopar") + 1 :]) == 2
        return 2

    monkeypatch.setattr("autopar.cli.on_ranks.wait_for", one_rank)

    assert main(["calibrate", "-c", "cpu:4", "--ranks", "1", "-o", str(tmp_path / "it.json")]) == 2
    assert capsys.readouterr() == (
        "",
        "autopar: 1 rank is not the inner level of cluster 'cpu:4'\n",
    )


@pytest.mark.parametrize(
    ("ended", "status", "text"),
    [
        (1, 70, "a rank ended without a result; what it said is above"),
        (137, 137, "a rank was ended by SIGKILL"),
    ],
)
def test_a_calibration_whose_rank_dies_says_how(
    ended: int, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
):
    monkeypatch.setattr("autopar.cli.on_ranks.wait_for", lambda *_: ended)

    assert main(["calibrate", "-c", "cpu:4"]) == status
    assert capsys.readouterr().err == f"autopar: {text}\n"


def test_what_ranks_say_is_seen_as_they_say_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    said = "import sys; print('on its way', file=sys.stderr)"

    assert wait_for([sys.executable, "-c", said], os.environ) == 0
    assert capfd.readouterr().err == "on its way\n"


@pytest.mark.parametrize("argv", [[], ["cluster"]])
def test_no_command_shows_the_help_and_exits_with_2(argv: list[str], capsys: Out):
    assert main(argv) == 2
    assert "Commands:" in capsys.readouterr().err


def test_help_and_version_exit_with_0(capsys: Out):
    assert main(["--help"]) == 0
    assert "Exit codes: 0 success" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{autopar.__version__}\n"


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("table", "zoo:mlp"),
        ("json", "{"),
        ("dot", "digraph plan {"),
        ("mermaid", "flowchart"),
        ("html", "<!doctype html>"),
    ],
)
def test_show_writes_each_form_to_stdout_or_a_file(form: str, start: str, saved: Path, capsys: Out):
    assert main(["show", "plan.json", "--format", form]) == 0
    out = capsys.readouterr().out
    assert out.startswith(start)

    assert main(["show", "plan.json", "--format", form, "-o", "new/file"]) == 0
    assert Path("new/file").read_text() == out


def test_show_json_is_the_file_itself(saved: Path, capsys: Out):
    main(["show", "plan.json", "--format", "json"])

    assert capsys.readouterr().out == Path("plan.json").read_text()


def test_diff_exits_with_1_on_request_only(saved: Path, capsys: Out):
    assert main(["diff", "plan.json", "slower.json"]) == 0
    assert "time step_time: 200 us -> 240 us (+20.0%)" in capsys.readouterr().out
    assert main(["diff", "plan.json", "slower.json", "--exit-code"]) == 1
    assert main(["diff", "plan.json", "plan.json", "--exit-code"]) == 0


def test_diff_json_lists_the_differences(saved: Path, capsys: Out):
    main(["diff", "plan.json", "slower.json", "--json"])

    assert json.loads(capsys.readouterr().out)[0] == {
        "kind": "parameter", "name": "up.weight", "before": "S0 S1, gathered per_phase", "after": "R S1",
    }  # fmt: skip


def test_check_exits_with_1_on_findings(saved: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.cli.check._installed_torch", lambda: "2.13.0+cpu")

    assert main(["check", "plan.json", "--baseline", "plan.json"]) == 0
    assert "6 checks passed (over-budget, stale, other-workload, step-time-regression" in capsys.readouterr().out
    assert main(["check", "slower.json", "--baseline", "plan.json", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_check_finds_another_cluster(saved: Path, capsys: Out):
    assert main(["check", "plan.json", "-c", "cpu:4"]) == 1
    assert "plan.json: stale: made for another cluster: devices, groups, name, nodes differ" in capsys.readouterr().out


def test_explain_tells_of_the_plan_and_of_a_parameter(saved: Path, capsys: Out):
    assert main(["explain", "plan.json"]) == 0
    assert "no plan can be below 199 us" in capsys.readouterr().out
    assert main(["explain", "plan.json", "up.weight"]) == 0
    assert "on tp (size 4, node): Shard(1)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan", "cluster"])
def test_schemas_are_printed(name: str, capsys: Out):
    assert main(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"autopar {name}"


def test_a_shown_cluster_validates_as_a_file(tmp_path: Path, capsys: Out):
    assert main(["cluster", "show", "h100-sxm-80gb:8x4"]) == 0
    path = tmp_path / "c.yaml"
    path.write_text(capsys.readouterr().out)

    assert main(["cluster", "validate", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: valid, 32 devices in 4 nodes\n"


def test_cluster_list_names_presets(capsys: Out):
    assert main(["cluster", "list"]) == 0
    assert "  dgx-h100 " in capsys.readouterr().out
    assert main(["cluster", "list", "--json"]) == 0
    assert "h100-sxm-80gb" in json.loads(capsys.readouterr().out)["devices"]


def test_cluster_detect_describes_this_machine(tmp_path: Path, capsys: Out):
    assert main(["cluster", "detect", "-o", str(tmp_path / "here.yaml")]) == 0
    assert main(["cluster", "validate", str(tmp_path / "here.yaml")]) == 0
    assert "in 1 node\n" in capsys.readouterr().out


def test_cluster_detect_describes_ranks_that_share_cores(capsys: Out):
    assert main(["cluster", "detect", "--cpu-ranks", "4096", "--json"]) == 0

    (node,) = json.loads(capsys.readouterr().out)["nodes"].values()
    assert node["count"] == 4096
    assert 0 < node["cores"] < 4096


def test_run_launches_the_plans_ranks(saved: Path, small_plan: Plan):
    one = launch_command(small_plan, ["train.py", "--steps", "2"], 1, 0, None)
    two = launch_command(small_plan, ["-m", "train"], 2, 1, "host:29500")

    assert one[1:] == ["-m", "autopar.cli.torchrun", "--nproc-per-node=8", "--standalone", "train.py", "--steps", "2"]
    assert "--nproc-per-node=4" in two
    assert two[-5:] == ["--node-rank=1", "--rdzv-backend=static", "--rdzv-endpoint=host:29500", "-m", "train"]


def test_a_port_that_is_taken_is_told_before_ranks_start(saved: Path, capsys: Out):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        status = main(["run", "plan.json", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--", "train.py"])

    assert status == 2
    assert f"this machine cannot listen at port {port} (Address already in use)" in capsys.readouterr().err


def test_run_names_the_plan_to_its_processes_and_keeps_the_users_threads(saved: Path, small_plan: Plan):
    cores = replace(small_plan, cluster={"devices": {"cpu": {"kind": "cpu"}}})

    assert environment(cores, Path("plan.json"), {}) == {
        "AUTOPAR_PLAN": str(saved / "plan.json"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert environment(cores, Path("plan.json"), {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in environment(small_plan, Path("plan.json"), {})


def test_run_hands_over_the_plan_and_returns_the_status_of_the_script(
    saved: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    script = "import os, sys; print(os.environ['AUTOPAR_PLAN'], sys.argv[1:], flush=True); sys.exit(int(sys.argv[2]))"
    Path("train.py").write_text(script)
    # torchrun itself is slow and tested by torch: a stand-in that drops its flags and runs the script once
    stand_in = [sys.executable]
    monkeypatch.setattr("autopar.cli.run.TORCHRUN", stand_in)
    monkeypatch.setattr("autopar.cli.run.rank_flags", lambda *_: [])

    assert main(["run", "plan.json", "--", "train.py", "--steps", "0"]) == 0
    assert capfd.readouterr().out == f"{saved / 'plan.json'} ['--steps', '0']\n"
    assert main(["run", "plan.json", "--", "train.py", "--steps", "3"]) == 3


def test_a_profiled_run_keeps_torchs_profiler_quiet_unless_the_user_says_otherwise(
    saved: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("train.py").write_text("import os; print(os.environ.get('KINETO_LOG_LEVEL'))")
    monkeypatch.setattr("autopar.cli.run.TORCHRUN", [sys.executable])
    monkeypatch.setattr("autopar.cli.run.rank_flags", lambda *_: [])
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)

    for profiled in ([], ["--profile", "measured"]):
        assert main(["run", "plan.json", *profiled, "--", "train.py"]) == 0
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    assert main(["run", "plan.json", "--profile", "measured", "--", "train.py"]) == 0

    assert capfd.readouterr().out.split() == ["None", "6", "1"]


def test_ending_run_ends_what_it_launched(saved: Path):
    sleeper = "import time; print(1, flush=True); time.sleep(60)"
    called = f"wait_for([sys.executable, '-c', {sleeper!r}], {{}})"
    code = f"import sys; from autopar.cli.launching import wait_for; sys.exit({called})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "1\n"
        outer.terminate()

        assert outer.stdout.read() == ""  # end of file: nobody holds the pipe any more
        assert outer.wait() == 128 + signal.SIGTERM
