"""Every name of torch that is private or moves between versions, in one place (tested on 2.13, 2.15; parts on 2.11)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo import functional_export
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as dynamo_capture
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.fx.graph_module import _assign_attr as assign_attribute
from torch.fx.graph_module import _del_attr as delete_attribute
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "LazyGraphModule",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "allow_plain_beside_dtensor",
    "aot_export_joint_with_descriptors",
    "assign_attribute",
    "delete_attribute",
    "direct_call",
    "dtensor_of",
    "dtensor_spec",
    "dynamo_capture",
    "dynamo_settings",
    "fake_on",
    "flex_attention",
    "gloo_with_threads",
    "group_named",
    "group_timeout",
    "is_dtensor",
    "is_fake",
    "is_registered_node",
    "is_transformed",
    "keeps_graph",
    "kernels_under_autocast_of_cpu",
    "let_anomalies_be_found",
    "local_of",
    "put_before_number_of_dtensor",
    "put_before_random_of_dtensor",
    "pytree",
    "recorded_side_effects",
    "storage_key",
    "suggest_memory_format",
    "traced_stack",
    "wait_by",
    "without_autocast_of_cpu",
    "without_effect",
    "without_guards",
    "without_progress_thread",
    "without_source_text",
]


def dynamo_settings(**wanted: Any) -> Any:
    """Return a context in which dynamo's settings have these values; those that this torch lacks are left out."""
    known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    return torch._dynamo.config.patch(known)


def kernels_under_autocast_of_cpu(namespace: str = "aten") -> Any:
    """Return a library of operators as autocast runs them on the CPU: `impl` adds one, `_destroy` ends all."""
    library: Any = torch.library.Library
    return library(namespace, "IMPL", "AutocastCPU")


def without_autocast_of_cpu() -> Any:
    """Return a context in which operators on CPU tensors are not cast, as inside of those that autocast has cast."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(key)


@contextmanager
def without_guards() -> Iterator[list[str]]:
    """Keep `dynamo_capture` from building its guards, a sixth of its time: calls are compared with their `CallSpec`.

    Yields a list to which the names are added of what it would guard.
    """
    seen: list[str] = []
    name = "_suggest_or_raise_constraint_violation"
    check = getattr(functional_export, name, None)
    if check is None:
        yield seen
        return

    def note(*given: Any) -> None:
        made = [getattr(each, "graph_capture_output", None) for each in given]
        graphs = [getattr(each, "output_graph", None) for each in made]
        seen.extend(guard.name for each in graphs for guard in getattr(each, "guards", ()))

    setattr(functional_export, name, note)
    try:
        yield seen
    finally:
        setattr(functional_export, name, check)


def is_transformed() -> bool:
    """Return whether a transform of torch.func (grad, vmap, jvp) is at work: tensors are its wrappers then."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


@contextmanager
def without_source_text() -> Iterator[None]:
    """Keep graphs from being written as Python before anyone runs or reads them, a tenth of the time of a capture.

    Torch makes every graph on the way a module, whose code it compiles, and renders some for logs that nobody keeps.
    """
    read = fx.GraphModule.print_readable
    fx.GraphModule.print_readable = lambda *_, **__: ""  # type: ignore[method-assign]
    try:
        with use_lazy_graph_module(True):
            yield
    finally:
        fx.GraphModule.print_readable = read  # type: ignore[method-assign]


@contextmanager
def without_progress_thread() -> Iterator[None]:
    """Keep the bars of fx's interpreter, which nobody sees, from starting the thread that tqdm has for them."""
    bars: Any = torch.hub.tqdm  # type: ignore[attr-defined]
    interval = getattr(bars, "monitor_interval", None)
    if interval is None:  # torch's own stand-in where tqdm is not installed
        yield
        return
    bars.monitor_interval = 0
    try:
        yield
    finally:
        bars.monitor_interval = interval


@contextmanager
def recorded_side_effects() -> Iterator[list[str]]:
    """Yield a list to which Dynamo adds the Python objects that what it traces changes; those that it made are none."""
    seen: list[str] = []
    kind, name, changed = _writer_of_side_effects()
    own = getattr(kind, name)

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        seen.extend(changed(self, found))
        return found

    setattr(kind, name, recording)
    try:
        yield seen
    finally:
        setattr(kind, name, own)


