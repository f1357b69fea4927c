"""What collectives in two levels do: chains of flat ones inside the fast links and across them.

On gloo a chain runs on a thread of its stream, one chain after another, so that the thread that issues it goes on; on
devices with streams it is issued at once on a stream of its own. `wait_tensor` of a result waits for the chain's end.

All work on pieces of equal rows, one a rank of the group: its share, which it sums or hands to the others. What goes
across is what a rank shares with the ranks of its place in other nodes; blocks are sent to where they belong, so that
none is permuted.
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
from autopar.runtime.exchange import REDUCE, Exchange, Scattering, by_column, finish
from autopar.runtime.experts import rows_sent


@dataclass(frozen=True)
class Levels:
    """The groups of this rank inside the fast links and across them."""

    inner: Exchange
    outer: Exchange

    @classmethod
    def named(cls, inner: str, outer: str, device: torch.device) -> Levels:
        """Return those of two process groups, for tensors on a device."""
        direct = device.type == "cpu"
        return cls(Exchange(group_named(inner), direct), Exchange(group_named(outer), direct))

    @property
    def sizes(self) -> tuple[int, int]:
        """Return how many ranks meet across, and how many inside."""
        return self.outer.size, self.inner.size

    def all_reduce(self, values: Sequence[torch.Tensor], reduce: str, chunks: int) -> None:
        """Reduce the values over all ranks, in the memory that they have.

        In chunks, one is exchanged inside while another is under way across.
        """
        packed = _Packed.of(values, self.inner.size, chunks)
        parts = packed.parts
        across = []
        begun = self._scattering(parts[0], reduce)
        for following in [*parts[1:], None]:
            ready, begun = begun, begun if following is None else self._scattering(following, reduce)
            across.append(dist.all_reduce(ready.end(), REDUCE[reduce][0], group=self.outer.group, async_op=True))
        gathered = []
        for part, work in zip(parts, across, strict=True):
            work.wait()
            gathered += self.inner.gathering([part])
        finish(gathered)
        packed.unpack()

    def _scattering(self, part: torch.Tensor, reduce: str) -> Scattering:
        return self.inner.scattering([part], [part[self.inner.rank]], reduce)

    def all_gather(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Fill the results, along dimension 0, with the values of all ranks."""
        nodes, inside = self.sizes
        for value, result in zip(values, results, strict=True):
            blocks = result.view(nodes, inside, -1)
            own = blocks[:, self.inner.rank]
            own[self.outer.rank] = value.reshape(-1)
            across = own if self.outer.direct else own.contiguous()
            finish(self.outer.gathering([across]))
            if across is not own:
                own.copy_(across)
            finish(self.inner.gathering(list(blocks)))

    def reduce_scatter(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor], reduce: str) -> None:
        """Fill the results with this rank's part, along dimension 0, of the values reduced over all ranks."""
        nodes, inside = self.sizes
        for value, result in zip(values, results, strict=True):
            blocks = value.reshape(nodes, inside, -1)
            share = value.new_empty((nodes, blocks.shape[2]))
            self.inner.scattering(list(blocks), list(share), reduce).end()
            self.outer.scattering([share], [result.view(-1)], reduce).end()

    def all_to_all(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Fill the results, along dimension 0, with the part for this rank of the values of all ranks.

        What is for one place in any node goes to that place in this one first; from there, to the node.
        """
        nodes, inside = self.sizes
        for value, result in zip(values, results, strict=True):
            by_place = value.reshape(nodes, inside, -1).transpose(0, 1).contiguous()
            brought = torch.empty_like(by_place)
            finish(self.inner.exchanging(list(by_place), list(brought)))
            by_node = brought.transpose(0, 1).contiguous()
            finish(self.outer.exchanging(list(by_node), list(result.view(nodes, inside, -1))))

    def exchange(self, rows: torch.Tensor, result: torch.Tensor, sent: torch.Tensor) -> None:
        """Fill the result with the rows for this rank, by the rank they come from; `sent` are those `[from, to]`.

        They go the way of an all-to-all, in blocks of unequal size.
        """
        nodes, inside = self.sizes
        node, place = self.outer.rank, self.inner.rank
        sizes = sent.reshape(nodes, inside, nodes, inside)
        mine, through = sizes[node, place], sizes[node, :, :, place]
        by_place = by_column(rows, mine)
        brought = rows.new_empty((int(through.sum()), *rows.shape[1:]))
        finish(self.inner.exchanging(_cut_rows(by_place, mine.sum(0)), _cut_rows(brought, through.sum(1))))
        by_node = by_column(brought, through)
        came = sizes[:, :, node, place].sum(1)
        finish(self.outer.exchanging(_cut_rows(by_node, through.sum(0)), _cut_rows(result, came)))


def _cut_rows(rows: torch.Tensor, lengths: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split_with_sizes(rows, lengths.tolist())


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
    levels = Levels.named(inner, outer, values[0].device)
    _issue(stream, lambda: levels.all_reduce(values, reduce, chunks), values, values)
    return values


def _all_reduce(values: list[torch.Tensor], *settings: Any) -> list[torch.Tensor]:
    return _all_reduce_([each.clone(memory_format=torch.contiguous_format) for each in values], *settings)


def _all_gather(values: list[torch.Tensor], ranks: int, inner: str, outer: str, stream: str) -> list[torch.Tensor]:
    levels = Levels.named(inner, outer, values[0].device)
    results = [each.new_empty((each.shape[0] * ranks, *each.shape[1:])) for each in values]
    _issue(stream, lambda: levels.all_gather(values, results), (*values, *results), results)
    return results


def _reduce_scatter(
    values: list[torch.Tensor], reduce: str, ranks: int, inner: str, outer: str, stream: str
) -> list[torch.Tensor]:
    levels = Levels.named(inner, outer, values[0].device)
    results = [each.new_empty((each.shape[0] // ranks, *each.shape[1:])) for each in values]
    _issue(stream, lambda: levels.reduce_scatter(values, results, reduce), (*values, *results), results)
    return results


def _all_to_all(values: list[torch.Tensor], inner: str, outer: str, stream: str) -> list[torch.Tensor]:
    levels = Levels.named(inner, outer, values[0].device)
    results = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in values]
    _issue(stream, lambda: levels.all_to_all(values, results), (*values, *results), results)
    return results


def _exchange(
    values: list[torch.Tensor], known: torch.Tensor, rank: int, back: bool, inner: str, outer: str, stream: str
) -> list[torch.Tensor]:
    levels = Levels.named(inner, outer, values[0].device)
    sent = rows_sent(known, back=back)
    (rows,) = values
    result = rows.new_empty((int(sent[:, rank].sum()), *rows.shape[1:]))
    _issue(stream, lambda: levels.exchange(rows, result, sent), (rows, result), [result])
    return [result]


_LIBRARY = torch.library.Library("autopar_levels", "IMPL")  # type: ignore[no-untyped-call]
for _name, _operation in {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
}.items():
    _LIBRARY.impl(_name, _operation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
