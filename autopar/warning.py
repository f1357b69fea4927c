"""Warnings that name the user's line, however deep inside of autopar and torch they arise."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

_OWN = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - of every frame, when a warning is due


def warn(text: str) -> None:
    """Warn of something at the innermost line that is neither autopar's nor torch's."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = (_OWN, os.path.dirname(torch) + os.sep) if torch else (_OWN,)  # noqa: PTH120
    level = next((level for level, name in enumerate(_files(), 1) if not name.startswith(inside)), 1)
    warnings.warn(text, stacklevel=level)


def _files() -> Iterator[str]:
    """Yield the files of the frames from `warn` outwards."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
