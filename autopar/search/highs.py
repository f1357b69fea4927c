"""HiGHS, silent from its first call on."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):  # type: ignore[misc]  # highspy is untyped
    """HiGHS with one thread, so that its results repeat, and without a word on stdout, which is for what users asked.

    Version 1.16 writes a banner when a solver is made: it enables its callbacks before any option can be set.
    """

    def __init__(self) -> None:
        """Make an empty model."""
        super().__init__()
        self.silent()
        self.setOptionValue("threads", 1)

    def enableCallbacks(self) -> None:  # noqa: N802  # highspy's name
        """Enable callbacks, in silence."""
        self.silent()
        super().enableCallbacks()
