"""How the planner tells what it is doing, and the terminal's way of showing it.

Talk goes to stderr, and only about what takes longer than a second.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from autopar.figures import format_seconds

SPEAK_AFTER_S = 1.0
"""Anything shorter is not worth a line."""

_REDRAW_S = 0.2


class Progress(Protocol):
    """What stages of planning report to."""

    def phase(self, name: str) -> None:
        """Begin the phase `name`, ending the one before it."""

    def update(
        self, best_s: float | None = None, gap: float | None = None, done: int | None = None, total: int | None = None
    ) -> None:
        """Tell the step time of the best plan so far, its gap, and how many of `total` candidates are done."""


class Silent:
    """Progress that nobody watches."""

    def phase(self, name: str) -> None:
        """Do nothing."""

    def update(
        self, best_s: float | None = None, gap: float | None = None, done: int | None = None, total: int | None = None
    ) -> None:
        """Do nothing."""


class Terminal:
    """Progress on a stream: one line that redraws itself on a terminal, else one line a finished phase.

    A context manager: leaving it ends the last phase.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if self._live and not os.environ.get("NO_COLOR") else ("", "")
        self._name = ""
        self._started = self._drawn = 0.0
        self._figures = ""
        self._shown = False

    def phase(self, name: str) -> None:
        """Begin the phase `name`, ending the one before it."""
        self._finish()
        self._name, self._started, self._figures = name, self._clock(), ""

    def update(
        self, best_s: float | None = None, gap: float | None = None, done: int | None = None, total: int | None = None
    ) -> None:
        """Redraw the line of this phase with the figures, where the stream is a terminal."""
        parts = []
        if done is not None:
            parts.append(f"{done}/{total}" if total is not None else f"{done}")
        if best_s is not None:
            parts.append(f"best {format_seconds(best_s)} a step")
        if gap is not None:
            parts.append(f"gap {gap:.1%}")
        self._figures = ", ".join(parts)
        now = self._clock()
        if self._live and now - self._started > SPEAK_AFTER_S and now - self._drawn > _REDRAW_S:
            self._drawn, self._shown = now, True
            self._stream.write(f"\r\x1b[K{self._dim}{self._line(now)}{self._plain}")
            self._stream.flush()

    def _line(self, now: float) -> str:
        figures = f"  {self._figures}" if self._figures else ""
        return f"autopar: {self._name} {now - self._started:.1f} s{figures}"

    def _finish(self) -> None:
        """Leave a line behind for a phase that took its time."""
        if not self._name:
            return
        now = self._clock()
        if self._shown:
            self._stream.write("\r\x1b[K")
        if now - self._started > SPEAK_AFTER_S:
            self._stream.write(f"{self._dim}{self._line(now)}{self._plain}\n")
        self._stream.flush()
        self._name, self._shown = "", False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._finish()
