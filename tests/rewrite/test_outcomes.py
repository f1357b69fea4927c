"""Results made again of remembered forms are what the operators make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from autopar._torch import FakeTensorMode, storage_key
from autopar.rewrite import outcomes, rewrite, shapes
from tests.support.decide import drawn, mesh_of
from tests.support.models import cases
from tests.support.whole import Whole

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Begin, and leave off, with nothing remembered."""
    outcomes._known.clear()
    yield
    outcomes._known.clear()


def form(value: Any, memories: dict[int, int]) -> Any:
    """Return all that passes read of a value; memory by the order in which it is first seen."""
    if isinstance(value, tuple | list):
        return [form(each, memories) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    memory = memories.setdefault(storage_key(value), len(memories))
    layout = tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return type(value), *layout, value.dtype, value.device, memory, value.requires_grad


def forms(program: fx.GraphModule) -> dict[str, Any]:
    memories: dict[int, int] = {}
    return {node.name: form(node.meta["val"], memories) for node in program.graph.nodes if node.op != "output"}


@pytest.mark.parametrize("name", ["mlp", "vision", "tied"])
def test_programs_have_the_forms_that_asking_each_operator_gives(name: str, monkeypatch: pytest.MonkeyPatch):
    whole = Whole.of(*cases()[name])
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    plain, asked = shapes.propagate, outcomes._asked

    def both(gm: fx.GraphModule, names: dict[str, str], by: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shapes, "called", lambda node, *given: asked(node.target, *given))
            plain(gm, names, by)
        wanted = forms(gm)
        plain(gm, names, by)
        found.append((wanted, forms(gm)))

    monkeypatch.setattr("autopar.rewrite.local.propagate", both)
    decisions = drawn(whole.captured.graph, mesh_of(dp=2, tp=2), 1)
    for rank in range(2):
        rewrite(whole.captured.joint, whole.captured.graph, decisions, rank)

    assert len(found) == 2
    assert all(got == wanted for wanted, got in found)
    assert len(outcomes._known) < len(found[0][0]), "calls that are equal have one outcome"


def call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `outcomes.called` does with a node of this operator, of fake tensors for shapes and tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {id(each): mode.from_tensor(each) for each in args if isinstance(each, torch.Tensor)}
    node = fx.Graph().call_function(target)
    return outcomes.called(node, tuple(fakes.get(id(each), each) for each in args), kwargs, mode)


def test_numbers_of_unlike_types_are_not_equal():
    made = [call(ATEN.add.Tensor, torch.ones(3, dtype=torch.int64), other) for other in (1, 1.0, True, 1)]

    assert [each.dtype for each in made] == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_a_view_has_its_arguments_memory_and_what_is_fresh_none_of_it():
    mode = FakeTensorMode()
    for _ in range(2):
        base = mode.from_tensor(torch.zeros(4, 6))
        view, fresh = (
            outcomes.called(fx.Graph().call_function(target), (base, 1, 2), {}, mode)
            for target in (ATEN.select.int, ATEN.select_copy.int)
        )
        assert storage_key(view) == storage_key(base)
        assert (tuple(view.shape), view.stride(), view.storage_offset()) == ((4,), (6,), 2)
        assert storage_key(fresh) != storage_key(base)
        assert (tuple(fresh.shape), fresh.stride(), fresh.storage_offset()) == ((4,), (1,), 0)


def test_the_default_type_is_part_of_what_is_asked():
    found = []
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            found.append(call(ATEN.full.default, [2], 0.5).dtype)
        finally:
            torch.set_default_dtype(before)

    assert found == [torch.float32, torch.float64]


def test_what_overwrites_its_argument_or_is_a_users_is_asked_each_time():
    library = torch.library.Library("autopar_told", "DEF")
    library.define("half(Tensor x) -> Tensor")
    counted = []
    library.impl("half", lambda x: counted.append(1) or x.new_empty(x.shape[0] // 2), "Meta")
    for _ in range(2):
        call(torch.ops.autopar_told.half.default, torch.zeros(4))
        call(ATEN.add_.Tensor, torch.zeros(4), 1)

    assert len(counted) == 2
    assert outcomes._known == {}


def test_an_operator_that_refuses_its_arguments_refuses_them_again():
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reduction dim"):
            call(ATEN.mm.default, torch.zeros(2, 3), torch.zeros(2, 3))
