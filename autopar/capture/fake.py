"""A copy of the user's model whose tensors are fake: it has shapes, and no memory."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from autopar._torch import FakeTensorMode, TorchFunctionMode
from autopar.capture.errors import parameter_kind


class FakeModel:
    """A structural copy of a model on fake CPU tensors; the original is only read.

    Fake tensors are always on the CPU: fake CUDA tensors need a CUDA build, and a plan must not depend on the machine
    that makes it.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._loose: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        memo: dict[int, Any] = {}
        for name, tensor in named_tensors(model):
            _require_dense(name, tensor)
            if id(tensor) not in memo:
                memo[id(tensor)] = (
                    self._fake_parameter(tensor) if isinstance(tensor, nn.Parameter) else self.fake(tensor)
                )
        with mode, _FakeOnCopy(self):
            self.module = _copy(model, memo)
        _install_recorders(self.module)
        _make_no_caches(self.module)
        self.names: dict[int, tuple[str, ...]] = {}
        for name, tensor in named_tensors(self.module):
            self.names[id(tensor)] = (*self.names.get(id(tensor), ()), name)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake CPU tensor of the same shape, strides and dtype, and whether it requires grad."""
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    def _fake_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        with self._mode:
            data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    def fake_loose(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake of a tensor that is neither parameter nor buffer, and remember which it stands for."""
        made = self.fake(tensor.detach())
        self._loose[id(made)] = (made, tensor)
        return made

    def attribute(self, fake: torch.Tensor) -> str | None:
        """Return the path of the plain attribute that holds a fake tensor, itself or inside of lists and dicts.

        `None` where no module holds it so.
        """
        for path, module in self.module.named_modules():
            for name, value in vars(module).items():
                if name not in _OF_TORCH and (inside := _place(value, fake, f"{path}.{name}" if path else name)):
                    return inside
        return None

    def original(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the user's tensor behind a fake one that is neither parameter nor buffer."""
        found = self._loose.get(id(fake))
        return None if found is None else found[1]


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, whose parameters and submodules have names of their own."""


def _place(value: object, sought: torch.Tensor, path: str) -> str | None:
    """Return the path of a tensor inside a value that an attribute at `path` holds: `ps[0]`, `layers[1].weight`."""
    if value is sought:
        return path
    inner: Iterator[tuple[str, object]] = iter(())
    if isinstance(value, nn.Module):  # one in a plain list, which the model does not know
        inner = ((f"{path}.{name}", each) for name, each in named_tensors(value))
    elif isinstance(value, list | tuple):
        inner = ((f"{path}[{i}]", each) for i, each in enumerate(value))
    elif isinstance(value, Mapping):
        inner = ((f"{path}[{key!r}]", each) for key, each in value.items())
    return next((found for name, each in inner if (found := _place(each, sought, name))), None)


class _FakeOnCopy(TorchFunctionMode):
    """Makes `deepcopy` of a tensor give a fake, whatever attribute the tensor hides in."""

    def __init__(self, owner: FakeModel) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._owner.fake_loose(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    own_parameter = nn.Parameter in kind.__mro__ and kind.__module__ != "torch.nn.parameter"
    if not (kind in {torch.Tensor, nn.Parameter} or own_parameter):
        raise parameter_kind(name, kind.__name__)
    if tensor.layout is not torch.strided:
        raise parameter_kind(name, f"{str(tensor.layout).removeprefix('torch.')} tensor")


def _copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy; where an attribute refuses that (a lock, a file), modules are copied and the rest shared."""
    copies = dict(memo)
    try:
        made = copy.deepcopy(model, copies)
    except (TypeError, RuntimeError, AttributeError, ValueError):
        # What Python and torch raise for what cannot be copied: locks and files, tensors with a history, user classes.
        return _copy_structure(model, memo)
    _rebind_functions(made, copies)
    return made


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _rebind_functions(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let hooks and functions that modules hold read the copy where they read the original, which `deepcopy` leaves.

    A hook that keeps a layer's result for later (`lambda m, i, o: self.kept.append(o)`) kept it in the original.
    """
    known: dict[int, Any] = {}
    for module in model.modules():
        held = vars(module)
        for table in (held, *(held[each] for each in _HOOKS)):
            for name, value in table.items():
                rebound = _rebound(value, copies, known)
                if rebound is not value:
                    table[name] = rebound


def _rebound(value: Any, copies: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """Return a function whose closure holds copies, or itself if it holds nothing of which there is one."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.MethodType):
        return value if id(value.__self__) not in copies else value.__func__.__get__(copies[id(value.__self__)])
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in known:
        known[id(value)] = value  # where it holds itself
        cells = tuple(_rebound_cell(each, copies, known) for each in value.__closure__)
        if any(new is not old for new, old in zip(cells, value.__closure__, strict=True)):
            made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
            made.__kwdefaults__ = value.__kwdefaults__
            made.__dict__.update(value.__dict__)
            known[id(value)] = made
    return known[id(value)]


def _rebound_cell(cell: types.CellType, copies: Mapping[int, Any], known: dict[int, Any]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # empty yet
        return cell
    rebound = _rebound(held, copies, known)
    return cell if rebound is held else types.CellType(rebound)


def _install_recorders(module: nn.Module) -> None:
    """Install the hooks that transformers would install, under a lock, when a call first asks for hidden states.

    It installs them in all models inside of the one that asks, those included that have theirs already, as backbones
    do from the start; which one asks is not known here. What a module has is not installed again: each layer's state
    would be recorded twice.
    """
    library = sys.modules.get("transformers.utils.output_capturing")
    models = sys.modules.get("transformers.modeling_utils")  # not loaded yet: the module cannot be one of them
    install = getattr(library, "maybe_install_capturing_hooks", None)
    if install is not None and models is not None:
        kind: Any = models.PreTrainedModel
        given = {id(hook) for each in module.modules() for hook in each._forward_hooks.values()}
        for each in module.modules():
            if isinstance(each, kind):
                install(each)
        for each in module.modules():
            _drop_hooks_twice(each, given)


def _drop_hooks_twice(module: nn.Module, given: Set[int]) -> None:
    """Drop hooks that do what another of the module does, but for those that the user's model has."""
    seen: set[object] = set()
    for handle, hook in sorted(module._forward_hooks.items(), key=lambda item: id(item[1]) not in given):
        does = _deeds(hook)
        if does in seen and id(hook) not in given:
            del module._forward_hooks[handle]
        seen.add(does)


def _deeds(hook: Any) -> object:
    """Return what tells functions apart that are made alike: their code, and the plain values that they hold."""
    if not isinstance(hook, types.FunctionType):
        return id(hook)
    held = [each.cell_contents for each in hook.__closure__ or ()]
    return hook.__code__, tuple(each for each in held if isinstance(each, str | int | bool))


def _make_no_caches(module: nn.Module) -> None:
    """Let models of transformers return no cache of keys and values unless a call asks for one (`use_cache=True`).

    Their configurations ask for one by default, for `generate`; no program of fixed shapes can return it, and training
    does not read it. Configurations are replaced by copies: one that could not be copied with its model is the user's.
    """
    library: Any = sys.modules.get("transformers.configuration_utils")
    if library is None:  # not loaded yet: no configuration can be one of its own
        return
    made: dict[int, Any] = {}

    def without(config: Any) -> Any:
        if not isinstance(config, library.PretrainedConfig):
            return config
        if id(config) not in made:
            made[id(config)] = copied = copy.copy(config)
            parts = {name: without(value) for name, value in vars(config).items()}
            vars(copied).update(parts, **({"use_cache": False} if "use_cache" in parts else {}))
        return made[id(config)]

    for each in module.modules():
        if "config" in vars(each):
            each.config = without(each.config)


def _copy_structure(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if id(module) not in memo:
        made = object.__new__(type(module))
        memo[id(module)] = made
        made.__dict__.update(module.__dict__)
        for table in ("_parameters", "_buffers"):
            fakes = {name: None if old is None else memo[id(old)] for name, old in getattr(module, table).items()}
            made.__dict__[table] = fakes
        made.__dict__["_modules"] = {
            name: None if child is None else _copy_structure(child, memo) for name, child in module._modules.items()
        }
    copied: nn.Module = memo[id(module)]
    return copied


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, then every buffer, under every name it has."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
