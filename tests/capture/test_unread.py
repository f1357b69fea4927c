"""Arguments that operators do not read are left out of the program."""

from __future__ import annotations

import torch
from torch import nn

from autopar.api import plan_captured
from autopar.options import PlanOptions
from autopar.progress import Silent
from cost_models.cluster import ClusterSpec
from tests.support.whole import Whole, run_ranks


class Table(nn.Module):
    """Numbers of a table, normalised as they are or behind a layer, and a layer on them."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6) if behind else nn.Identity()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(self.before(x))).square().mean()


def readers(whole: Whole) -> list[str]:
    """Return the operators that read the norm's weight."""
    graph = whole.captured.graph
    (weight,) = [op.name for op in graph.ops if op.target == "norm.weight"]
    return [graph.by_name[name].target for name in graph.users[weight]]


def test_a_batch_norm_on_plain_inputs_reads_its_weight_in_forward_only():
    plain, behind = (Whole.of(Table(which), (torch.randn(8, 6),)) for which in (False, True))

    assert readers(plain) == ["aten._native_batch_norm_legit_functional.default"]
    assert readers(behind) == [*readers(plain), "aten.native_batch_norm_backward.default"]


def test_what_is_sharded_is_not_gathered_for_it_and_gradients_are_the_same():
    whole = Whole.of(Table(False), (torch.randn(8, 6),))
    options = PlanOptions.parse(fix={"dp_shard": 2, "zero": 3})
    decisions = plan_captured(whole.captured, "model", ClusterSpec.parse("cpu:2"), options, Silent()).decisions

    ranked = run_ranks(whole, decisions)

    for place, value in enumerate(whole.run()):
        for rank in range(2):
            found = ranked.results[rank][place]
            torch.testing.assert_close(found, ranked.expected(rank, place, value), rtol=1e-4, atol=1e-5)
