"""State dicts of one rank: they warn where they are saved as if they were all, and are not loaded for another's."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.support.models import Layers
from tests.support.ranks import RankPool

FIXES = [{"dp_shard": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "microbatch": 2}]


def _trained(fix: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = autopar.compile(Layers(), "cpu:2", example_inputs=(x,), fix=fix)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).backward()
    optimizer.step()
    return model, optimizer


def _pickled(value: Any) -> tuple[bytes, list[str]]:
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.save(value, file)
    return file.getvalue(), [str(each.message) for each in found]


def saved(_rank: int, fix: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return the warnings of saving the states of this rank, of saving the full ones, and of copying the former."""
    model, optimizer = _trained(fix)
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file, told = _pickled(own)
    back = torch.load(io.BytesIO(file))
    assert type(back["model"]) is type(back["optimizer"]) is OrderedDict
    assert back["model"]._metadata == own["model"]._metadata
    model.load_state_dict(back["model"])  # by the rank that saved it
    optimizer.load_state_dict(back["optimizer"])
    _, quiet = _pickled((autopar.full_state_dict(model), autopar.full_optimizer_state_dict(model, optimizer)))
    with warnings.catch_warnings(record=True) as copied:
        warnings.simplefilter("always")
        copy.deepcopy(own)
    return told, quiet, [str(each.message) for each in copied]


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_own_states_warn_when_they_are_pickled_and_full_ones_do_not(pool: RankPool, fix: dict[str, Any]):
    for told, quiet, copied in pool.values(saved, fix):
        assert [each.split(" is pickled")[0] for each in told] == [
            "the state_dict() of this compiled Layers",
            "the state_dict() of this Adam",
        ]
        assert all("autopar.full_state_dict(model) and" in each for each in told)
        assert quiet == copied == []


def saved_by_safetensors(_rank: int, fix: dict[str, Any], folder: str) -> list[str]:
    """Return the warnings of saving this rank's own state and the full one by safetensors."""
    model, _ = _trained(fix)
    file = f"{folder}/{dist.get_rank()}.safetensors"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        safetensors.torch.save_file(model.state_dict(), file)
        safetensors.torch.save_file(autopar.full_state_dict(model), file)
    return [str(each.message) for each in found]


def test_a_stages_own_state_warns_when_safetensors_writes_it(pool: RankPool, tmp_path: Path):
    for told in pool.values(saved_by_safetensors, FIXES[2], str(tmp_path)):
        assert {each.split(":")[0] for each in told} == {"the state_dict() of this compiled Layers is saved"}


def loaded_of_rank_0(_rank: int, fix: dict[str, Any], what: str) -> None:
    """Do what loops do that know data parallelism only: rank 0 saves, all load."""
    model, optimizer = _trained(fix)
    own = model if what == "model" else optimizer
    box = [_pickled(own.state_dict())[0]]
    dist.broadcast_object_list(box, src=0)
    own.load_state_dict(torch.load(io.BytesIO(box[0])))


@pytest.mark.parametrize(("what", "name"), [("model", "layers.0.weight"), ("optimizer", "exp_avg of layers.0.weight")])
@pytest.mark.parametrize("fix", FIXES[:2], ids=str)
def test_a_state_that_rank_0_saved_of_its_own_is_refused_on_others(
    pool: RankPool, fix: dict[str, Any], what: str, name: str
):
    first, second = pool.run(loaded_of_rank_0, fix, what)
    assert first.error == ""
    assert f"{name} in the state dict is the part of it that the rank at (0,) of the mesh saved" in second.error
    assert "this rank is at (1,)" in second.error
