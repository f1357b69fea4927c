"""Functions that initialise a compiled model's modules, given each module's own tensors whole, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from autopar._torch import is_dtensor, local_of
from autopar.runtime.errors import apply_changes_shape, parameter_elsewhere
from autopar.runtime.parameters import attributes_of, parameter_like, same_random_numbers
from autopar.runtime.placing import own_part
from autopar.runtime.stand_ins import StandIn
from autopar.runtime.whole import whole

if TYPE_CHECKING:
    from autopar.runtime.module import Runner

_TABLES = ("_parameters", "_buffers")


class ParameterElsewhere(StandIn):
    """Stands at a module for a parameter or buffer of a pipeline stage that this rank does not have."""

    def __init__(self, name: str, ranks: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Stand for what is called `name` and is on `ranks`."""
        self._name, self._ranks = name, ranks
        self.shape, self.dtype, self.ndim = torch.Size(shape), dtype, len(shape)

    def __repr__(self) -> str:
        return f"<{self._name}: {list(self.shape)} of another pipeline stage>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise parameter_elsewhere(self._name, self._ranks)


def mark_elsewhere(model: nn.Module, whole_model: nn.Module, told: list[list[str]], dropped: frozenset[str]) -> None:
    """Put stand-ins where modules have no tensors on this rank; `told` are the parameters and buffers of each rank.

    They are plain attributes: tables of parameters and buffers hold `None`, which torch takes for nothing.
    """
    of_rank = [frozenset(names) for names in told]
    for path, module in model.named_modules(remove_duplicate=False):
        for table in _TABLES:
            for key in module.__dict__[table]:
                name = f"{path}.{key}" if path else key
                if name in dropped:
                    value = getattr(whole_model.get_submodule(path), table)[key]
                    ranks = tuple(rank for rank, names in enumerate(of_rank) if name in names)
                    module.__dict__[key] = ParameterElsewhere(name, ranks, tuple(value.shape), value.dtype)


@torch.no_grad()
def apply_whole(model: nn.Module, function: Callable[[nn.Module], Any], runner: Runner) -> nn.Module:
    """Call `function` with each module of a compiled model, children first, as `nn.Module.apply` does; return it.

    While it is called, the module's own parameters and buffers are whole and plain on every rank, those of other
    pipeline stages included, and all ranks draw the same random numbers: what it makes of them is what it would make on
    one device. Then each rank takes its part. All ranks must call this with the same function.

    Raises:
        UsageError: the function gives a tensor another shape.
    """
    same_random_numbers(runner.ranks)
    mine = {name: (tuple(value.shape), value.dtype, value.requires_grad) for name, value in _tensors(model)}
    told = runner.ranks.gather(mine)
    forms = {name: form for each in reversed(told) for name, form in each.items()}
    holders = {name: [rank for rank, each in enumerate(told) if name in each] for name in forms}
    names = {id(module): path for path, module in reversed(list(model.named_modules()))}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        _call(function, module, names[id(module)], forms, holders, runner)

    visit(model)
    return model


def _call(
    function: Callable[[nn.Module], Any],
    module: nn.Module,
    path: str,
    forms: Mapping[str, Any],
    holders: Mapping[str, list[int]],
    runner: Runner,
) -> None:
    """Call the function with one module whose own tensors are whole, and keep this rank's part of what it makes."""
    own: dict[tuple[str, str], tuple[str, torch.Tensor | None]] = {}
    marks: dict[str, Any] = {}
    for table in _TABLES:
        for key, held in module.__dict__[table].items():
            name = f"{path}.{key}" if path else key
            if name in forms:
                own[table, key] = name, held
    for (table, key), (name, held) in own.items():
        shape, dtype, graded = forms[name]
        value = _everywhere(held, shape, dtype, holders[name], runner)
        if table == "_parameters":
            made = nn.Parameter(value, requires_grad=graded)
            value = made if held is None else parameter_like(held, value)
        if key in module.__dict__:
            marks[key] = module.__dict__.pop(key)
        module.__dict__[table][key] = value
    changed: dict[tuple[str, str], Any] = {}
    try:
        with runner.ranks.together("apply a function to the model"), torch.enable_grad():
            function(module)
            for (table, key), (name, _) in own.items():
                value = changed[table, key] = module.__dict__[table].get(key)
                shape = forms[name][0]
                if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                    raise apply_changes_shape(name, shape, tuple(getattr(value, "shape", ())))
    finally:
        for (table, key), (_, held) in own.items():
            module.__dict__[table][key] = held
        module.__dict__.update(marks)
    for at, (name, held) in own.items():
        if held is not None:
            _take(held, changed[at], name, runner)


def _everywhere(
    held: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, holders: list[int], runner: Runner
) -> torch.Tensor:
    """Return on all ranks a copy of the whole of a tensor, of which `holders` have parts or all."""
    value = None if held is None else whole(held.detach()).clone()
    if len(holders) < runner.ranks.world_size:
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=runner.ranks.device)
        value = value.contiguous()
        dist.broadcast(value, src=holders[0])
    if value is None:
        raise RuntimeError("a tensor that all ranks hold is not on this one")
    return value


def _take(held: torch.Tensor, value: torch.Tensor, name: str, runner: Runner) -> None:
    """Write this rank's part of a whole tensor into the one that it holds, which keeps its identity."""
    part = value.detach()
    if is_dtensor(held):
        layout = runner.decisions.parameters[name].placements
        part = own_part(part, layout, runner.groups.mesh, runner.groups.rank)
    local_of(held).detach().copy_(part)
    if isinstance(held, nn.Parameter):
        held.__dict__.update(attributes_of(value))
        held.requires_grad_(value.requires_grad)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
