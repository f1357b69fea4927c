"""How a call's arguments become a flat list of tensors, and a flat list of results the model's return value."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from autopar._torch import is_registered_node, pytree
from autopar.capture.errors import example_value, examples_kind, examples_signature
from autopar.errors import ArgumentsDifferError, InputMismatchError
from autopar.ir.reads import Read
from autopar.ir.tensor import TensorMeta

_PLAIN = (bool, int, float, complex, str, types.NoneType, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that a call brings: where it sits among the arguments, and what it was when captured."""

    path: str
    meta: TensorMeta
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class CallArguments:
    """An example call with both positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The form of a call: which flat arguments are tensors, and which values of the others the graph was made for."""

    signature: inspect.Signature
    structure: Any
    """Pytree of `(args, kwargs)`, with a `Record` for each dataclass and mapping that pytree does not know."""

    paths: tuple[str, ...]
    """Path of every flat argument."""

    inputs: tuple[Input | None, ...]
    """For every flat argument: the tensor, or `None` where it is a plain value."""

    baked: tuple[Any, ...]
    """For every flat argument: the plain value, `None` where it is a tensor."""

    reads: tuple[Read, ...] = ()
    """Plain values of attributes that the graph was made for."""

    @property
    def tensors(self) -> tuple[Input, ...]:
        """Return the tensor inputs, in the order of the graph's input placeholders."""
        return tuple(each for each in self.inputs if each is not None)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call in the order of the graph's input placeholders.

        Shapes and dtypes are the caller's to compare with `tensors`.

        Raises:
            ArgumentsDifferError: the call has other arguments than the captured one.
            InputMismatchError: it does not fit the model's forward, or has another plain value than the captured one.
        """
        try:
            call = _canonical(self.signature, args, kwargs)
        except TypeError as error:
            raise _structure_differs(str(error), self.paths) from error
        try:
            leaves = self.structure.flatten_up_to(call)
        except (TypeError, ValueError, KeyError) as error:
            reason = _difference(_paths(self.signature, call), self.paths) or str(error)
            raise ArgumentsDifferError(f"{_structure_differs(reason, self.paths)}") from error
        tensors = []
        for leaf, path, wanted, value in zip(leaves, self.paths, self.inputs, self.baked, strict=True):
            if wanted is None:
                if isinstance(leaf, torch.Tensor) or leaf != value:
                    raise _value_differs(path, value, leaf)
            elif not isinstance(leaf, torch.Tensor):
                raise _value_differs(path, wanted.meta, leaf)
            else:
                tensors.append(leaf)
        return tensors


def read_call(model: nn.Module, example_inputs: object) -> tuple[CallSpec, list[torch.Tensor]]:
    """Return the form of the example call, and its tensors.

    Raises:
        UsageError: the examples are no tuple or dict, do not fit the model's forward, or hold something unsupported.
    """
    name = type(model).__name__
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, CallArguments):
        args, kwargs = example_inputs.args, dict(example_inputs.kwargs)
    elif isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, tuple | list):
        args = tuple(example_inputs)
    else:
        raise examples_kind(type(example_inputs).__name__)
    signature = inspect.signature(model.forward)
    try:
        call = _canonical(signature, args, kwargs)
    except TypeError as error:
        raise examples_signature(name, str(error), str(signature)) from error
    leaves, structure = pytree.tree_flatten(call)
    paths = _paths(signature, call)
    inputs: list[Input | None] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            meta = TensorMeta(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            inputs.append(Input(path, meta, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            inputs.append(None)
        else:
            raise example_value(path, type(leaf).__name__)
    baked = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    spec = CallSpec(signature, structure, paths, tuple(inputs), baked)
    return spec, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _canonical(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call in its one form: positional where possible, defaults left out, extra keywords sorted, opened.

    So `f(x, y)`, `f(x, y=y)` and `f(x, y, flag=None)` are the same call.
    """
    bound = signature.bind(*args, **kwargs)
    for name, parameter in signature.parameters.items():
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = dict(sorted(value.items()))
        elif value is parameter.default or (
            isinstance(value, _PLAIN) and type(value) is type(parameter.default) and value == parameter.default
        ):
            del bound.arguments[name]
    # With a hole before it, a positional parameter moves to the keywords, which `BoundArguments` does by itself.
    return open_records(bound.args), open_records(bound.kwargs)


