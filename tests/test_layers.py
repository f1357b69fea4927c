"""The dependency rules of docs/architecture.md hold, and would be noticed if they did not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import autopar

ROOT = Path(__file__).parent.parent
PACKAGE = Path(autopar.__file__).parent
STAGES = ("capture", "strategies", "costs", "search", "simulate", "rewrite", "runtime", "report")


def test_imports_go_down():
    lint = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_an_import_that_goes_up_is_noticed(tmp_path: Path):
    for name in ("ir", "search", "costs"):
        (tmp_path / "autopar" / name).mkdir(parents=True)
        (tmp_path / "autopar" / name / "__init__.py").write_text("")
    (tmp_path / "autopar" / "__init__.py").write_text("")
    (tmp_path / "autopar" / "search" / "__init__.py").write_text("import autopar.costs\n")
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_package = autopar\n"
        "[importlinter:contract:layers]\nname = layers\ntype = layers\n"
        "layers =\n    autopar.search | autopar.costs\n    autopar.ir\n"
    )
    lint = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run(
        [lint, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
    )

    assert "autopar.search -> autopar.costs" in done.stdout


def test_every_module_of_the_package_has_its_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    placed = {name.strip().removeprefix("autopar.") for layer in layers for name in layer.split("|")}
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {
        "__init__"
    }

    assert found == placed
    assert set(STAGES) <= placed


def test_architecture_names_every_file_with_its_own_first_sentence():
    told: dict[str, str] = {}
    folder = ""
    for line in (ROOT / "docs" / "architecture.md").read_text().partition("## Files")[2].splitlines():
        folder = found[1] if (found := re.match(r"### `(.*)/`", line)) else folder
        if found := re.match(r"- `(.*?)`: (.*)", line):
            told[f"{folder}/{found[1]}"] = found[2].rstrip(".")
    files = [path for package in ("autopar", "cost_models") for path in (ROOT / package).rglob("*.py")]
    says = {str(path.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text())) or "" for path in files}

    assert sorted(told) == sorted(says)
    assert [name for name in told if not " ".join(says[name].split()).startswith(told[name])] == []