def _writer_of_side_effects() -> tuple[Any, str, Callable[[Any, Any], list[str]]]:
    """Return the method that Dynamo ends a trace with, its class, and how to read what was changed.

    Torch 2.13 asks for the sources of changed objects by name; 2.11 only writes the code that changes them again.
    """
    name = "get_replayed_side_effect_source_refs"
    if hasattr(OutputGraph, name):
        return OutputGraph, name, lambda _, found: list(found)
    return SideEffects, "codegen_update_mutated", lambda effects, _: _changed_objects(effects)


def _changed_objects(effects: Any) -> list[str]:
    existing = (AttributeMutationExisting, ValueMutationExisting)
    changed = (each for each in effects.id_to_variable.values() if effects.is_modified(each))
    return [str(each.source) for each in changed if isinstance(getattr(each, "mutation_type", None), existing)]


@contextmanager
def without_effect(name: str) -> Iterator[None]:
    """Take an operator that must keep its place among others (`aten::NAME`) to be free of effects."""
    find = getattr(getattr(torch._library, "simple_registry", None), "singleton", None)
    entry: Any = None if find is None else getattr(find.find(name), "effect", None)
    if getattr(entry, "_effect", None) is None:
        yield
        return
    before, entry._effect = entry._effect, None
    try:
        yield
    finally:
        entry._effect = before


def is_registered_node(kind: type) -> bool:
    """Return whether pytree opens values of exactly this type."""
    return kind in pytree.SUPPORTED_NODES


def traced_stack(error: BaseException) -> str:
    """Return the frames that Dynamo was reading when it raised, outermost first, as lines of a traceback.

    Errors of Dynamo's own carry them; for others they are found in the frames of its interpreter.
    """
    frames = [(each.filename, each.lineno) for each in getattr(error, "real_stack", None) or ()]
    step = error.__traceback__
    while step is not None and not getattr(error, "real_stack", None):
        reader = step.tb_frame.f_locals.get("self")
        code, line = getattr(reader, "f_code", None), getattr(reader, "lineno", None)
        if code is not None and line is not None and (code.co_filename, line) not in frames:
            frames.append((code.co_filename, line))
        step = step.tb_next
    return "".join(f'File "{file}", line {line}\n' for file, line in frames)


def storage_key(value: torch.Tensor) -> int:
    """Return a number that tensors share while they live if, and only if, they share memory; fake tensors have one."""
    return int(value.untyped_storage()._cdata)


def is_plain_fake(value: torch.Tensor) -> bool:
    """Return whether a tensor is fake and all that is known of it are its memory, shape, strides, type and device."""
    return (
        type(value) is FakeTensor
        and value.constant is None
        and value.layout == torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg() or value._is_zerotensor())
    )


def is_fake(value: object) -> bool:
    """Return whether a value is a tensor without memory of its own, of whatever mode."""
    return isinstance(value, FakeTensor)


def fake_on(
    mode: FakeTensorMode,
    device: torch.device,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    memory: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """Return a fake tensor, in memory of its own or in that of another, past the dispatch that a factory's call takes.

    No mode may be on while it is made.
    """
    if memory is None:
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
    return FakeTensor(mode, torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, shape, stride), device)


def keeps_graph() -> bool:
    """Return whether the running backward pass was asked to retain the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def direct_call(overload: Any) -> Any:
    """Return what `overload(...)` ends up calling, without the Python frames between; other callables as they are."""
    return overload._op if isinstance(overload, torch._ops.OpOverload) else overload


def dtensor_spec(
    mesh: Any, placements: Any, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """Return the description of a DTensor that `dtensor_of` takes: made once, used at every step."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def dtensor_of(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor whose local shard is `local`; `DTensor.from_local` without its checks and its graph node."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor as it is, without a graph node; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor; without importing DTensors, and fast for plain ones."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "_local_tensor")


def allow_plain_beside_dtensor() -> None:
    """Let operators take plain tensors beside DTensors, as replicated ones, from now on."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._allow_implicit_replication = True


def let_anomalies_be_found() -> None:
    """Let `torch.autograd.detect_anomaly` look at gradients that are DTensors, from now on: at all of them at once."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.experimental import register_sharding

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for operator in (torch.ops.aten._is_any_true.default, torch.ops.aten._is_all_true.default):
        if operator not in propagator.op_strategy_funcs:
            register_sharding(operator)(lambda _tensor: [([Replicate()], [Replicate()])])


