"""What a compiled model does otherwise than its class: calls, copies, states, and what it refuses."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from autopar._torch import is_dtensor
from autopar.runtime.call_errors import forward_replaced
from autopar.runtime.errors import compiled_not_pickled, dtype_not_changed, first_line, not_resized, not_saved
from autopar.runtime.initialising import apply_whole
from autopar.runtime.loops import refuse_wrappers, warn_of_sums
from autopar.runtime.own_states import OwnState, distributed

if TYPE_CHECKING:
    from autopar.runtime.module import Runner

RUNNER = "_autopar"
"""Attribute of a compiled model that holds its runner."""

ELSEWHERE = "_autopar_elsewhere"
"""Attribute of a compiled model that holds the names of what other pipeline stages have."""

PREPARED = "_is_accelerate_prepared"
"""Attribute by which Accelerate, and transformers' Trainer on top of it, knows models that it is to leave unwrapped."""

_RESIZES = "resize_token_embeddings"
"""Method of transformers' models that gives them other parameters."""

_MADE = "autopar.compile has made its program already, with the collectives of its plan"
"""Why torch.compile around a compiled model is not to trace what runs it."""


@functools.cache
def compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the model's class whose forward runs the programs."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[RUNNER].call(self, args, kwargs)

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the model; tells of a forward put in its place that runs something else than the programs."""
        if "forward" not in self.__dict__:
            return kind.__call__(self, *args, **kwargs)
        before = _runner(self).calls
        try:
            made = kind.__call__(self, *args, **kwargs)
        except Exception as error:
            if _runner(self).calls == before:
                raise forward_replaced(kind.__name__, first_line(str(error))) from error
            raise
        if _runner(self).calls == before:
            raise forward_replaced(kind.__name__, "")
        return made

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Return a copy with tensors of its own, run by the same programs; all ranks must make it."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({k: v if k == RUNNER else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        made.__dict__[RUNNER] = _runner(self).for_copy(made)
        return made

    def apply(self: nn.Module, fn: Callable[[nn.Module], Any]) -> nn.Module:
        """Call `fn` with every module while its own tensors are whole, on all ranks; return the model."""
        runner = _runner(self)
        return kind.apply(self, fn) if runner.ranks.world_size == 1 else apply_whole(self, fn, runner)

    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters; tells of loops that would add up over these alone, and of other wrappers."""
        refuse_wrappers(kind.__name__)
        warn_of_sums(self, _runner(self))
        yield from kind.named_parameters(self, *args, **kwargs)

    def convert(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply what `.to`, `.half` and the like ask for, unless it changes a dtype."""
        held = [each for m in self.modules() for each in (*m._parameters.values(), *m._buffers.values())]
        for planned in sorted({each.dtype for each in held if each is not None}, key=str):
            asked = fn(torch.empty(0, dtype=planned)).dtype
            if asked is not planned:
                raise dtype_not_changed(kind.__name__, word(planned), word(asked))
        base: Any = kind
        converted: nn.Module = base._apply(self, fn, recurse)
        return converted

    def refuse_pickle(self: nn.Module, _protocol: Any) -> NoReturn:
        raise compiled_not_pickled(kind.__name__)

    own: dict[str, Any] = {
        "__call__": called,
        "forward": torch.compiler.disable(forward, reason=_MADE),  # type: ignore[no-untyped-call]
        "named_parameters": named_parameters,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": refuse_pickle,
        PREPARED: True,
        "_apply": convert,
    }
    if kind.apply is nn.Module.apply:
        own["apply"] = apply
    own |= _of_states(kind) | _of_transformers(kind)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **own})


def word(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def _runner(model: nn.Module) -> Runner:
    found: Runner = model.__dict__[RUNNER]
    return found


def _of_states(kind: type[nn.Module]) -> dict[str, Any]:
    """Return the methods that save and load states of this rank."""

    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, of DTensors or of whole tensors as the single-device model saves them."""
        own = distributed(self, state_dict, _runner(self), self.__dict__[ELSEWHERE])
        return kind.load_state_dict(self, own, strict=strict, assign=assign)

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what this rank holds; it tells so where it is pickled. `autopar.full_state_dict` returns all."""
        found = kind.state_dict(self, *args, **kwargs)
        given = args[0] if args else kwargs.get("destination")
        if _runner(self).ranks.world_size == 1 or type(found) is not OrderedDict or found is given:
            return found
        if self.__dict__[ELSEWHERE] or any(isinstance(e, torch.Tensor) and is_dtensor(e) for e in found.values()):
            return OwnState.called(f"state_dict() of this compiled {kind.__name__}", found)
        return found

    return {"load_state_dict": load_state_dict, "state_dict": state_dict}


def _of_transformers(kind: Any) -> dict[str, Any]:
    """Return the methods in place of those that models of transformers have beside a module's."""

    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and _runner(self).ranks.world_size > 1:
            raise not_saved(kind.__name__)
        return kind.save_pretrained(self, *args, **kwargs)

    def refuse_resize(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
        raise not_resized(kind.__name__, _RESIZES)

    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Generate as on one device, on all ranks: whoever generates reads whole outputs."""
        runner = _runner(self)
        self.__dict__[RUNNER] = runner.with_whole_outputs
        try:
            return kind.generate(self, *args, **kwargs)
        finally:
            self.__dict__[RUNNER] = runner

    own = {"save_pretrained": save_pretrained, _RESIZES: refuse_resize, "generate": generate}
    return {name: each for name, each in own.items() if hasattr(kind, name)}
