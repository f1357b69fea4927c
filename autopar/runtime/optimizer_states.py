"""Optimizer states as a single device has them: given to the optimizers of ranks, and gathered from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar._torch import is_dtensor
from autopar.ir.placement import Replicate
from autopar.runtime.consolidated import gathered, parameter_places
from autopar.runtime.errors import not_compiled
from autopar.runtime.module import Runner, runner_of
from autopar.runtime.optimizer_errors import (
    optimizer_group_order,
    optimizer_groups_unlike,
    optimizer_of_others,
    optimizer_state_groups,
    optimizer_state_is_none,
    optimizer_state_names,
)
from autopar.runtime.own_states import refuse_part_of_other_rank
from autopar.runtime.parameters import distributed_from
from autopar.runtime.placing import dense_copy, own_part


@torch.no_grad()
def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return, on rank 0, what `state_dict()` of the single-device model's optimizer would be; on others an empty one.

    Tensors are on the CPU. Its parameters are numbered in the order of `model.parameters()` in each group, as if the
    optimizer had been made for the single-device model by the same lines. All ranks must call this.

    Raises:
        UsageError: the model is not compiled, or the optimizer has parameters that are not the model's.
    """
    runner = _runner(model)
    groups = _Groups.of(model, optimizer, runner)
    mine = {name: dict(optimizer.state.get(each, {})) for name, each in groups.held.items()}
    numbers = {name: i for i, name in enumerate(name for group in groups.names for name in group)}
    flat = {(name, key): value for name, state in mine.items() for key, value in state.items()}
    state: dict[int, dict[str, Any]] = {}
    keys = [(name, key) for told in runner.ranks.gather(list(flat)) for name, key in told]
    in_order = sorted(dict.fromkeys(keys), key=lambda each: numbers[each[0]])
    for (name, key), value in gathered(flat, in_order, runner):
        state.setdefault(numbers[name], {})[key] = value
    param_groups = []
    for group, names in zip(optimizer.param_groups, groups.names, strict=True):
        kept = {key: value for key, value in group.items() if key != "params"}
        if "param_names" in kept:
            kept["param_names"] = list(names)
        param_groups.append({**kept, "params": [numbers[name] for name in names]})
    return {"state": state, "param_groups": param_groups} if runner.ranks.rank == 0 else {}


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give an optimizer of a compiled model the state that a single device's optimizer saved (`state_dict()`).

    Each rank takes what belongs to its parameters, of pipeline stages to those of its own. Parameters are told by
    `param_names`, which optimizers made of `named_parameters()` save, else by their place in their group.
    All ranks must call this with the whole state dict.

    Raises:
        UsageError: the model is not compiled, or the state is none of an optimizer, or of other parameter groups.
    """
    runner = _runner(model)
    groups = _Groups.of(model, optimizer, runner)
    if not {"state", "param_groups"} <= state_dict.keys():
        raise optimizer_state_is_none(state_dict)
    saved = list(state_dict["param_groups"])
    sizes = [len(each["params"]) for each in saved]
    if sizes != [len(each) for each in groups.names]:
        raise optimizer_state_groups(sizes, [len(each) for each in groups.names])
    at: dict[str, int] = {}
    for place, (group, names) in enumerate(zip(saved, groups.names, strict=True)):
        given = group.get("param_names", names)
        if set(given) != set(names):
            raise optimizer_state_names(place, sorted({*given} ^ {*names}))
        at.update(zip(given, group["params"], strict=True))
    param_groups, state = [], {}
    number = 0
    for group, names in zip(saved, groups.own, strict=True):
        kept = dict(group)
        if "param_names" in kept:
            kept["param_names"] = list(names)
        kept["params"] = list(range(number, number + len(names)))
        for name in names:
            if at[name] in state_dict["state"]:
                state[number] = state_dict["state"][at[name]]
            number += 1
        param_groups.append(kept)
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})
    spread_state(optimizer, groups.held, runner)


def spread_state(
    optimizer: Optimizer,
    named: Mapping[str, torch.Tensor],
    runner: Runner,
    distributed: frozenset[str] = frozenset(),
) -> None:
    """Replace whole tensors in an optimizer's state, as a single device saved them, by this rank's part of them.

    `named` are the parameters by their names. State of a parameter's own shape is held as that is; of another shape
    (Adafactor's rows and columns), whole on every rank, as a DTensor if the optimizer makes DTensors of that key
    (`distributed`).

    Raises:
        UsageError: the state has another rank's part of a tensor.
    """
    for name, parameter in named.items():
        state = optimizer.state.get(parameter)
        if not state or not is_dtensor(parameter):
            continue
        layout = runner.decisions.parameters[name].placements
        for key, value in list(state.items()):
            if not isinstance(value, torch.Tensor):
                continue
            if is_dtensor(value):
                refuse_part_of_other_rank(f"{key} of {name}", value, parameter)
            elif value.dim() and value.shape == parameter.shape:
                part = dense_copy(own_part(value, layout, runner.groups.mesh, runner.groups.rank), value)
                state[key] = distributed_from(part, parameter, name, layout, runner.groups)
            elif key in distributed:
                whole = (Replicate(),) * len(runner.groups.mesh.axes)
                state[key] = distributed_from(value, value, name, whole, runner.groups)


def _runner(model: nn.Module) -> Runner:
    runner = runner_of(model)
    if runner is None:
        raise not_compiled(type(model).__name__)
    return runner


@dataclass(frozen=True)
class _Groups:
    """The parameters of an optimizer's groups by their names: this rank's, and those of all ranks in model order."""

    held: Mapping[str, torch.Tensor]
    own: Sequence[Sequence[str]]
    names: Sequence[Sequence[str]]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, runner: Runner) -> _Groups:
        """Return them; all ranks must call this."""
        known = {id(each): name for name, each in model.named_parameters()}
        strange: list[torch.Tensor] = []
        held: dict[str, torch.Tensor] = {}
        own: list[list[str]] = []
        for group in optimizer.param_groups:
            strange += [each for each in group["params"] if id(each) not in known]
            own.append([known[id(each)] for each in group["params"] if id(each) in known])
            held.update((known[id(each)], each) for each in group["params"] if id(each) in known)
        with runner.ranks.together("name the optimizer's parameters"):
            if strange:
                raise optimizer_of_others(type(optimizer).__name__, [tuple(each.shape) for each in strange])
        by_rank = runner.ranks.gather(own)
        if len({len(each) for each in by_rank}) > 1:
            raise optimizer_groups_unlike([len(each) for each in by_rank])
        return cls(held, own, [_joined(model, each) for each in zip(*by_rank, strict=True)])


def _joined(model: nn.Module, by_rank: Sequence[list[str]]) -> list[str]:
    """Return the names in one group on all ranks, in the order of the single device."""
    if all(each == by_rank[0] for each in by_rank):
        return by_rank[0]
    order = {name: i for i, name in enumerate(parameter_places(model))}
    for names in by_rank:
        if names != sorted(names, key=order.__getitem__):
            raise optimizer_group_order(names)
    return sorted({name for names in by_rank for name in names}, key=order.__getitem__)
