"""What sorts rows that go to experts: by expert as if all ranks' rows were sorted at once, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.rewrite.expert_ops import EXPERTS
from autopar.runtime import experts as _gives_the_operators_their_work  # noqa: F401


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Return how many rows each expert takes from each rank `[ranks, experts]`, and a rank."""
    ranks, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 3), min_size=ranks * ranks * each, max_size=ranks * ranks * each))
    return torch.tensor(counts).view(ranks, ranks * each), draw(st.integers(0, ranks - 1))


@given(routings())
def test_rows_lie_by_expert_and_go_back_by_rank(routing: tuple[torch.Tensor, int]) -> None:
    counts, rank = routing
    ranks, experts = counts.shape
    ends = counts.cumsum(1).to(torch.int32)
    known = EXPERTS.known(ends.flatten(), ranks)
    each = experts // ranks
    mine = range(rank * each, (rank + 1) * each)
    # A row is (expert, rank it comes from, place there), which is the order that sorting all rows at once gives.
    came = [(e, r, i) for r in range(ranks) for e in mine for i in range(int(counts[r, e]))]
    rows = torch.tensor(came, dtype=torch.float64).view(-1, 3)

    there = EXPERTS.by_expert(rows, known, rank)
    assert there.tolist() == [list(map(float, row)) for row in sorted(came)]
    assert EXPERTS.by_rank(there, known, rank).tolist() == rows.tolist()
    assert EXPERTS.ends(known, rank, rows).tolist() == counts[:, list(mine)].sum(0).cumsum(0).tolist()
    assert there.data_ptr() != rows.data_ptr() or not there.numel()
