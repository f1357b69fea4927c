"""Rewritten programs on all ranks against the whole program, under decisions that are anything but tame."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import Gather
from autopar.rewrite import rewrite
from autopar.strategies.axis import axis_strategies
from autopar.strategies.compose import AxisSpec, compose
from tests.support.decide import decide, drawn, mesh_of
from tests.support.models import cases
from tests.support.whole import Ranked, Whole, run_ranks

MESHES = [mesh_of(tp=2), mesh_of(dp=2, tp=2)]


@pytest.fixture(scope="module")
def wholes() -> dict[str, tuple[Whole, list[torch.Tensor | None]]]:
    found = {name: Whole.of(model, example) for name, (model, example) in cases().items()}
    return {name: (whole, whole.run()) for name, whole in found.items()}


@pytest.fixture(scope="module")
def run_drawn(wholes) -> Callable[..., Ranked]:
    """Run a model under decisions drawn by a seed; what several tests look at is run once."""

    @cache
    def run(name: str, mesh: Mesh, seed: int, gather: Gather, greedy: bool) -> Ranked:
        whole, _ = wholes[name]
        return run_ranks(whole, drawn(whole.captured.graph, mesh, seed, gather=gather, greedy=greedy))

    def with_defaults(name: str, mesh: Mesh, seed: int, gather: Gather = "per_phase", greedy: bool = False) -> Ranked:
        return run(name, mesh, seed, gather, greedy)

    return with_defaults


def require_equal(ranked: Ranked, whole: list[torch.Tensor | None]) -> None:
    for rank, results in enumerate(ranked.results):
        for place, (mine, want) in enumerate(zip(results, whole, strict=True)):
            if want is None:
                assert mine is None
            else:
                torch.testing.assert_close(mine, ranked.expected(rank, place, want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "plain", "vision", "tied", "turned"])
def test_random_decisions_give_the_whole_programs_results(name: str, mesh: Mesh, seed: int, wholes, run_drawn):
    gather = "per_phase" if seed % 2 else "once"

    ranked = run_drawn(name, mesh, seed, gather, greedy=seed == 2)

    require_equal(ranked, wholes[name][1])


class Classified(nn.Module):
    """Tokens whose classes are brought to where cross entropy wants them by a permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.head(x).permute(0, 2, 1), y)


def test_split_classes_that_lie_as_they_were_permuted_have_a_gradient():
    torch.manual_seed(1)
    whole = Whole.of(Classified(), (torch.randn(4, 4, 8), torch.randint(6, (4, 4))))
    graph = whole.captured.graph
    scores = next(op for op in graph.ops if op.target == "aten.nll_loss2d_backward.default").refs[1].op
    split = {
        "permute": "S2->S1",
        "_log_softmax": "S1->S1 (class)",
        scores: "S1->S1",
        "nll_loss2d_backward": "R,S1,R,R->S1 (vocab)",
    }
    choices = compose(graph, [AxisSpec(2)], axis_strategies)
    chosen = {
        name: next(each.axes for each in choices.of[graph.representative(name)] if str(each) == text)
        for name, text in split.items()
    }

    ranked = run_ranks(whole, decide(graph, mesh_of(tp=2), operators=chosen))

    require_equal(ranked, whole.run())


class Volumes(nn.Module):
    """Determinants and a solution of a matrix as it is, columns side by side, of its transpose and of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter((torch.eye(8) + 0.3 * torch.randn(8, 8)).mT)  # as torch.linalg.qr gives them, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        found = 0.1 * torch.linalg.solve(self.matrix, x).square().mean()
        for matrix in (self.matrix, self.matrix.mT, self.matrix[:, :4][:4]):
            found = found + torch.slogdet(matrix)[1] + torch.linalg.det(matrix)
        return found


@pytest.mark.parametrize("dim", [0, 1])
def test_factors_kept_for_backward_are_those_that_it_was_captured_for(dim: int):
    torch.manual_seed(1)
    whole = Whole.of(Volumes(), (torch.randn(8, 3),))
    at_rest = {"matrix": (Shard(dim),)}

    ranked = run_ranks(whole, decide(whole.captured.graph, mesh_of(tp=2), at_rest=at_rest, gather="per_phase"))

    require_equal(ranked, whole.run())


@pytest.mark.parametrize("gather", ["per_phase", "once"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "vision", "tied"])
def test_parameters_sharded_at_rest_give_the_whole_programs_results(name: str, mesh: Mesh, gather, wholes):
    whole, want = wholes[name]

    ranked = run_ranks(whole, decide(whole.captured.graph, mesh, zero=True, gather=gather))

    require_equal(ranked, want)


@pytest.mark.parametrize("name", ["mlp", "plain", "vision", "tied", "turned"])
@pytest.mark.parametrize("mesh", [mesh_of(), mesh_of(dp=1, tp=1)], ids=["no axis", "axes of size 1"])
def test_on_one_rank_results_are_equal_bit_for_bit(name: str, mesh: Mesh, wholes):
    whole, want = wholes[name]

    ranked = run_ranks(whole, decide(whole.captured.graph, mesh))

    assert not ranked.issued[0]
    for mine, expected in zip(ranked.results[0], want, strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.equal(mine, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["vision", "tied"])
def test_what_is_reported_as_emitted_is_what_ranks_issue(name: str, seed: int, run_drawn):
    mesh = mesh_of(dp=2, tp=2)

    ranked = run_drawn(name, mesh, seed)

    for programs, issued in zip(ranked.programs, ranked.issued, strict=True):
        assert [(e.op, e.axis, e.bytes) for e in programs.emitted] == [
            (i.op, mesh.axes[i.axis].name, i.bytes) for i in issued
        ]


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_issue_the_same_collectives_in_the_same_order_and_save_the_same(seed: int, run_drawn):
    ranked = run_drawn("tied", mesh_of(dp=2, tp=2), seed)

    first = ranked.programs[0]
    for other in ranked.programs[1:]:
        assert other.emitted == first.emitted
        assert [(s.source, s.index) for s in other.saved] == [(s.source, s.index) for s in first.saved]


def test_no_python_is_written_for_a_program_until_it_is_read(wholes, monkeypatch: pytest.MonkeyPatch):
    captured, written, write = wholes["mlp"][0].captured, [], fx.Graph.python_code

    def counted(graph: fx.Graph, *args: Any, **how: Any) -> Any:
        written.append(graph)
        return write(graph, *args, **how)

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    programs = rewrite(captured.joint, captured.graph, decide(captured.graph, mesh_of(tp=2), zero=True), 0)

    assert written == []
    assert "all_gather_into_tensor" in programs.forward.code
    assert written == [programs.forward.graph]
