"""What starting the command line loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.ir.plan import Plan

PROBE = """
import sys
from autopar.cli import main
status = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "highspy", "sympy", "networkx"} & set(sys.modules))
print("loaded", heavy, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["plan", "--help"],
        ["show", "plan.json"],
        ["show", "plan.json", "--format", "html"],
        ["diff", "plan.json", "plan.json"],
        ["check", "plan.json", "--baseline", "plan.json"],
        ["explain", "plan.json"],
        ["schema", "plan"],
        ["cluster", "show", "dgx-h100"],
        ["cluster", "list"],
        ["plan", "zoo:mlp", "-c", "cpu:4", "--fix", "tq=1"],
    ],
    ids=" ".join,
)
def test_commands_that_capture_nothing_load_no_heavy_library(argv: list[str], small_plan: Plan, tmp_path: Path):
    small_plan.save(tmp_path / "plan.json")

    done = subprocess.run(
        [sys.executable, "-c", PROBE, *argv], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.stderr.splitlines()[-1] == "loaded []"


def test_validation_loads_sympy_for_its_formulas_and_nothing_else():
    rows = Path(__file__).parents[2] / "benchmarks" / "data" / "matmul_achievable.csv"

    done = subprocess.run(
        [sys.executable, "-c", PROBE, "validate", str(rows)], capture_output=True, text=True, check=False
    )

    assert done.stderr.splitlines()[-1] == "loaded ['sympy']"


def test_importing_autopar_loads_no_torch():
    code = "import sys, autopar; autopar.Plan, autopar.AutoparError, autopar.ClusterSpec; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


def test_a_reader_that_stops_early_is_no_error(small_plan: Plan, tmp_path: Path):
    small_plan.save(tmp_path / "plan.json")
    command = f"{sys.executable} -m autopar show plan.json --format json | head -c 1; echo ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert (done.stdout, done.stderr) == ("{0\n", "")
