"""What an editor, a type checker and `help(autopar)` see of the public names."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import autopar
from autopar.options import OptionKeywords, PlanOptions

ROOT = Path(__file__).parent.parent

SCRIPT = """
import autopar
from torch import Tensor, nn
from torch.optim import SGD

def train(model: nn.Module, x: Tensor) -> nn.Module:
    plan = autopar.plan(model, "cpu:2", example_inputs=(x,), fix={"tp": 2}, time_limit="20s")
    compiled = autopar.compile(model, "cpu:2", example_inputs=(x,), plan=plan, outputs="whole", precision="bf16")
    part, parts = autopar.input_part(compiled)
    norm: Tensor = autopar.clip_grad_norm_(compiled, part + parts)
    state: dict[str, object] = autopar.full_state_dict(compiled)
    steps: dict[str, object] = autopar.full_optimizer_state_dict(compiled, SGD(compiled.parameters()))
    autopar.load_optimizer_state_dict(compiled, SGD(compiled.parameters()), steps)
    return compiled if state else nn.Identity()
"""

WRONG = {
    'autopar.compile(nn.Identity(), "cpu:2", example_input=(1,))': 'Unexpected keyword argument "example_input"',
    'autopar.compile(nn.Identity(), "cpu:2", outputs="all")': "Literal['parts', 'whole']",
    'autopar.plan(nn.Identity(), "cpu:2", example_inputs=(), fix=8)': 'Argument "fix" to "plan"',
    "autopar.compil": 'Module has no attribute "compil"',
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the type checker says of each script.

    It has the package's settings and runs where `make lint` runs it, so that it finds all but the scripts checked.
    """
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {"right": SCRIPT, "wrong": "import autopar\nfrom torch import nn\n" + "\n".join(WRONG)}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", *(str(folder / f"{name}.py") for name in scripts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    assert "(checked 2 source files)" in done.stdout, done.stdout
    return {name: [line for line in done.stdout.splitlines() if f"{name}.py:" in line] for name in scripts}


def test_a_type_checker_knows_the_public_names(told: dict[str, list[str]]):
    assert told["right"] == []


def test_a_type_checker_tells_what_is_wrong_with_a_call(told: dict[str, list[str]]):
    for line, text in enumerate(WRONG.values(), start=3):
        assert any(f"wrong.py:{line}:" in each and text in each for each in told["wrong"]), (text, told["wrong"])


def test_compile_has_its_own_signature():
    parameters = inspect.signature(autopar.compile).parameters

    assert list(parameters)[:2] == ["model", "cluster"]
    assert {"example_inputs", "plan", "init_fn", "inputs", "outputs", "backend", "device"} <= parameters.keys()
    assert autopar.compile.__name__ == "compile"


def _of_functions() -> list[str]:
    return [name for name in autopar.__all__ if inspect.isfunction(getattr(autopar, name))]


@pytest.mark.parametrize("name", _of_functions())
def test_public_functions_are_documented_and_typed_throughout(name: str):
    function = getattr(autopar, name)

    assert "Raises:" in inspect.getdoc(function)
    assert get_type_hints(function).keys() == {*inspect.signature(function).parameters, "return"}


def test_help_shows_every_public_name():
    shown = pydoc.plain(pydoc.render_doc(autopar))

    for name in _of_functions():
        assert f"    {name}(" in shown


def test_keywords_of_plan_are_the_options():
    assert [*OptionKeywords.__annotations__] == [each.name for each in dataclasses.fields(PlanOptions)]


@pytest.mark.parametrize("read", ["parse", "from_file", "from_dict"])
def test_what_is_no_cluster_is_an_error_of_autopar(read: str):
    with pytest.raises(autopar.AutoparError, match="nowhere"):
        getattr(autopar.ClusterSpec, read)("nowhere.yaml")


def test_clusters_of_the_public_name_are_of_it_and_equal(tmp_path: Path):
    made = autopar.ClusterSpec.parse("cpu:4x2")

    assert type(made) is autopar.ClusterSpec
    assert autopar.ClusterSpec.from_dict(made.to_dict()) == made
