"""State dicts of one rank, which are not what a single device saves: told when they are pickled, and when loaded."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar._torch import dtensor_of, is_dtensor, local_of
from autopar.runtime.errors import own_state_pickled, part_of_other_rank
from autopar.runtime.parameters import slots
from autopar.runtime.placing import dense_copy, own_part
from autopar.warning import warn

if TYPE_CHECKING:
    from autopar.runtime.module import Runner

_WHAT = "_autopar_what"


class OwnState(OrderedDict[str, Any]):
    """What `state_dict()` of a compiled model, or of its optimizer, returns on one of several ranks.

    Unpickled it is an `OrderedDict`, which `torch.load` takes for safe.
    """

    @classmethod
    def called(cls, what: str, state: Mapping[str, Any]) -> OwnState:
        """Return a state dict that calls itself `what` in its warning, with the attributes that torch gives it."""
        made = cls(state)
        made.__dict__.update({**getattr(state, "__dict__", {}), _WHAT: what})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle it, and warn that it is this rank's own."""
        warn(own_state_pickled(self.__dict__[_WHAT]))
        return self._plain().__reduce_ex__(protocol)

    def items(self) -> Any:
        """Return the names and tensors, and warn if safetensors asks for them: it writes them without pickling."""
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "safetensors":
            warn(own_state_pickled(self.__dict__[_WHAT], "saved"))
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnState:
        """Return a deep copy, without the warning: it is in no file."""
        return type(self).called(self.__dict__[_WHAT], copy.deepcopy(self._plain(), memo))

    def _plain(self) -> OrderedDict[str, Any]:
        made = OrderedDict(self)
        made.__dict__.update({name: each for name, each in self.__dict__.items() if name != _WHAT})
        return made


def refuse_part_of_other_rank(name: str, value: torch.Tensor, mine: torch.Tensor) -> None:
    """Raise where a DTensor that was loaded is the part that another rank than this one had saved.

    Raises:
        UsageError: it is.
    """
    saved, here = (each.device_mesh.get_coordinate() for each in (value, mine))  # type: ignore[attr-defined]
    if saved != here and not all(each.is_replicate() for each in value.placements):  # type: ignore[attr-defined]
        raise part_of_other_rank(name, saved, here)


def distributed(
    model: nn.Module, state: Mapping[str, Any], runner: Runner, elsewhere: frozenset[str]
) -> dict[str, Any]:
    """Return the state dict with whole tensors replaced by this rank's part of them where the model holds DTensors.

    What other pipeline ranks hold (`elsewhere`) is left out.

    Raises:
        UsageError: the state dict has another rank's part of a tensor.
    """
    held = {slot.name: slot.value for slot in slots(model)}
    found = {name: value for name, value in state.items() if name not in elsewhere}
    for name, value in list(found.items()):
        mine = held.get(name)
        spec = getattr(mine, "_spec", None)
        if spec is None or mine is None or not isinstance(value, torch.Tensor):
            continue
        if is_dtensor(value):
            refuse_part_of_other_rank(name, value, mine)
            continue
        if tuple(value.shape) != tuple(mine.shape):
            continue  # torch's own message names both shapes
        layout = runner.decisions.parameters[name].placements
        part = own_part(value.detach(), layout, runner.groups.mesh, runner.groups.rank)
        local = local_of(mine)
        found[name] = dtensor_of(dense_copy(part.to(local.device, local.dtype), local), spec)
    return found
