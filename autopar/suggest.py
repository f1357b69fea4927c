"""`did you mean ...?` for names that a user mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHORT = 5
"""Letters of a name below which chance makes half of them agree with another (`lion`, `none`)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `known`, else an empty text.

    A short name is close to one that a single slip makes of it, a longer one to one with which it shares half of its
    letters.
    """
    spelled = {each.lower().replace("-", "_"): each for each in known}
    said = name.lower().replace("-", "_")
    close = [each for each in spelled if len(said) > 1 and each.startswith(said)]
    if not close and len(said) < _SHORT:
        close = [each for each in spelled if _is_slip(said, each)]
    elif not close:
        close = difflib.get_close_matches(said, spelled, n=1, cutoff=0.5)
    return f" (did you mean {spelled[close[0]]!r}?)" if close else ""


def _is_slip(said: str, meant: str) -> bool:
    """Return whether one letter is missing, added or another, or two neighbours have changed places."""
    start = next((i for i, (a, b) in enumerate(zip(said, meant, strict=False)) if a != b), min(len(said), len(meant)))
    ours, theirs = said[start:], meant[start:]
    return (
        ours[1:] == theirs[1:]
        or ours == theirs[1:]
        or ours[1:] == theirs
        or (ours[:2] == theirs[1::-1] and ours[2:] == theirs[2:])
    )
