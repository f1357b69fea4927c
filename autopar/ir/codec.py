"""Frozen dataclasses <-> JSON values, by their type annotations, with the path of whatever is wrong.

A placement is its text, a layout a list of texts, a mesh a list of axes; every
other dataclass is an object with its field names. `schema_of` gives the JSON
Schema of the same reading, so that the two cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Integral, Real
from typing import Any, Literal

from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Partial, Placement, Replicate, Shard, parse_placement

PLACEMENT_PATTERN = r"^(Replicate\(\)|Shard\(\d+(, outer=\d+)?\)|Partial\(\w+\))$"


class DecodeError(ValueError):
    """A JSON value that does not read as what it should be; `path` is where, `problem` what is wrong."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def encode(value: Any) -> Any:
    """Return `value` as JSON values; numbers of numpy become Python's, mappings are sorted by key.

    Equal values give equal JSON: a float field that holds 0 or -0.0 is written 0.0.

    Raises:
        TypeError: something in it has no JSON form.
        ValueError: a number in it is infinite or no number.
    """
    match value:
        case None | str() | bool():
            return value
        case Replicate() | Shard() | Partial():
            return str(value)
        case Mesh():
            return [encode(axis) for axis in value.axes]
        case Mapping():
            return {str(key): encode(value[key]) for key in sorted(value)}
        case tuple() | list():
            return [encode(each) for each in value]
        case Integral():
            return int(value)
        case Real():
            if not math.isfinite(value):
                raise ValueError(f"{value} has no place in a plan file: figures are finite")
            return float(value) + 0.0  # -0.0 becomes 0.0
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.key: _field(each.kind, getattr(value, each.name)) for each in _fields(type(value))}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _field(kind: Any, value: Any) -> Any:
    return encode(float(value) if kind in {float, float | None} and value is not None else value)


def decode(kind: Any, value: Any, path: str = "") -> Any:
    """Return the value of type `kind` that a JSON value stands for.

    Fields that are not known are ignored: a later minor version may add some.

    Raises:
        DecodeError: something is missing or of another type; the error has its path.
    """
    return _decoder(kind)(value, path)


def schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of values of type `kind`; dataclasses go to `definitions` by name."""
    if kind is Any:
        return {}
    if kind == Placement:
        return {"type": "string", "pattern": PLACEMENT_PATTERN}
    if kind is Mesh:
        return {"type": "array", "items": schema_of(Axis, definitions)}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in {typing.Union, types.UnionType}:
        return {"anyOf": [schema_of(_present(parts), definitions), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(parts[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(parts[1], definitions)}
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = object_schema(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def object_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of the object that a dataclass is written as."""
    return {
        "type": "object",
        "required": [each.key for each in _fields(kind) if each.required],
        "properties": {each.key: schema_of(each.kind, definitions) for each in _fields(kind)},
    }


_SCALARS: Mapping[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}

_Decoder = Callable[[Any, str], Any]


_KEY: Mapping[tuple[type, str], str] = {(Axis, "name"): "axis"}
"""Fields that the file calls otherwise."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a dataclass: its key in the file, its type, whether it must be there."""

    name: str
    key: str
    kind: Any
    required: bool


@cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        _Field(
            each.name,
            _KEY.get((kind, each.name), each.name),
            hints[each.name],
            required=each.default is each.default_factory is dataclasses.MISSING,
        )
        for each in dataclasses.fields(kind)
    )


@cache
def _decoder(kind: Any) -> _Decoder:
    if kind is Any:
        return lambda value, path: value
    if kind == Placement:
        return _placement
    if kind is Mesh:
        axes = _sequence(Axis)
        return lambda value, path: Mesh(axes(value, path))
    if kind in _SCALARS:
        return _scalar(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _one_of(parts)
    if origin in {typing.Union, types.UnionType}:
        return _optional(parts)
    if origin is tuple:
        return _sequence(parts[0])
    if origin is Mapping:
        return _mapping(parts[1])
    return _object(kind)


def _placement(value: Any, path: str) -> Placement:
    if not isinstance(value, str):
        raise DecodeError(path, f"must be a placement such as 'Shard(0)', and is {_what(value)}")
    try:
        return _parsed(value)
    except ValueError as error:
        raise DecodeError(path, str(error)) from None


_parsed = lru_cache(maxsize=4096)(parse_placement)


def _scalar(kind: Any) -> _Decoder:
    accepted = (int, float) if kind is float else (kind,)

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise DecodeError(path, f"must be {_ARTICLE[_SCALARS[kind]]}, and is {_what(value)}")
        if kind is float and not math.isfinite(value):
            raise DecodeError(path, f"must be a finite number, and is {value}")
        return float(value) if kind is float else value

    return read


_ARTICLE = {
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
}


def _what(value: Any) -> str:
    """Return how to name a JSON value in a message."""
    match value:
        case Mapping():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case None:
            return "null"
        case bool():
            return str(value).lower()
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}...{text[-1]}"


def _one_of(known: tuple[Any, ...]) -> _Decoder:
    def read(value: Any, path: str) -> Any:
        if value not in known:
            raise DecodeError(path, f"must be one of {', '.join(map(str, known))}, and is {_what(value)}")
        return value

    return read


def _optional(parts: tuple[Any, ...]) -> _Decoder:
    inner = _decoder(_present(parts))
    return lambda value, path: None if value is None else inner(value, path)


def _present(parts: tuple[Any, ...]) -> Any:
    """Return the type that an optional one has when it is there."""
    return functools.reduce(operator.or_, (each for each in parts if each is not type(None)))


def _sequence(part: Any) -> _Decoder:
    inner = _decoder(part)

    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise DecodeError(path, f"must be a list, and is {_what(value)}")
        return tuple(inner(each, f"{path}[{i}]") for i, each in enumerate(value))

    return read


def _mapping(part: Any) -> _Decoder:
    inner = _decoder(part)

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise DecodeError(path, f"must be an object, and is {_what(value)}")
        return {key: inner(each, f"{path}.{key}") for key, each in value.items()}

    return read


def _object(kind: Any) -> _Decoder:
    parts = [(each, _decoder(each.kind)) for each in _fields(kind)]

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            raise DecodeError(path, f"must be an object, and is {_what(value)}")
        found = {}
        for each, inner in parts:
            at = f"{path}.{each.key}" if path else each.key
            if each.key in value:
                found[each.name] = inner(value[each.key], at)
            elif each.required:
                raise DecodeError(at, "is missing")
        return kind(**found)

    return read
