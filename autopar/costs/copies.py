"""What redistributed copies of one value hold, by the layouts that it is made and read in, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.costs.links import Links
from autopar.costs.liveness import Beside, CopyLife, base_of, gradients_of, local_bytes, settled_at
from autopar.costs.workspaces import gather_bytes
from autopar.ir.graph import Graph
from autopar.ir.placement import Layout
from autopar.ir.reshard import Step, route
from autopar.ir.table import Floats
from autopar.ir.tensor import TensorMeta

Lives = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Copies:
    """The redistributed copies of one value."""

    graph: Graph
    links: Links
    producer: str
    """The representative operator that makes it."""

    meta: TensorMeta
    sources: Sequence[Layout]
    """Layouts that it may be made in."""

    wanted: Sequence[Layout]
    """Layouts that it may be read in."""

    lives: Lives
    """Of each instance, the positions of the first and of the last moment that a copy is needed."""

    def table(self, of: Callable[[Layout, Layout], float]) -> Floats:
        """Return [source layouts, demanded layouts] what `of` says of each pair."""
        return np.array([[of(a, b) for b in self.wanted] for a in self.sources], dtype=np.float64)

    @property
    def plain(self) -> CopyLife:
        """Return copies that exist from the first to the last of those that read them."""
        held = self.table(lambda a, b: 0.0 if a == b else self._bytes(b))
        return CopyLife(self.lives, held, beside=self._gathering())

    @property
    def kept(self) -> CopyLife:
        """Return copies of a parameter that are made once a step and kept for all micro-batches."""
        end = len(self.graph.ops)
        whole = Beside(self.plain.bytes, tuple((first, 0, end) for first, _ in self.lives))
        return CopyLife(self.lives, np.zeros_like(whole.bytes), beside=(whole, *self._gathering()))

    @property
    def reduced(self) -> CopyLife:
        """Return reduced gradients of a step without micro-batches: the sums stay, their terms until they are there."""
        held, tail = self._scattered()
        if self._base not in {name for name, _ in gradients_of(self.graph)}:
            # What is cast once it is reduced: its cast stays, and itself until then.
            held = held + self.table(lambda a, b: self._bytes(a) * (a != b))
            tail = np.zeros_like(tail)
        until = settled_at(self.graph)
        places = [self.graph.ops[first].name for first, _ in self.lives]
        lives = tuple(
            (first, max(last, until.get(self._base_of(name), last)))
            for (first, last), name in zip(self.lives, places, strict=True)
        )
        end = len(self.graph.ops)
        left = Beside(tail, tuple((first, last + 1, end) for first, last in lives))
        return CopyLife(lives, held, beside=_any(left, *self._gathering()))

    @property
    def summed(self) -> CopyLife:
        """Return reduced sums over micro-batches: from the last micro-batch on, with what their reduction takes."""
        if self._base not in {name for name, _ in gradients_of(self.graph)}:
            return self.plain
        end = len(self.graph.ops)
        held, _ = self._scattered()
        return CopyLife(tuple((first, end) for first, _ in self.lives), held, beside=self._gathering())

    def early(self, inside: npt.NDArray[np.bool_], *, alone: bool) -> CopyLife:
        """Return gradients of micro-batches, of which each reduces its own where `inside` says so of a demand.

        The sum over micro-batches is as large as what is reduced, not as its terms. These are there, with what their
        reduction takes, until it is waited for. Where several readers share copies (not `alone`), these may be bought
        without being read, and so must not save anything.
        """
        found = self.summed
        if self._base not in {name for name, _ in gradients_of(self.graph)}:
            return found
        until, end = settled_at(self.graph), len(self.graph.ops)
        places = [first for first, _ in self.lives]
        settled = [until.get(self._base_of(self.graph.ops[at].name), at) for at in places]
        moved = self.table(lambda a, b: float(a != b)) * inside
        terms, saved = self.table(lambda a, _: self._bytes(a)), self.table(lambda a, b: self._bytes(b) - self._bytes(a))
        sums = Beside(moved * (saved if alone else np.maximum(saved, 0.0)), tuple((at, 0, end) for at in places))
        under_way = tuple((at, at, max(at, then)) for at, then in zip(places, settled, strict=True))
        in_flight = Beside(moved * (self._scattered()[0] + terms), under_way)
        return replace(found, bytes=np.where(inside, 0.0, found.bytes), beside=_any(sums, in_flight, *found.beside))

    @property
    def _base(self) -> str:
        return self._base_of(self.producer)

    def _base_of(self, name: str) -> str:
        return base_of(self.graph)[name, 0][0]

    def _bytes(self, layout: Layout) -> float:
        return local_bytes(self.meta, layout, self.links.sizes)

    def _gathering(self) -> tuple[Beside, ...]:
        """Return what the making of gathered copies takes beside them, at the first moment."""
        op = self.graph.by_name[self.producer]
        taken = self.table(lambda a, b: gather_bytes(self.graph, op, self._route(a, b), self.meta, self.links.sizes))
        return _any(Beside(taken, tuple((first, first, first) for first, _ in self.lives)))

    def _route(self, before: Layout, after: Layout) -> tuple[Step, ...]:
        """Return the steps from one layout to another, none if no steps lead there."""
        if before == after or not np.isfinite(self.links.route_s(before, after, self.meta)):
            return ()
        return route(before, after, self.meta.shape, self.links.sizes, self.links.time_axes)

    def _scattered(self) -> tuple[Floats, Floats]:
        """Return what redistributed gradients hold until they are waited for, and from then on.

        A sum over ranks is made in place. Of a scattered one the own part stays; on a CPU the terms of all other ranks
        are received beside it, and added up after the wait.
        """
        held = self.table(lambda a, b: 0.0 if a == b else self._bytes(b))
        tail = np.zeros_like(held)
        exchanged = self.links.cluster.device.kind == "cpu"
        for i, have in enumerate(self.sources):
            for j, want in enumerate(self.wanted):
                if have == want or not np.isfinite(self.links.route_s(have, want, self.meta)):
                    continue
                ops = {message.op for message in self.links.route_messages(have, want, self.meta)}
                tail[i, j] = self._bytes(want)
                if "reduce_scatter" in ops:
                    held[i, j] = self._bytes(have if exchanged else want)
                elif ops == {"all_reduce"}:
                    held[i, j] = 0.0
        return held, tail


def _any(*found: Beside) -> tuple[Beside, ...]:
    return tuple(each for each in found if each.bytes.any())
