"""Programs are remembered for equal models and calls, and for no others."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.ir.plan import Plan
from autopar.ir.plan_json import to_json
from autopar.options import PlanOptions
from autopar.progress import Silent
from cost_models.cluster import ClusterSpec
from tests.support import remembering
from tests.support.models import Mlp


def key(model: nn.Module, example: tuple[Any, ...] | None = None, precision: str = "fp32") -> bytes | None:
    return remembering._key(model, example or (torch.zeros(8, 8),), precision, {})


def changed(change: str) -> nn.Module:
    """Return the model with one thing about it changed."""
    torch.manual_seed(0)
    model = Mlp()
    first = next(each for each in model.modules() if isinstance(each, nn.Linear))
    match change:
        case "value":
            first.scale = torch.ones(2)
        case "other value":
            first.scale = torch.zeros(2)
        case "mode":
            first.eval()
        case "frozen":
            first.weight.requires_grad_(False)
        case "attribute":
            first.told = 3
        case "tied":
            first.bias = nn.Parameter(first.weight.detach()[0])
        case "hook":
            first.register_forward_hook(twice)
    return model


def twice(_module: nn.Module, _args: Any, result: torch.Tensor) -> torch.Tensor:
    return 2 * result


def test_equal_models_made_apart_are_one():
    assert key(changed("")) == key(changed(""))
    assert key(changed("")) is not None


def test_values_that_are_fake_while_a_model_is_captured_are_no_difference():
    model = changed("")
    with torch.no_grad():
        model.get_parameter("up.weight")[0, 0] += 1

    assert key(model, (torch.ones(8, 8),)) == key(changed(""), (torch.zeros(8, 8),))


def test_values_that_a_program_holds_itself_are_a_difference():
    assert key(changed("value")) != key(changed("other value"))


@pytest.mark.parametrize("change", ["value", "mode", "frozen", "attribute", "tied", "hook"])
def test_models_that_differ_in_one_thing_are_two(change: str):
    assert key(changed(change)) != key(changed(""))


def test_other_calls_are_others():
    model = changed("")

    assert key(model) != key(model, (torch.zeros(4, 8),))
    assert key(model) != key(model, (torch.zeros(8, 8, dtype=torch.float64),))
    assert key(model) != key(model, precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = key(model)
    assert inside != key(model)


def test_a_class_made_in_a_function_is_not_written_down():
    class Own(nn.Linear):
        pass

    assert key(Own(8, 8)) is None


def test_what_is_remembered_is_what_a_capture_gives():
    example = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64))
    twice_asked = [remembering._remembered(changed(""), example, "fp32") for _ in range(2)]
    anew = remembering._captured_for(changed(""), example, "fp32")

    assert twice_asked[0] is twice_asked[1]
    assert twice_asked[0].graph == anew.graph
    assert twice_asked[0].joint.code == anew.joint.code


def test_a_plan_that_was_searched_is_given_to_who_asks_for_equal_and_no_other(monkeypatch: pytest.MonkeyPatch):
    searched = []

    def search(*asked: Any) -> Plan:
        searched.append(asked[3])
        return plan_captured(*asked)

    monkeypatch.setattr(remembering, "_plan_captured", search)
    captured = remembering.remembered(Mlp(), (torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64)))

    def planned(name: str, **fix: int) -> Plan:
        options = PlanOptions.parse(fix=fix)
        return remembering._planned(captured, name, ClusterSpec.parse("cpu:2"), options, Silent())

    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(remembering.FOLDER, folder)
        plans = [planned("Mlp", tp=2), planned("Mlp", tp=2), planned("Mlp", dp_replicate=2), planned("Other", tp=2)]

    assert len(searched) == 3
    assert to_json(plans[0]) == to_json(plans[1])
    assert plans[2].decisions.degrees["dp_replicate"] == 2
    assert plans[3].workload.model == "Other"
