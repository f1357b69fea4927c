"""What redistributed copies of one value hold, by the layouts that it is made and read in, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.costs.links import Links, Message
from autopar.costs.liveness import Beside, CopyLife, local_bytes, makers_of_gradients, settled_at
from autopar.costs.narrowing import KeptNarrow, kept_narrow
from autopar.costs.packing import Order, memory_order
from autopar.costs.routes import Routes
from autopar.ir.graph import Graph
from autopar.ir.placement import Layout
from autopar.ir.reshard import Step
from autopar.ir.roles import base_of
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

    travels: tuple[str, ...] = ()
    """Collectives that may travel with others; see `Links.routes`."""

    @cached_property
    def routes(self) -> Routes:
        """Return the ways from the layouts that it is made in to those that it is read in."""
        wanted = tuple(self.wanted)
        return self.links.routes(tuple(self.sources), wanted, self.meta, travels=self.travels, order=self._order)

    @cached_property
    def _order(self) -> Order:
        return memory_order(self.graph, self.graph.by_name[self.producer])

    @cached_property
    def _made_bytes(self) -> Floats:
        """Return [source layouts, 1] what the value holds as it is made."""
        return np.array([[local_bytes(self.meta, each, self.links.sizes)] for each in self.sources])

    @cached_property
    def _read_bytes(self) -> Floats:
        """Return [1, demanded layouts] what it holds as it is read."""
        return np.array([[local_bytes(self.meta, each, self.links.sizes) for each in self.wanted]])

    @cached_property
    def plain(self) -> CopyLife:
        """Return copies that exist from the first to the last of those that read them."""
        held = self._read_bytes * self.routes.moves
        return CopyLife(self.lives, held, beside=(*self._narrow(held), *self._gathering()))

    def _narrow(self, held: Floats) -> tuple[Beside, ...]:
        """Return what is held more and less where linear layers keep what they cast of a copy, in place of the copy."""
        casts = [each for each in map(self._cast, self.lives) if each is not None]
        if not casts or self.graph.ops[self.lives[0][0]].phase != "forward":
            return ()
        # Of what is gathered again neither is there in backward.
        kept = held * (self.again_s == 0.0)
        share = casts[0][1].share
        both = tuple((life[0], cast.first, cast.read_until) for life, cast in casts)
        instead = tuple((life[0], cast.read_until + 1, max(life[1], cast.read_until)) for life, cast in casts)
        return _any(Beside(share * kept, both), Beside((share - 1.0) * kept, instead))

    def _cast(self, life: tuple[int, int]) -> tuple[tuple[int, int], KeptNarrow] | None:
        """Return a life and the cast that is kept of its instance; `None` where none is."""
        if not self.graph.keeps_narrow:
            return None
        base, known = base_of(self.graph), kept_narrow(self.graph)
        of_instances = (known.get(base[op.name, 0]) for op in self.graph.instances[self.producer])
        later = [each for each in of_instances if each is not None and life[0] <= each.first and each.last <= life[1]]
        return (life, min(later, key=lambda each: each.first)) if later else None

    @cached_property
    def again_s(self) -> Floats:
        """Return [source layouts, demanded layouts] the seconds in which whoever reads the value later gathers it."""
        rows = [[self._again(one, other) for other in self.wanted] for one in self.sources]
        return np.array([[sum(map(self.links.message_s, each)) for each in row] for row in rows], dtype=np.float64)

    def _again(self, made: Layout, read: Layout) -> tuple[Message, ...]:
        return self.links.messages_again(made, read, self.meta, self._order)

    @property
    def gone(self) -> CopyLife:
        """Return what is held less in `lives`, in which copies that are gathered again are not there."""
        left_out = Beside(-self._read_bytes * (self.again_s > 0.0), tuple((at, at, last) for at, last in self.lives))
        return CopyLife((), np.zeros_like(left_out.bytes), beside=_any(left_out))

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
        if not self._is_gradient:
            # What is cast once it is reduced: its cast stays, and itself until then.
            held = held + self._made_bytes * self.routes.moves
            tail = np.zeros_like(tail)
        lives = tuple((first, max(last, then)) for (first, last), then in zip(self.lives, self._settled, strict=True))
        end = len(self.graph.ops)
        left = Beside(tail, tuple((first, last + 1, end) for first, last in lives))
        return CopyLife(lives, held, beside=_any(left, *self._gathering()))

    @property
    def summed(self) -> CopyLife:
        """Return reduced sums over micro-batches: from the last micro-batch on, with what their reduction takes."""
        if not self._is_gradient:
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
        if not self._is_gradient:
            return found
        end = len(self.graph.ops)
        moved = self.routes.moves * inside
        saved = self._read_bytes - self._made_bytes
        held = moved * (saved if alone else np.maximum(saved, 0.0))
        sums = Beside(held, tuple((at, 0, end) for at, _ in self.lives))
        under_way = tuple((at, at, max(at, then)) for (at, _), then in zip(self.lives, self._settled, strict=True))
        in_flight = Beside(moved * (self._scattered()[0] + self._made_bytes), under_way)
        return replace(found, bytes=np.where(inside, 0.0, found.bytes), beside=_any(sums, in_flight, *found.beside))

    @property
    def _is_gradient(self) -> bool:
        """Return whether the value has the memory of a gradient that the program returns."""
        return base_of(self.graph)[self.producer, 0][0] in makers_of_gradients(self.graph)

    @property
    def _settled(self) -> list[int]:
        """Return, of each instance, when the reduction of the gradient that it makes is waited for."""
        base, until, ops = base_of(self.graph), settled_at(self.graph), self.graph.ops
        return [until.get(base[ops[first].name, 0][0], first) for first, _ in self.lives]

    def _gathering(self) -> tuple[Beside, ...]:
        """Return what the making of gathered copies takes beside them, at the first moment."""
        return _any(Beside(self.routes.gathering_bytes, tuple((first, first, first) for first, _ in self.lives)))

    def _scattered(self) -> tuple[Floats, Floats]:
        """Return what redistributed gradients hold until they are waited for, and from then on.

        A sum over ranks is made in place, and so is one over micro-batches alone. Of a scattered one the own part
        stays; on a CPU the terms of all other ranks are received beside it, and added up after the wait.
        """
        time = self.links.time_axes
        moves = [[any(step.axis >= time for step in way.steps) for way in row] for row in self.routes.ways]
        read = self._read_bytes * np.array(moves)
        exchanged = self.links.cluster.device.kind == "cpu"
        ops = [[self._collectives(way.steps) for way in row] for row in self.routes.ways]
        scatters = np.array([["reduce_scatter" in each for each in row] for row in ops])
        summed = np.array([[each == {"all_reduce"} for each in row] for row in ops])
        held = np.where(scatters, self._made_bytes if exchanged else self._read_bytes, np.where(summed, 0.0, read))
        return held, np.where(np.isfinite(self.routes.price_s), read, 0.0)

    def _collectives(self, steps: Sequence[Step]) -> set[str]:
        return {step.kind for step in steps if step.communicates and step.axis >= self.links.time_axes}


def _any(*found: Beside) -> tuple[Beside, ...]:
    return tuple(each for each in found if each.bytes.any())
