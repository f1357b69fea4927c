"""Rows of tensors sent from rank to rank: what reductions and gathers are made of where the library has nothing better.

Pieces are `[ranks, m]`, a row a rank. On gloo ranks send one another rows, into place. Receives are announced before
anything is sent: an announcement waits its turn behind what is sent before it, and until it comes the other side sends
nothing. gloo's own all-to-all and all-gather send first, so that the two directions of a link take turns: 16 MiB each
way between two hosts at 1 Gbit/s take 230 to 290 ms, sent like this 141 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

REDUCE: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}
"""By the names of functional collectives: what is asked of the library, and the same of two tensors."""


@dataclass(frozen=True)
class Scattering:
    """Reductions under way, each of rows to this rank's own row."""

    results: list[torch.Tensor]
    own: list[torch.Tensor]
    """This rank's own terms."""

    terms: list[torch.Tensor]
    """Of the others, in the order of ranks and, of each, of results."""

    works: list[Any]
    reduce: str

    def end(self) -> torch.Tensor:
        """Return the first of the reduced rows; terms are joined in the order of ranks, this one's own first."""
        finish(self.works)
        before = self.own
        for place, term in enumerate(self.terms):
            at = place % len(self.results)
            if not at and place:
                before = self.results
            REDUCE[self.reduce][1](before[at], term, out=self.results[at])
        return self.results[0]


@dataclass(frozen=True)
class Exchange:
    """Collectives of one group on pieces `[ranks, m]`, a row a rank; `direct`: rows are sent from rank to rank."""

    group: Any
    direct: bool

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        return int(self.group.size())

    @property
    def rank(self) -> int:
        """Return this rank's place in the group."""
        return int(self.group.rank())

    @property
    def _others(self) -> list[int]:
        return [each for each in range(self.size) if each != self.rank]

    def scattering(self, pieces: list[torch.Tensor], results: list[torch.Tensor], reduce: str) -> Scattering:
        """Begin to reduce each piece to this rank's row of it; a result may be the memory of that row."""
        if not self.direct:
            settings = dist.ReduceScatterOptions()
            settings.reduceOp = REDUCE[reduce][0]
            flat = [each.reshape(-1) for each in pieces]
            work = self.group.reduce_scatter_tensor_coalesced(results, flat, settings)
            return Scattering(results, [], [], [work], reduce)
        terms = [result.new_empty(result.shape) for _ in self._others for result in results]
        ends = [(each, piece) for each in self._others for piece in pieces]
        works = [self._receive(term, each) for term, (each, _) in zip(terms, ends, strict=True)]
        works += [self._send(piece[each], each) for each, piece in ends]
        return Scattering(results, [piece[self.rank] for piece in pieces], terms, works, reduce)

    def gathering(self, pieces: list[torch.Tensor]) -> list[Any]:
        """Begin to fill the rows of pieces from the rank whose they are; return what to wait for."""
        if not self.direct:
            flat, own = [each.view(-1) for each in pieces], [each[self.rank] for each in pieces]
            return [self.group.allgather_into_tensor_coalesced(flat, own)]
        ends = [(each, piece) for each in self._others for piece in pieces]
        works = [self._receive(piece[each], each, _GATHERED) for each, piece in ends]
        return works + [self._send(piece[self.rank], each, _GATHERED) for each, piece in ends]

    def exchanging(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to send each rank its part and to fill the parts that come from each; return what to wait for.

        This rank's own part is copied; nothing is sent of parts without elements. Parts lie one behind another.
        """
        if not self.direct:
            sizes = [[part.numel() for part in parts] for parts in (received, sent)]
            flat = [_joined(parts) for parts in (received, sent)]
            return [self.group.alltoall_base(*flat, *sizes)]
        received[self.rank].copy_(sent[self.rank])
        works = [self._receive(received[each], each) for each in self._others if received[each].numel()]
        return works + [self._send(sent[each], each) for each in self._others if sent[each].numel()]

    def _send(self, row: torch.Tensor, target: int, tag: int = 0) -> Any:
        return self.group.send([row], target, tag)

    def _receive(self, row: torch.Tensor, source: int, tag: int = 0) -> Any:
        return self.group.recv([row], source, tag)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the memory of parts that lie one behind another, in one piece."""
    return parts[0].as_strided((sum(each.numel() for each in parts),), (1,))


_GATHERED = 1
"""Tag of what is handed back, so that it is not taken for what is still to be summed."""


def by_column(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return blocks of rows, of `lengths` that lie by row of this matrix, so that they lie by column: a copy."""
    if 1 in lengths.shape:
        return rows.clone(memory_format=torch.contiguous_format)
    blocks = torch.split_with_sizes(rows, lengths.flatten().tolist())
    across = lengths.shape[1]
    return torch.cat([block for column in range(across) for block in blocks[column::across]])


def finish(works: Sequence[Any]) -> None:
    """Wait for all that was begun."""
    for each in works:
        each.wait()