def put_before_number_of_dtensor(read: Callable[[Any], None]) -> None:
    """Let `read(tensor)` look at every DTensor of which a number is read (`item`, `float`, `bool`), from now on.

    Torch then reads the rank's own part, as it always does.
    """
    from torch.distributed.tensor import DTensor

    operator = torch.ops.aten._local_scalar_dense.default

    def handler(_operator: object, args: tuple[Any, ...], _kwargs: object) -> Any:
        read(args[0])
        return operator(local_of(args[0]))

    dispatcher: Any = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if handlers is not None:
        handlers[operator] = handler


def put_before_data_of_dtensor(assign: Callable[[Any, Any], bool]) -> None:
    """Let `assign(tensor, value)` take what is assigned to `.data` of every DTensor, from now on.

    Where it does not, torch exchanges what the tensor tells of itself and not the part that the rank holds: the
    assignment does nothing.
    """
    from torch.distributed.tensor import DTensor

    own = torch.Tensor.data

    def put(tensor: Any, value: Any) -> None:
        if not assign(tensor, value):
            own.__set__(tensor, value)  # type: ignore[attr-defined]

    setattr(DTensor, "data", property(own.__get__, put))  # type: ignore[attr-defined]  # noqa: B010


_RANDOM = (
    "normal_.default", "uniform_.default", "exponential_.default", "log_normal_.default", "cauchy_.default",
    "geometric_.default", "random_.default", "random_.to", "random_.from", "bernoulli_.float", "rand_like.default",
    "randn_like.default", "randint_like.default", "randint_like.low_dtype",
)  # fmt: skip
"""Operators that draw an element of their first argument's shape for each of its elements."""


def put_before_random_of_dtensor(draw: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
    """Let `draw(operator, args, kwargs)` return what random operators make of a DTensor, from now on.

    Where it returns `None`, torch draws as it always does: by each rank's own generator, which of ranks that
    are seeded alike gives all parts of a tensor the same values.
    """

    def instead(own: Callable[[], Any], operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = draw(operator, args, kwargs)
        return own() if found is None else found

    put_before_operators_of_dtensor(_RANDOM, instead)


def put_before_operators_of_dtensor(names: Iterable[str], instead: Callable[..., Any]) -> None:
    """Let `instead(own, operator, args, kwargs)` return what these operators make of a DTensor, from now on.

    `own()` is what torch makes of it by itself.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if handlers is None:
        return

    def handler(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        def own() -> Any:
            del handlers[operator]  # the dispatcher goes on to its own
            try:
                return operator(*args, **kwargs)
            finally:
                handlers[operator] = handler

        return instead(own, operator, args, kwargs)

    for name in names:
        packet, _, overload = name.partition(".")
        handlers[getattr(getattr(torch.ops.aten, packet), overload)] = handler


def place_in_whole(tensor: Any) -> tuple[slice, ...]:
    """Return where the part of a DTensor that this rank holds lies in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))


def gloo_with_threads(store: Any, rank: int, size: int, timeout: timedelta, *, threads: int) -> Any:
    """Return a gloo backend whose collectives run on so many threads of its own; torch takes two a network device.

    Devices are torch's: those of the interfaces that GLOO_SOCKET_IFNAME names, else the host's default.
    """
    from torch.distributed import ProcessGroupGloo

    kind: Any = ProcessGroupGloo
    options = kind._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]
    options._threads, options._timeout = threads, timeout
    return kind(store, rank, size, options)


def group_timeout(device: torch.device) -> timedelta | None:
    """Return the timeout that the default process group was made with; `None` where its backend does not tell."""
    world: Any = torch.distributed.group.WORLD
    options = getattr(world._get_backend(device), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else None


def default_store() -> Any:
    """Return the store by which the ranks of the default process group found one another.

    Raises:
        RuntimeError: there is no process group.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return _get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def group_named(name: str) -> Any:
    """Return the process group of a name."""
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def wait_by(value: torch.Tensor, wait: Callable[[], object]) -> None:
    """Let `_c10d_functional.wait_tensor` of a value call `wait`, once, instead of returning at once."""
    from torch._C._distributed_c10d import _register_work

    _register_work(value, _later()(wait))


@cache
def _later() -> Any:
    from torch._C._distributed_c10d import Work

    class Later(Work):
        def __init__(self, wait: Callable[[], object]) -> None:
            super().__init__()
            self._wait = wait

        def wait(self, timeout: object = None) -> bool:
            self._wait()
            return True

    return Later
