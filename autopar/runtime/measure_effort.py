"""How long measuring a machine may take: which sizes are worth their seconds, and how often each is timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Limits of what `measure_kernels`, `measure_links` and `measure_cores` time."""

    longest_s: float
    """Sizes that would take longer than this are left out."""

    runs: int
    """How often what is short is timed; what is long at most five times."""

    @property
    def few(self) -> int:
        """Return how often what takes long is timed."""
        return min(5, self.runs)


THOROUGH = Effort(longest_s=0.3, runs=7)
QUICK = Effort(longest_s=0.03, runs=3)
"""A tenth of the seconds a call: sizes beyond, and how much rates grow with them, are told by the formulas alone."""
