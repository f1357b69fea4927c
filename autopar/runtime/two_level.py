"""What collectives in two levels do: chains of flat ones inside the fast links and across them.

On gloo a chain runs on a thread of its stream, one chain after another, so that the thread that issues it goes on; on
devices with streams it is issued at once on a stream of its own. `wait_tensor` of a result waits for the chain's end.

All work on one contiguous buffer of as many rows as ranks inside: row j is rank j's share, which it sums, exchanges
across and hands back. gloo has no reduce-scatter, and its all-gather takes memory of its own for the result: there
ranks inside send one another rows, into place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import group_named, wait_by

_REDUCE: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}
"""By the names of functional collectives: what is asked of the library, and the same of two tensors."""


@dataclass(frozen=True)
class Levels:
    """The groups of this rank inside the fast links and across them."""

    inner: Any
    outer: Any

    @property
    def sizes(self) -> tuple[int, int]:
        """Return how many ranks meet across, and how many inside."""
        return self.outer.size(), self.inner.size()

    def all_reduce(self, values: Sequence[torch.Tensor], reduce: str, chunks: int) -> None:
        """Reduce the values over all ranks, in the memory that they have.

        In chunks, one is exchanged inside while another is under way across.
        """
        packed = _Packed.of(values, self.inner.size(), chunks)
        parts = packed.parts
        across = []
        scattered = [_Scattering.begin(parts[0], self.inner, reduce)]
        for place in range(len(parts)):
            scattered += [_Scattering.begin(each, self.inner, reduce) for each in parts[place + 1 : place + 2]]
            own = scattered[place].end()
            across.append(dist.all_reduce(own, _REDUCE[reduce][0], group=self.outer, async_op=True))
        gathered = []
        for part, work in zip(parts, across, strict=True):
            work.wait()
            gathered += _gathering(part, self.inner)
        _finish(gathered)
        packed.unpack()

    def all_gather(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Fill the results, along dimension 0, with the values of all ranks."""
        nodes, inside = self.sizes
        parts = [each.numel() for each in values]
        rows = values[0].new_empty((inside, nodes, sum(parts)))
        own = rows[self.inner.rank()]
        torch.cat([each.reshape(-1) for each in values], out=own[self.outer.rank()])
        _finish(_gathering(own, self.outer))
        _finish(_gathering(rows, self.inner))
        for result, part in zip(results, torch.split(rows.transpose(0, 1), parts, 2), strict=True):
            result.view(nodes, inside, -1).copy_(part)

    def reduce_scatter(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor], reduce: str) -> None:
        """Fill the results with this rank's part, along dimension 0, of the values reduced over all ranks."""
        nodes, inside = self.sizes
        parts = [each.numel() for each in results]
        rows = values[0].new_empty((inside, nodes, sum(parts)))
        for value, part in zip(values, torch.split(rows.transpose(0, 1), parts, 2), strict=True):
            part.copy_(value.reshape(nodes, inside, -1))
        share = _Scattering.begin(rows, self.inner, reduce).end()
        own = _Scattering.begin(share, self.outer, reduce).end()
        for result, part in zip(results, torch.split(own.view(-1), parts), strict=True):
            result.copy_(part.view(result.shape))


