"""`did you mean ...?` for names that a user mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `known`, else an empty text."""
    spelled = {each.lower().replace("-", "_"): each for each in known}
    said = name.lower().replace("-", "_")
    begun = [each for each in spelled if len(said) > 1 and each.startswith(said)]
    close = begun or difflib.get_close_matches(said, spelled, n=1, cutoff=0.5)
    return f" (did you mean {spelled[close[0]]!r}?)" if close else ""
