"""Rows on their way to the ranks of their experts as operators, `autopar_experts::OPERATION`.

Rows that a rank has in its own order are sorted by expert, and experts lie in blocks on the ranks, so that what goes to
a rank lies together. What comes lies by the rank it comes from, and is sorted by expert again: the order that all
ranks' rows would have, sorted at once. How many rows go where depends on the data; shapes on fake tensors are those
of experts that take equally many.

    known(ends of all ranks) -> [ranks, experts] on the host: where the rows of each expert end, on each rank
    exchange(rows, known)    issue of the all-to-all there, or `back`; `wait_tensor` waits for it
    by_expert, by_rank       sort what came, and what goes back
    ends(known)              where the rows of each of this rank's experts end, all ranks' together
    slice_backward           aten's, of as many rows as come: the size of that dimension is -1

Here is what they are; `autopar.runtime.experts` says what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("autopar_experts", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("known(Tensor ends, int ranks) -> Tensor")
_LIBRARY.define("exchange(Tensor rows, Tensor known, int rank, bool back, str group) -> Tensor")
_LIBRARY.define("by_expert(Tensor rows, Tensor known, int rank) -> Tensor")
_LIBRARY.define("by_rank(Tensor rows, Tensor known, int rank) -> Tensor")
_LIBRARY.define("slice_backward(Tensor grad, int[] sizes, int dim, int start, int end, int step) -> Tensor")
_LIBRARY.define("ends(Tensor known, int rank, Tensor rows) -> Tensor")


def _known(ends: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.empty((ranks, ends.shape[0] // ranks), dtype=torch.int64, device="cpu")


def _as_many(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape)


def _ends(known: torch.Tensor, rank: int, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((known.shape[1] // known.shape[0],), dtype=torch.int32)


def _slice_backward(grad: torch.Tensor, sizes: list[int], *_: Any) -> torch.Tensor:
    return grad.new_empty([mine if told < 0 else told for told, mine in zip(sizes, grad.shape, strict=True)])


_SHAPES: dict[str, Callable[..., torch.Tensor]] = {
    "known": _known,
    "exchange": _as_many,
    "by_expert": _as_many,
    "by_rank": _as_many,
    "ends": _ends,
    "slice_backward": _slice_backward,
}
for _name, _shape in _SHAPES.items():
    torch.library.register_fake(f"autopar_experts::{_name}", _shape, lib=_LIBRARY)

EXPERTS = torch.ops.autopar_experts
