"""States as a single device has them, on rank 0, out of all ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime.errors import not_compiled
from autopar.runtime.module import Runner, runner_of
from autopar.runtime.whole import whole

Key = TypeVar("Key", bound=Hashable)


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
    names = [name for told in runner.ranks.gather(list(mine)) for name in told]
    found = dict(gathered(mine, _in_order(model, names), runner))
    return found if runner.ranks.rank == 0 else {}


def gathered(mine: Mapping[Key, Any], keys: Iterable[Key], runner: Runner) -> Iterator[tuple[Key, Any]]:
    """Yield, on rank 0, each key with what ranks have under it: tensors whole and on the CPU; on others nothing useful.

    `mine` is what this rank has; `keys`, all of them, are the same on all ranks, which must all go through this.
    """
    forms = {key: (tuple(each.shape), each.dtype) for key, each in mine.items() if isinstance(each, torch.Tensor)}
    told = runner.ranks.gather((forms, {key: each for key, each in mine.items() if key not in forms}))
    for key in keys:
        holders = [rank for rank, (tensors, _) in enumerate(told) if key in tensors]
        if not holders:
            yield key, next(others[key] for _, others in told if key in others)
            continue
        shape, dtype = told[holders[0]][0][key]
        # With stages a tied parameter is on several, and whoever shares the first one's mesh gathers it with it.
        gathers = runner.ranks.rank in _beside(runner, holders[0])
        value = _sent(_whole(mine[key], runner) if gathers else None, holders[0], shape, dtype, runner)
        if value is not None:
            yield key, value.cpu().clone()


def _whole(value: torch.Tensor, runner: Runner) -> torch.Tensor:
    """Return a tensor whole and where the ranks communicate: counters of optimizers are on the CPU beside GPUs."""
    return whole(value).to(runner.ranks.device)


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
    known = [name for name in _places(model, buffers=True) if name in wanted]
    return list(dict.fromkeys([*known, *wanted]))


def parameter_places(model: nn.Module) -> Iterator[str]:
    """Yield the names of all places for parameters, those of other pipeline stages included, in the model's order."""
    return _places(model, buffers=False)


def _places(model: nn.Module, *, buffers: bool) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *(module._buffers if buffers else ())):
            yield f"{path}.{key}" if path else key