@dataclass(frozen=True)
class _Packed:
    """Tensors as pieces of equal rows: large ones where they are, the others one behind another in a buffer."""

    parts: list[torch.Tensor]
    small: list[torch.Tensor]
    buffer: torch.Tensor

    @classmethod
    def of(cls, values: Sequence[torch.Tensor], rows: int, chunks: int) -> _Packed:
        """Return the pieces, about as large as one of so many chunks of all; the last may be padded."""
        size = max(rows, sum(each.numel() for each in values) // chunks)
        large = [each for each in values if cls._stays(each, rows, size)]
        small = [each for each in values if not cls._stays(each, rows, size)]
        parts = [part for each in large for part in cls._cut(each.view(rows, -1), size)]
        total = sum(each.numel() for each in small)
        buffer = values[0].new_empty((rows, -(-total // rows)))
        if small:
            torch.cat([each.reshape(-1) for each in small], out=buffer.view(-1)[:total])
            buffer.view(-1)[total:] = 0
            parts += cls._cut(buffer, size)
        return cls(parts, small, buffer)

    @staticmethod
    def _stays(value: torch.Tensor, rows: int, size: int) -> bool:
        """Return whether a tensor makes pieces of its own, which are not much smaller than they should be."""
        return value.is_contiguous() and not value.numel() % rows and 2 * value.numel() >= size

    @staticmethod
    def _cut(rows: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
        return torch.tensor_split(rows, min(rows.shape[1], max(1, round(rows.numel() / size))), 1)

    def unpack(self) -> None:
        """Copy what is in the buffer to the tensors that it was made of."""
        at = 0
        for value in self.small:
            value.copy_(self.buffer.view(-1)[at : at + value.numel()].view(value.shape))
            at += value.numel()


@dataclass(frozen=True)
class _Scattering:
    """A reduction under way whose result is this rank's row, in the memory of the rows; the others are undefined then.

    On devices with streams it is whole: what runs next runs behind it.
    """

    own: torch.Tensor
    terms: list[torch.Tensor]
    works: list[Any]
    reduce: str

    @classmethod
    def begin(cls, rows: torch.Tensor, group: Any, reduce: str) -> _Scattering:
        """Return the reduction of rows over a group, begun."""
        rank, own = group.rank(), rows[group.rank()]
        if rows.device.type != "cpu":
            dist.reduce_scatter_tensor(own.view(-1), rows.view(-1), _REDUCE[reduce][0], group=group)
            return cls(own, [], [], reduce)
        others = [each for each in range(group.size()) if each != rank]
        terms = [torch.empty_like(own) for _ in others]
        works = [dist.irecv(term, group=group, group_src=each) for term, each in zip(terms, others, strict=True)]
        works += [dist.isend(rows[each], group=group, group_dst=each) for each in others]
        return cls(own, terms, works, reduce)

    def end(self) -> torch.Tensor:
        """Return this rank's row when it is reduced; terms are joined in the order of ranks, its own first."""
        _finish(self.works)
        for term in self.terms:
            _REDUCE[self.reduce][1](self.own, term, out=self.own)
        return self.own


def _gathering(rows: torch.Tensor, group: Any) -> list[Any]:
    """Begin to fill the rows of all ranks of the group from the rank whose they are; return what to wait for."""
    rank = group.rank()
    own = rows[rank]
    if rows.device.type != "cpu":
        dist.all_gather_into_tensor(rows.view(-1), own.view(-1), group=group)
        return []
    others = [each for each in range(group.size()) if each != rank]
    works = [dist.irecv(rows[each], group=group, group_src=each, tag=_GATHERED) for each in others]
    return works + [dist.isend(own, group=group, group_dst=each, tag=_GATHERED) for each in others]


_GATHERED = 1
"""Tag of what is handed back, so that it is not taken for what is still to be summed."""


def _finish(works: Sequence[Any]) -> None:
    for each in works:
        each.wait()


class _Worker:
    """A thread on which a stream's chains run, one after another; a daemon, as one may wait for a rank that is gone."""

    def __init__(self, stream: str) -> None:
        self._todo: SimpleQueue[tuple[Callable[[], object], Future[None]]] = SimpleQueue()
        Thread(target=self._run, name=f"autopar {stream}", daemon=True).start()

    def submit(self, chain: Callable[[], object]) -> Future[None]:
        """Let a chain run after those before it; what it raises is raised to who asks for the result."""
        done: Future[None] = Future()
        self._todo.put((chain, done))
        return done

    def _run(self) -> None:
        while True:
            chain, done = self._todo.get()
            try:
                with torch.no_grad():
                    chain()
            except Exception as error:  # noqa: BLE001  raised where the result is waited for
                done.set_exception(error)
            else:
                done.set_result(None)
            del chain, done  # with the tensors that they hold


_worker = cache(_Worker)


@cache
def _side(stream: str, device: torch.device) -> Any:
    """Return the device's stream on which a stream's chains run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _issue(stream: str, chain: Callable[[], object], held: Sequence[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Let a chain run; waiting for one of the results waits for its end."""
    device = results[0].device
    if device.type == "cpu":
        done = _worker(stream).submit(chain)
        for each in results:
            wait_by(each, done.result)
        return
    side, now = _side(stream, device), torch.cuda.current_stream(device)
    side.wait_stream(now)
    with torch.cuda.stream(side), torch.no_grad():
        chain()
        ended = side.record_event()
    for each in held:
        each.record_stream(side)
    for each in results:
        wait_by(each, lambda: torch.cuda.current_stream(device).wait_event(ended))


def _all_reduce_(
    values: list[torch.Tensor], reduce: str, chunks: int, inner: str, outer: str, stream: str
) -> list[torch.Tensor]:
    levels = Levels(group_named(inner), group_named(outer))
    _issue(stream, lambda: levels.all_reduce(values, reduce, chunks), values, values)
    return values


def _all_reduce(values: list[torch.Tensor], *settings: Any) -> list[torch.Tensor]:
    return _all_reduce_([each.clone(memory_format=torch.contiguous_format) for each in values], *settings)


def _all_gather(values: list[torch.Tensor], ranks: int, inner: str, outer: str, stream: str) -> list[torch.Tensor]:
    levels = Levels(group_named(inner), group_named(outer))
    results = [each.new_empty((each.shape[0] * ranks, *each.shape[1:])) for each in values]
    _issue(stream, lambda: levels.all_gather(values, results), (*values, *results), results)
    return results


def _reduce_scatter(
    values: list[torch.Tensor], reduce: str, ranks: int, inner: str, outer: str, stream: str
) -> list[torch.Tensor]:
    levels = Levels(group_named(inner), group_named(outer))
    results = [each.new_empty((each.shape[0] // ranks, *each.shape[1:])) for each in values]
    _issue(stream, lambda: levels.reduce_scatter(values, results, reduce), (*values, *results), results)
    return results


_LIBRARY = torch.library.Library("autopar_levels", "IMPL")  # type: ignore[no-untyped-call]
for _name, _operation in {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}.items():
    _LIBRARY.impl(_name, _operation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
