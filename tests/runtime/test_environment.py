"""The environment that a process is started in: torchrun's, none, or one that does not fit together."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import UsageError
from autopar.runtime.ranks import Ranks

WRONG = {
    "no number": ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', and must be a whole number"),
    "no such rank": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2: ranks are numbered from 0"),
    "nowhere to meet": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
        "WORLD_SIZE is 2, and MASTER_PORT not set: ranks cannot meet",
    ),
}
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", WRONG)
def test_an_environment_that_does_not_fit_together_is_refused(monkeypatch: pytest.MonkeyPatch, name: str):
    given, message = WRONG[name]
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)

    with pytest.raises(UsageError) as caught:
        Ranks.join("cpu")

    assert message in str(caught.value)
    assert "torchrun --nproc-per-node" in str(caught.value)


def test_without_an_environment_a_process_is_alone():
    assert Ranks.join("cpu") == Ranks(0, 1, torch.device("cpu"))


def test_devices_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")

    with pytest.raises(UsageError, match="to run on cuda:2, and torch sees 2 such devices here.*cpu:2"):
        Ranks.join("cuda")
