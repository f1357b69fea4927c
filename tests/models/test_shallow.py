"""A model with few layers stands for a deep one only if its layers are the same."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.ir.repetition import FEW, Repetition
from autopar.models import resolve
from autopar.models.shallow import shallow


class Block(nn.Module):
    def __init__(self, at: int, *, wide: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.layer_idx = at
        self.scale = scale
        self.inner = nn.Linear(8, 8, bias=wide)


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, classes)


def _plain(count: int) -> Net:
    return Net(*(Block(at) for at in range(count)))


def _found(deep: Net, few: Net) -> dict[str, Repetition] | None:
    found = shallow(deep, few, {"blocks": Repetition(10)})
    return dict(found.rows) if found else None


def test_equal_layers_are_found_whatever_their_numbers():
    assert _found(_plain(10), _plain(FEW)) == {"blocks": Repetition(10)}


@pytest.mark.parametrize(
    "few",
    [
        Net(*(Block(at, scale=0.5) for at in range(FEW))),
        Net(*(Block(at, wide=at == 1) for at in range(FEW))),
        Net(*(Block(at) for at in range(FEW)), classes=5),
        _plain(FEW - 1),
        _plain(10),
    ],
    ids=["another scale", "another layer", "another head", "too few", "none fewer"],
)
def test_whatever_else_differs_is_no_stand_in(few: Net):
    assert _found(_plain(10), few) is None


def test_one_deep_layer_that_differs_is_seen():
    deep = Net(*(Block(at, scale=2.0 if at == 2 else 1.0) for at in range(10)))

    assert _found(deep, _plain(FEW)) is None


@pytest.mark.parametrize(
    ("reference", "overrides", "rows"),
    [
        ("zoo:gpt-tiny", {"layers": "9"}, {"blocks": Repetition(9)}),
        ("hf:llama", {"num_hidden_layers": "9"}, {"model.layers": Repetition(9)}),
        ("hf:gemma2", {"num_hidden_layers": "11"}, {"model.layers": Repetition(5, period=2, behind=1)}),
        ("hf:gemma3_text", {"num_hidden_layers": "26"}, {"model.layers": Repetition(4, period=6, behind=2)}),
        ("hf:deepseek_v3", {"num_hidden_layers": "12"}, {"model.layers": Repetition(9, before=3)}),
        (
            "hf:t5",
            {"num_layers": "9", "num_decoder_layers": "8"},
            {"encoder.block": Repetition(8, before=1), "decoder.block": Repetition(7, before=1)},
        ),
    ],
)
def test_models_have_shorter_ones_where_their_layers_repeat(
    reference: str, overrides: dict[str, str], rows: dict[str, Repetition]
):
    found = resolve(reference, overrides=overrides).shallow

    wider = {path: row.with_margins() for path, row in rows.items() if row.with_margins().more > 0}
    assert [each.rows for each in found] == [each for each in (rows, wider) if each]
    assert [each.rows for each in found] == [each for each in (rows, wider) if each], "asked again"


def test_towers_of_a_model_are_shortened_each_for_itself():
    found = next(iter(resolve("hf:llava").shallow))

    assert {path.rpartition(".")[2]: row.layers for path, row in found.rows.items()} == {"layers": 32}
    assert len(found.rows) == 2


def test_models_whose_layers_do_not_repeat_have_none():
    assert list(resolve("zoo:gpt-tiny", overrides={"layers": "3"}).shallow) == []
    assert list(resolve("zoo:mlp").shallow) == []
