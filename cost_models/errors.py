"""Errors that a user of the cost models can cause."""

import difflib
import reprlib
from collections.abc import Iterable


class CostModelError(Exception):
    """A figure or name is wrong; the text says which, where, and the way out."""


class UnitError(CostModelError):
    """A quantity without a unit, or with one that is not known."""


class ClusterError(CostModelError):
    """A cluster description that cannot be used."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 120, 120


def shown(value: object) -> str:
    """Return what was found in a file as errors quote it: deep or long containers are cut short."""
    return _SHORT.repr(value)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` for the closest of `known`, else an empty text."""
    by_lower = {each.lower(): each for each in known}
    begun = [each for each in by_lower if len(name) > 1 and each.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""
