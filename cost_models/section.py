"""One mapping of a cluster file, read with its key path at hand for errors."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cost_models.errors import ClusterError, CostModelError, shown, suggestion
from cost_models.units import parse_fraction

T = TypeVar("T")

LARGEST_COUNT = 1_000_000
"""Of devices in a node, nodes in a group, or endpoints of a level; the largest machines have a tenth of that."""


@dataclass(frozen=True)
class Section:
    """A mapping, the file it stands in and the key path that leads to it."""

    data: Mapping[str, Any]
    origin: str
    path: str = ""

    @classmethod
    def of(cls, data: object, origin: str, path: str = "") -> "Section":
        """Return `data` as a section; an error where it is no mapping of names."""
        if isinstance(data, Mapping) and not all(isinstance(key, str) for key in data):
            wrong = next(key for key in data if not isinstance(key, str))
            message = f"{origin}: {f'{path}: ' if path else ''}key {wrong!r} is no text; write it in quotes"
            raise ClusterError(message)
        if data is None:
            missing = f"{path} has nothing below it; fill it in, or leave it out"
            empty = "the file is empty; `autopar cluster show cpu:4` prints an example"
            raise ClusterError(f"{origin}: {missing if path else empty}")
        if not isinstance(data, Mapping):
            message = f"{origin}: {path or 'the document'} must be a mapping of names, not {shown(data)}"
            raise ClusterError(message)
        return cls(data, origin, path)

    def where(self, key: str = "") -> str:
        """Return the key path of `key`, from the top of the file."""
        return ".".join(part for part in (self.path, key) if part)

    def error(self, message: str, key: str = "") -> ClusterError:
        """Return an error that starts with the file and the key path."""
        place = self.where(key)
        return ClusterError(f"{self.origin}: {place}: {message}" if place else f"{self.origin}: {message}")

    def only(self, *known: str) -> "Section":
        """Return this section; an error where it holds a key that is not `known`."""
        for key in self.data:
            if key not in known:
                raise self.error(f"unknown key {key!r}{suggestion(key, known)}; known keys: {', '.join(known)}")
        return self

    def require(self, *keys: str, example: str = "") -> "Section":
        """Return this section; an error where one of `keys` is missing."""
        missing = [key for key in keys if key not in self.data]
        if missing:
            hint = f", such as `{example}`" if example else ""
            raise self.error(f"missing {' and '.join(repr(key) for key in missing)}{hint}")
        return self

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def section(self, key: str) -> "Section":
        """Return the mapping under `key`; empty where the key is missing."""
        return Section.of(self.data.get(key, {}), self.origin, self.where(key))

    def sections(self, key: str) -> Iterator["Section"]:
        """Yield the mappings of the list under `key`."""
        items = self.data.get(key, [])
        if not isinstance(items, list | tuple):
            raise self.error(f"must be a list, not {shown(items)}", key)
        for index, item in enumerate(items):
            yield Section.of(item, self.origin, f"{self.where(key)}[{index}]")

    def quantity(self, key: str, parse: Callable[[object], T], default: T) -> T:
        """Return the value under `key` read by `parse`, or `default`."""
        if key not in self.data:
            return default
        return self.required_quantity(key, parse)

    def required_quantity(self, key: str, parse: Callable[[object], T]) -> T:
        """Return the value under `key` read by `parse`; errors gain the key path."""
        try:
            value = parse(self.data[key])
        except ClusterError:
            raise
        except CostModelError as error:
            raise self.error(str(error), key) from None
        if isinstance(value, int | float) and value < 0:
            raise self.error(f"must not be negative, but is {shown(self.data[key])}", key)
        return value

    def positive(self, key: str, parse: Callable[[object], T]) -> T:
        """Return the value under `key`, which must exceed 0."""
        value = self.required_quantity(key, parse)
        if isinstance(value, int | float) and value <= 0:
            raise self.error(f"must be more than 0, but is {shown(self.data[key])}", key)
        return value

    def share(self, key: str, default: float) -> float:
        """Return the fraction under `key` (`80%` or 0.8), more than 0 and at most 1, or `default`."""
        value = self.quantity(key, parse_fraction, default)
        if not 0 < value <= 1:
            raise self.error(f"must be more than 0 and at most 1, but is {shown(self.data[key])}", key)
        return value

    def count(self, key: str) -> int:
        """Return the whole number of at least 1 under `key`."""
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"must be a whole number, but is {shown(value)}", key)
        if value < 1:
            raise self.error(f"must be at least 1, but is {value}", key)
        if value > LARGEST_COUNT:
            raise self.error(f"must be at most {LARGEST_COUNT:,}, but is {value:,}", key)
        return value

    def number(self, key: str, default: float) -> float:
        """Return the plain number under `key`, or `default`."""
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"must be a number, but is {shown(value)}", key)
        if not math.isfinite(value):
            raise self.error(f"must be finite, but is {shown(value)}", key)
        return float(value)

    def text(self, key: str, default: str = "") -> str:
        """Return the text under `key`, or `default`."""
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"must be text, but is {shown(value)}", key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value under `key`, or `default`."""
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"must be true or false, but is {shown(value)}", key)
        return value

    def choice(self, key: str, known: Iterable[str], default: str) -> str:
        """Return the text under `key`, which must be one of `known`."""
        value = self.text(key, default)
        known = tuple(known)
        if value not in known:
            raise self.error(f"unknown {key} {value!r}{suggestion(value, known)}; known: {', '.join(known)}", key)
        return value
