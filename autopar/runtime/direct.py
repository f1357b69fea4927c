"""Collectives as gloo does them best: `autopar_direct::OPERATION`, waited for by `wait_tensor`.

Gathers, scattered sums and exchanges are messages from rank to rank. They need no thread: what is issued is under way
at once, and a sum over ranks is added up by who waits for it. Small tensors that travel together are sent as one; so
are those of sums that all ranks get, of which gloo's own collective copies the large ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import group_named, wait_by
from autopar.ir.reshard import PACKED_BYTES, SUMMED_BYTES
from autopar.runtime.exchange import REDUCE, Exchange, finish

_LIBRARY: Any = torch.library.Library("autopar_direct", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("all_gather(Tensor[] values, int ranks, str group) -> Tensor[]")
_LIBRARY.define("reduce_scatter(Tensor[] values, str reduce, int ranks, str group) -> Tensor[]")
_LIBRARY.define("all_to_all(Tensor value, int[] received, int[] sent, str group) -> Tensor")
_LIBRARY.define("all_reduce(Tensor[] values, str reduce, str group) -> Tensor[]")
_LIBRARY.define("all_reduce_(Tensor(a!)[] values, str reduce, str group) -> Tensor(a!)[]")

DIRECT = torch.ops.autopar_direct


@dataclass(frozen=True)
class _Rows:
    """Tensors as rows, one a rank: large ones where they are, the others beside each other in one buffer.

    At 1 Gbit/s a message more costs less than copying large ones twice.
    """

    pieces: list[torch.Tensor]
    """`[ranks, m]` each; the buffer, if there is one, comes last."""

    large: list[int]
    small: list[int]

    @classmethod
    def of(cls, values: Sequence[torch.Tensor], ranks: int) -> _Rows:
        """Return views of tensors whose first dimension the ranks share, and a copy of the small ones."""
        rows = [each.contiguous().view(ranks, -1) for each in values]
        small = [i for i, each in enumerate(rows) if each[0].nbytes < PACKED_BYTES]
        small = small if len(small) > 1 else []
        large = [i for i in range(len(rows)) if i not in small]
        packed = [torch.cat([rows[i] for i in small], 1)] if small else []
        return cls([*(rows[i] for i in large), *packed], large, small)

    def unpack(self, pieces: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Copy small results out of their buffer, which is the last of the pieces."""
        if not self.small:
            return
        found = [results[i] for i in self.small]
        rows = pieces[-1].shape[0]
        parts = torch.split_with_sizes(pieces[-1], [each.numel() // rows for each in found], 1)
        for result, part in zip(found, parts, strict=True):
            result.view(rows, -1).copy_(part)


def _all_gather(values: list[torch.Tensor], ranks: int, group: str) -> list[torch.Tensor]:
    exchange = Exchange(group_named(group), direct=True)
    results = _gathered(values, ranks)
    own = _Rows.of(values, 1)
    into = [results[i].view(ranks, -1) for i in own.large]
    into += [each.new_empty((ranks, each.shape[1])) for each in own.pieces[len(own.large) :]]
    for piece, whole in zip(own.pieces, into, strict=True):
        whole[exchange.rank].copy_(piece[0])
    works = exchange.gathering(into)

    def end() -> None:
        finish(works)
        own.unpack(into, results)

    _wait_once(results, end)
    return results


def _reduce_scatter(values: list[torch.Tensor], reduce: str, ranks: int, group: str) -> list[torch.Tensor]:
    exchange = Exchange(group_named(group), direct=True)
    results = _scattered(values, reduce, ranks)
    rows = _Rows.of(values, ranks)
    into = [results[i].view(-1) for i in rows.large]
    into += [each.new_empty(each.shape[1]) for each in rows.pieces[len(rows.large) :]]
    begun = exchange.scattering(rows.pieces, into, reduce)

    def end() -> None:
        begun.end()
        rows.unpack([each.view(1, -1) for each in into], results)

    _wait_once(results, end)
    return results


def _all_to_all(value: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
    exchange = Exchange(group_named(group), direct=True)
    result = _exchanged(value, received)
    parts = torch.split_with_sizes(value.contiguous(), sent)
    works = exchange.exchanging(parts, torch.split_with_sizes(result, received))
    wait_by(result, lambda: finish(works))
    return result


def _all_reduce_(values: list[torch.Tensor], reduce: str, group: str) -> list[torch.Tensor]:
    settings = dist.AllreduceOptions()
    settings.reduceOp = REDUCE[reduce][0]
    small = [each for each in values if each.nbytes < SUMMED_BYTES]
    packed = [torch.cat([each.reshape(-1) for each in small])] if len(small) > 1 else small
    large = [each for each in values if each.nbytes >= SUMMED_BYTES]
    works = [group_named(group).allreduce([each], settings) for each in (*large, *packed)]

    def end() -> None:
        finish(works)
        if len(small) > 1:
            parts = torch.split_with_sizes(packed[0], [each.numel() for each in small])
            for each, part in zip(small, parts, strict=True):
                each.copy_(part.view(each.shape))

    _wait_once(values, end)
    return values


def _all_reduce(values: list[torch.Tensor], reduce: str, group: str) -> list[torch.Tensor]:
    return _all_reduce_([each.clone(memory_format=torch.contiguous_format) for each in values], reduce, group)


def _wait_once(results: Sequence[torch.Tensor], end: Callable[[], None]) -> None:
    """Let waiting for any of the results call `end`, the first time; what it holds is let go then."""
    pending = [end]

    def wait() -> None:
        if pending:
            pending.pop()()

    for each in results:
        wait_by(each, wait)


def _as_large(values: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each in values]


def _gathered(values: list[torch.Tensor], ranks: int, *_: Any) -> list[torch.Tensor]:
    return [each.new_empty((each.shape[0] * ranks, *each.shape[1:])) for each in values]


def _scattered(values: list[torch.Tensor], reduce: str, ranks: int, *_: Any) -> list[torch.Tensor]:
    return [each.new_empty((each.shape[0] // ranks, *each.shape[1:])) for each in values]


def _exchanged(value: torch.Tensor, received: list[int], *_: Any) -> torch.Tensor:
    return value.new_empty((sum(received), *value.shape[1:]))


for _name, _operation, _shape in (
    ("all_gather", _all_gather, _gathered),
    ("reduce_scatter", _reduce_scatter, _scattered),
    ("all_to_all", _all_to_all, _exchanged),
    ("all_reduce", _all_reduce, _as_large),
):
    _LIBRARY.impl(_name, _operation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_direct::{_name}", _shape, lib=_LIBRARY)

_LIBRARY.impl("all_reduce_", _all_reduce_, "CompositeExplicitAutograd")