def _paths(signature: inspect.Signature, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """Return for every leaf of the call its path with the names of the parameters: `batch.x`, `inputs.0`."""
    names: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += (f"{name}.{i}" for i in range(len(call[0]) - len(names)))
        elif parameter.kind in {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            names.append(name)
    paths: list[str] = []
    for name, value in zip(names, call[0], strict=False):
        paths += (_join(name, key) for key, _ in pytree.tree_flatten_with_path(value)[0])
    for name, value in call[1].items():
        paths += (_join(name, key) for key, _ in pytree.tree_flatten_with_path(value)[0])
    return tuple(paths)


def _join(name: str, keys: Sequence[Any]) -> str:
    return ".".join(part for part in (name, *map(_key, keys)) if part)


def _key(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def _difference(given: Sequence[str], planned: Sequence[str]) -> str:
    """Return which arguments a call lacks, and which it has more; nothing where it has those, nested otherwise."""
    lacks = ", ".join(each for each in planned if each not in given)
    more = ", ".join(each for each in given if each not in planned)
    return " and ".join(text for text, which in ((f"it lacks {lacks}", lacks), (f"it has {more}", more)) if which)


def _structure_differs(reason: str, paths: tuple[str, ...]) -> InputMismatchError:
    return InputMismatchError(
        f"the call's arguments differ in structure from those planned for ({', '.join(paths)}): {reason}\n"
        "plan again with example_inputs of this form"
    )


def _value_differs(path: str, expected: object, got: object) -> InputMismatchError:
    shown = (
        f"a {type(got).__name__}" if isinstance(got, torch.Tensor) or not isinstance(got, _PLAIN) else reprlib.repr(got)
    )
    number = isinstance(got, int | float) and not isinstance(got, bool) and not isinstance(expected, TensorMeta)
    changing = f", or make a number that changes from call to call a tensor: torch.tensor({got})" if number else ""
    return InputMismatchError(
        f"argument {path} is {shown}, and the plan was made for {expected}; plan again with example_inputs that hold it"
        f"{changing}"
    )


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass or mapping that pytree does not know, opened: its type, and what it holds by name."""

    kind: type
    fields: dict[str, Any]
    is_mapping: bool

    def build(self) -> Any:
        """Return a value of the type again; a dataclass as it was, without what its `__init__` would do once more."""
        if self.is_mapping:
            return self.kind(self.fields)
        made: Any = object.__new__(self.kind)
        for name, value in self.fields.items():
            object.__setattr__(made, name, value)
        return made


pytree.register_pytree_node(
    Record,
    lambda record: (list(record.fields.values()), (record.kind, tuple(record.fields), record.is_mapping)),
    lambda values, context: Record(context[0], dict(zip(context[1], values, strict=True)), context[2]),
    flatten_with_keys_fn=lambda record: (
        [(pytree.MappingKey(name), value) for name, value in record.fields.items()],
        (record.kind, tuple(record.fields), record.is_mapping),
    ),
    serialized_type_name="autopar.capture.call.Record",
)


def open_records(value: Any) -> Any:
    """Return the value with every dataclass and mapping that pytree does not know replaced by a `Record`."""
    kind = type(value)
    if kind is tuple:
        return tuple([open_records(each) for each in value])
    if kind is list:
        return [open_records(each) for each in value]
    if kind is dict:
        return {name: open_records(each) for name, each in value.items()}
    if value is None or isinstance(value, torch.Tensor) or is_registered_node(kind):
        return value  # of None, torch 2.11's Dynamo cannot be asked whether it is a dataclass
    if dataclasses.is_dataclass(value):
        # Of the value, not of its type: Dynamo, which reads this function too, knows only that.
        return Record(kind, {name: open_records(getattr(value, name)) for name in _held(value)}, is_mapping=False)
    if isinstance(value, Mapping):
        return Record(kind, {name: open_records(each) for name, each in value.items()}, is_mapping=True)
    return value


def _held(value: Any) -> list[str]:
    """Return the names of what a dataclass holds: fields that are set, and attributes that it was given besides.

    What is remembered of a property is not held: it is there or not as somebody has asked for it.
    """
    named = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    besides = [name for name in getattr(value, "__dict__", {}) if name not in named]
    return named + [name for name in besides if not isinstance(getattr(type(value), name, None), cached_property)]


def close_records(value: Any) -> Any:
    """Return the value with every `Record` built again: the inverse of `open_records`."""
    kind = type(value)
    if kind is Record:
        fields = {name: close_records(each) for name, each in value.fields.items()}
        return Record(value.kind, fields, value.is_mapping).build()
    if kind is tuple:
        return tuple([close_records(each) for each in value])
    if kind is list:
        return [close_records(each) for each in value]
    if kind is dict:
        return {name: close_records(each) for name, each in value.items()}
    return value


class Completing(Protocol):
    """Makes results that a program leaves to its caller."""

    @property
    def takes(self) -> tuple[int, ...]:
        """Return the numbers of the program's outputs that they are made of."""

    def complete(self, outputs: Sequence[Any]) -> list[Any]:
        """Return all results, of the program's outputs."""


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """The form of the model's return value."""

    structure: Any
    places: tuple[int | None, ...]
    """For every flat result: its number among the graph's user outputs, `None` where it is a plain value."""

    baked: tuple[Any, ...]
    """For every flat result: the plain value, `None` where it is a tensor."""

    metrics: Completing | None = None
    """What makes the model's results of the graph's outputs, where the graph does not make all of them."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Return the numbers of the graph's user outputs that other results are made of: each rank needs them whole."""
        return () if self.metrics is None else self.metrics.takes

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """Return the model's return value with `outputs` (the graph's outputs of kind `output`, in order) in it."""
        if self.metrics is not None:
            outputs = self.metrics.complete(outputs)
        leaves = [
            value if place is None else outputs[place] for place, value in zip(self.places, self.baked, strict=True)
        ]
        return close_records(pytree.tree_unflatten(leaves, self.structure))

    def names(self) -> tuple[str, ...]:
        """Return the path of each user output; one that stands in several places has its first path."""
        tree = pytree.tree_unflatten(list(range(len(self.places))), self.structure)
        found: dict[int, str] = {}
        for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
            place = self.places[leaf]
            if place is not None:
                found.setdefault(place, _join("", keys) or "output")
        return tuple(found[place] for place in range(len(found)))
