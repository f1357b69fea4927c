"""Ways between the layouts of one value, all at once: each is found and priced once for all that is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.placement import Layout
from autopar.ir.reshard import Step
from autopar.ir.table import Floats

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Way:
    """How a tensor gets from one layout to another."""

    steps: tuple[Step, ...]
    """None where the layouts are equal, or no steps lead there."""

    seconds: float
    """Infinite if no steps lead there."""

    hidable_s: float
    """The part of it that computation can run behind; infinite, too, if no steps lead there."""

    gathering_bytes: int
    """What gathers hold beside the gathered copy while they are under way."""


STAYS = Way((), 0.0, 0.0, 0)
"""Of a tensor that is in its layout already."""


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The ways from each of some layouts to each of others."""

    ways: tuple[tuple[Way, ...], ...]
    """[source][wanted]"""

    moves: Bools
    """[source, wanted]: whether the layouts differ."""

    price_s: Floats
    """[source, wanted] seconds; infinite if no steps lead there."""

    hidable_s: Floats
    """[source, wanted] the part of them that computation can run behind."""

    gathering_bytes: Floats
    """[source, wanted] bytes that gathers hold beside the gathered copy while they are under way."""

    @classmethod
    def of(cls, sources: Sequence[Layout], wanted: Sequence[Layout], way: Callable[[Layout, Layout], Way]) -> Routes:
        """Return the ways between all pairs."""
        ways = tuple(tuple(STAYS if a == b else way(a, b) for b in wanted) for a in sources)
        size = len(sources), len(wanted)
        moves = np.array([each is not STAYS for row in ways for each in row], dtype=np.bool_).reshape(size)
        price = np.array([each.seconds for row in ways for each in row], dtype=np.float64).reshape(size)
        hidable = np.array([each.hidable_s for row in ways for each in row], dtype=np.float64).reshape(size)
        held = np.array([each.gathering_bytes for row in ways for each in row], dtype=np.float64).reshape(size)
        return cls(ways, moves, price, hidable, held)
