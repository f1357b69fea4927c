"""A model with few layers stands for a deep one only if its layers are the same."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.models import resolve
from autopar.models.shallow import FEW, shallow


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


def test_equal_layers_are_found_whatever_their_numbers():
    found = shallow(_plain(10), _plain(FEW))

    assert found is not None
    assert found.rows == {"blocks": 10}


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
    assert shallow(_plain(10), few) is None


def test_one_deep_layer_that_differs_is_seen():
    deep = Net(*(Block(at, scale=2.0 if at == 7 else 1.0) for at in range(10)))

    assert shallow(deep, _plain(FEW)) is None


def test_references_have_one_where_layers_are_equal():
    found = resolve("zoo:gpt-tiny", overrides={"layers": "9"})
    alternating = resolve("hf:gemma2", overrides={"num_hidden_layers": "9"})

    assert found.shallow is not None
    assert found.shallow.rows == {"blocks": 9}
    assert alternating.shallow is None
