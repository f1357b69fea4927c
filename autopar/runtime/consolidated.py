"""States as a single device has them: the model's on rank 0 out of all ranks, and an optimizer's on the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autopar._torch import is_dtensor
from autopar.runtime.errors import not_compiled
from autopar.runtime.module import Runner, runner_of
from autopar.runtime.parameters import distributed_from
from autopar.runtime.placing import dense_copy, own_part
from autopar.runtime.whole import whole


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return, on rank 0, the state dict that the single-device model would have, on the CPU; on others an empty one.

    Parameters held in parts are gathered, and those of all pipeline stages sent to rank 0, one after another: it is
    the only rank that needs room for the whole model. All ranks must call this. What is returned can be saved with
    `torch.save`, `safetensors`, or `save_pretrained(folder, state_dict=...)`, and loaded by the single-device model or
    by `load_state_dict` of a compiled one.

    Raises:
        UsageError: the model is not compiled, or waits for its first call.
    """
    runner = runner_of(model)
    if runner is None:
        raise not_compiled(type(model).__name__)
    mine = model.state_dict()
    forms = {name: (tuple(each.shape), each.dtype) for name, each in mine.items() if isinstance(each, torch.Tensor)}
    told = runner.ranks.gather((forms, {name: each for name, each in mine.items() if name not in forms}))
    found: dict[str, Any] = {}
    for name in _in_order(model, [name for tensors, others in told for name in (*tensors, *others)]):
        holders = [rank for rank, (tensors, _) in enumerate(told) if name in tensors]
        if not holders:
            found[name] = next(others[name] for _, others in told if name in others)
            continue
        shape, dtype = told[holders[0]][0][name]
        # With stages a tied parameter is on several, and whoever shares the first one's mesh gathers it with it.
        gathers = runner.ranks.rank in _beside(runner, holders[0])
        value = _sent(whole(mine[name]) if gathers else None, holders[0], shape, dtype, runner)
        if value is not None:
            found[name] = value.cpu().clone()
    return found if runner.ranks.rank == 0 else {}


def _beside(runner: Runner, rank: int) -> range | tuple[int, ...]:
    """Return the ranks that share the stages of a rank."""
    pipeline = runner.pipeline
    if pipeline is None or pipeline.depth == 1:
        return range(runner.ranks.world_size)
    return pipeline.blocks[pipeline.holder(rank)]


def _sent(
    value: torch.Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype, runner: Runner
) -> torch.Tensor | None:
    """Return on rank 0 what `source` has; `None` on other ranks."""
    rank, device = runner.ranks.rank, runner.ranks.device
    if rank == source and value is not None:
        if source == 0:
            return value
        dist.send(value.detach().contiguous(), dst=0)
    elif rank == 0:
        received = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(received, src=source)
        return received
    return None


def _in_order(model: nn.Module, names: list[str]) -> list[str]:
    """Return names without repetition in the order of the single-device model's state dict, others behind."""
    wanted = dict.fromkeys(names)
    known = [name for name in _places(model) if name in wanted]
    return list(dict.fromkeys([*known, *wanted]))


def _places(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers):
            yield f"{path}.{key}" if path else key


def spread_state(optimizer: Optimizer, named: Mapping[str, torch.Tensor], runner: Runner) -> None:
    """Replace whole tensors in an optimizer's state, as a single device saved them, by this rank's part of them.

    `named` are the parameters by their names. Only state of a parameter's own shape is held as that is.
    """
    for name, parameter in named.items():
        state = optimizer.state.get(parameter)
        if not state or not is_dtensor(parameter):
            continue
        layout = runner.decisions.parameters[name].placements
        for key, value in list(state.items()):
            if (
                isinstance(value, torch.Tensor)
                and not is_dtensor(value)
                and value.dim()
                and value.shape == parameter.shape
            ):
                part = dense_copy(own_part(value, layout, runner.groups.mesh, runner.groups.rank), value)
                state[key] = distributed_from(part, parameter, name, layout, runner.groups)
