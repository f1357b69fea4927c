"""Plain values that a forward read from attributes: what they were is part of its program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Step = tuple[bool, str | int]
"""One step from an object into it: whether it is an item, else an attribute; and its key."""

ABSENT = object()
"""What is found where there is nothing."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Read:
    """One value, and how it is reached from the model."""

    path: tuple[Step, ...]
    value: Any

    @property
    def name(self) -> str:
        """Return it as users write it: `layers.0.dropout.p`, `scaling['default']`."""
        return "".join(_words(self.path)).removeprefix(".")

    def same(self, now: object) -> bool:
        """Return whether a value is this one."""
        known = self.value
        return now is known or (type(now) is type(known) and (now == known or now != now))


def is_plain(value: object) -> bool:
    """Return whether a value is one that a program has as a constant, or a list of such."""
    if isinstance(value, list | tuple):
        return type(value) in {list, tuple} and all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def is_number(value: object) -> bool:
    """Return whether a value is a number, of which there may be another one at every step."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def holder(model: Any, path: tuple[Step, ...]) -> tuple[Any, tuple[Step, ...]]:
    """Return the innermost module on a path from a model, and the steps from that on, the first an attribute."""
    while len(path) > 2 and path[0] == (False, "_modules"):
        inner = model._modules.get(path[1][1])
        if inner is None:
            break
        model, path = inner, path[2:]
    return model, path


def held(table: Mapping[str, Any], kind: type, path: tuple[Step, ...]) -> Any:
    """Return what a module of that class and table of attributes has at the end of a path; `ABSENT` for nothing."""
    key = str(path[0][1])
    found = table.get(key, ABSENT)
    if found is ABSENT:
        found = getattr(kind, key, ABSENT)
    for is_item, step in path[1:]:
        try:
            found = found[step] if is_item else getattr(found, str(step))
        except (AttributeError, KeyError, IndexError, TypeError):
            return ABSENT
    return found


def _words(path: tuple[Step, ...]) -> Iterator[str]:
    inside = False
    for is_item, key in path:
        if is_item and inside:
            yield f".{key}"
        elif is_item:
            yield f"[{key!r}]"
        elif key != "_modules":
            yield f".{key}"
        inside = not is_item and key == "_modules"
