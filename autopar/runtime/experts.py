"""What brings rows to the ranks of their experts does: all-to-alls of unequal blocks, sorted where they arrive.

Blocks are as large as the routing of a step makes them; an expert that nobody takes has none. Ranks know all of them
from one gather of where rows end, which comes to the host: all exchanges of these rows, there and back, in forward and
in backward, take their sizes from it.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.direct import DIRECT
from autopar.runtime.exchange import by_column

_LIBRARY: Any = torch.library.Library("autopar_experts", "IMPL")  # type: ignore[no-untyped-call]
_C10D = torch.ops._c10d_functional


def _rows(known: torch.Tensor) -> torch.Tensor:
    """Return how many rows of each expert each rank has, `[ranks, ranks, experts a rank]`: from whom, to whom."""
    ranks = known.shape[0]
    return torch.diff(known, dim=1, prepend=known.new_zeros((ranks, 1))).view(ranks, ranks, -1)


def _known(ends: torch.Tensor, ranks: int) -> torch.Tensor:
    return ends.view(ranks, -1).to(device="cpu", dtype=torch.int64)


def rows_sent(known: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Return how many rows each rank sends each, `[from, to]`."""
    there = _rows(known).sum(2)
    return there.t() if back else there


def _exchange(rows: torch.Tensor, known: torch.Tensor, rank: int, back: bool, group: str) -> torch.Tensor:
    blocks = rows_sent(known, back=back)
    sent, received = blocks[rank].tolist(), blocks[:, rank].tolist()
    operation = DIRECT.all_to_all if rows.device.type == "cpu" else _C10D.all_to_all_single
    result: torch.Tensor = operation(rows, received, sent, group)
    return result


def _by_expert(rows: torch.Tensor, known: torch.Tensor, rank: int) -> torch.Tensor:
    """Return rows that lie by rank, and for each by expert, by expert."""
    return by_column(rows, _rows(known)[:, rank])


def _by_rank(rows: torch.Tensor, known: torch.Tensor, rank: int) -> torch.Tensor:
    """Return rows that lie by expert, and for each by rank, by rank."""
    return by_column(rows, _rows(known)[:, rank].t())


def _ends(known: torch.Tensor, rank: int, rows: torch.Tensor) -> torch.Tensor:
    return _rows(known)[:, rank].sum(0).cumsum(0).to(device=rows.device, dtype=torch.int32)


def _slice_backward(grad: torch.Tensor, sizes: list[int], dim: int, start: int, end: int, step: int) -> torch.Tensor:
    whole = [mine if told < 0 else told for told, mine in zip(sizes, grad.shape, strict=True)]
    result: torch.Tensor = torch.ops.aten.slice_backward.default(grad, whole, dim, start, end, step)
    return result


for _name, _operation in (
    ("known", _known),
    ("exchange", _exchange),
    ("by_expert", _by_expert),
    ("by_rank", _by_rank),
    ("ends", _ends),
    ("slice_backward", _slice_backward),
):
    _LIBRARY.impl(_name, _operation, "CompositeExplicitAutograd")
