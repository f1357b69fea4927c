"""Programs of one micro-batch, run for each, against the program of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.api import plan_captured
from autopar.errors import InfeasibleError
from autopar.ir.microbatches import joined, parted, with_time
from autopar.ir.placement import Layout, Partial, Replicate, Shard
from autopar.ir.plan import Decisions
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import Totals, localised
from cost_models.cluster import ClusterSpec
from tests.support.models import cases
from tests.support.routing import Experts, Near, Ranked, routing
from tests.support.whole import Whole

IGNORED = -100


class Weighted(nn.Module):
    """A loss of two terms with normalisers of their own: tokens that are not ignored, and weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)
        self.first = nn.Parameter(torch.ones(1, 1, 6))
        self.register_buffer("weights", torch.tensor([1.0, 3.0, 0.5, 2.0, 1.0]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        last = hidden[:, 0]
        tokens = functional.cross_entropy(logits[:, 1:].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        kind = functional.cross_entropy(self.head(last), kinds, weight=self.weights)
        rest = kind + last.square().mean() + 0.1 * self.head.bias.sum()
        return logits, 1 - sum([2 * tokens, rest])  # sum() begins with 0


def weighted() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    x, labels = torch.randn(8, 4, 6), torch.randint(0, 5, (8, 4))
    labels[:3, 1:] = IGNORED  # the micro-batches count different numbers of tokens
    return Weighted(), (x, labels, torch.randint(0, 4, (8,)))


class Typed(nn.Module):
    """Looks up a table that is the same for all samples, as BERT does for token types that are not given."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ids", torch.arange(6)[None] % 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        ids = self.ids.expand(x.shape[0], -1).gather(1, torch.arange(5).expand(x.shape[0], -1))
        return self.linear(x + self.kinds(ids)).square().mean()


class Beside(nn.Module):
    """A loss of what a model makes, and that beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.inner(*args)
        return made.square().mean(), made.detach()


class Carried(nn.Module):
    """A state that begins as zeros like a part of the batch, and meets parameters before it meets samples."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.onward = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(self.onward(state) + self.into(x[:, step]))
        return state.square().mean()


class Queried(nn.Module):
    """Queries learned once for all samples, through layers that flatten samples and tokens; then they meet samples."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 4))
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)
        self.first = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.then = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.batch_first:
            asked = self.norm(self.queries.expand(x.shape[0], -1, -1))
        else:  # [queries, batch, width], as DETR has them
            asked, x = self.norm(self.queries.unsqueeze(1).repeat(1, x.shape[0], 1)), x.transpose(0, 1)
        asked = asked + self.first(asked, asked, asked, need_weights=False)[0]
        return self.out(asked + self.then(asked, x, x, need_weights=False)[0]).square().mean()


class Matched(nn.Module):
    """Several rows read and written for each sample, samples in pairs side by side, a share of hits, a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the share."""
        made = self.linear(x)
        self.mean.lerp_(made.detach().mean((0, 1)), 0.9)
        samples = torch.arange(x.shape[0]).unsqueeze(1).expand_as(places)
        classes = torch.full(x.shape[:2], 3)
        classes[samples, places] = places % 2
        score = made[samples, places].square().mean((1, 2))
        counts = places > 0
        hits = ((made.argmax(-1) == classes)[samples, places] & counts).sum() / counts.sum()
        pairs = functional.softplus(score[1::2] - score[::2]).mean()
        return pairs + functional.cross_entropy(made.transpose(1, 2), classes), hits


def matched() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    return Matched(), (torch.randn(8, 5, 4), torch.stack([torch.randperm(5)[:3] for _ in range(8)]))


class Second(nn.Module):
    """Samples in dimension 1 behind steps, or merged with them, times weights that nobody gives."""

    def __init__(self, weights: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights()
        h = self.linear(x).transpose(0, 1)
        return ((h if weights.dim() == 3 else h.flatten(0, 1)) * weights).square().mean()


SAMPLES = {
    "samples": lambda: torch.arange(8.0).exp().view(1, 8, 1),
    "steps and samples": lambda: torch.arange(24.0).view(3, 8, 1).sin(),
    "steps and samples in one": lambda: torch.arange(24.0).sin()[:, None],
}
STEPS = {
    "steps": lambda: torch.arange(3.0).exp().view(3, 1, 1).repeat(1, 8, 1),
    "steps in one": lambda: torch.arange(3.0).exp()[:, None].repeat(1, 8).view(24, 1),
}


class Penalised(nn.Module):
    """Terms of the loss, and of gradients, that come of no sample: a penalty, and the bias of a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.linear(x).tanh()).mean() + self.linear.weight.square().sum() + self.scale.square()


class Messages(nn.Module):
    """A graph for each sample: what its edges carry is added up where they end, all samples' points in a row."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.bounded = bounded
        self.carried, self.read = nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        samples, points, _ = x.shape
        begins = (torch.arange(samples) * points)[:, None]
        ends = edges % points if self.bounded else edges
        start, end = ((ends[:, side] + begins).flatten() for side in range(2))
        rows = x.flatten(0, 1)
        for _ in range(2):
            sent = self.carried(torch.cat([rows.index_select(0, start), rows[end]], 1)).tanh()
            rows = rows + torch.zeros_like(rows).index_add(0, end, sent, alpha=0.5)
        return self.read(rows.view(samples, points, -1).square().mean(1)).square().mean()


def messages(bounded: bool = True) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    return Messages(bounded), (torch.randn(8, 5, 4), torch.randint(5, (8, 2, 6)))


class Solved(nn.Module):
    """Samples are right-hand sides of systems that all share: in columns, in rows, of factors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.matrix = nn.Linear(4, 4), nn.Parameter(0.1 * torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        system = torch.eye(4) + self.matrix
        x = torch.linalg.solve(system, self.first(x).T).T
        x = torch.linalg.solve(system, x.tanh(), left=False)
        x = torch.linalg.lu_solve(*torch.linalg.lu_factor(system), x.T).T
        return torch.cholesky_solve(x.T, torch.linalg.cholesky(system @ system.T)).square().sum(0).mean()


def models() -> dict[str, Any]:
    typed = (Typed(), (torch.randn(8, 5, 4),))
    plain, example = cases()["plain"]
    return {
        **{name: cases()[name] for name in ("mlp", "tied")},
        "plain": (Beside(plain), example),
        "weighted": weighted(),
        "typed": typed,
        "carried": (Carried(), (torch.randn(8, 3, 4),)),
        **{name: (Second(weights), (torch.randn(8, 3, 4),)) for name, weights in STEPS.items()},
        "penalised": (Penalised(), (torch.randn(8, 4),)),
        "queried": (Queried(True), (torch.randn(8, 5, 4),)),
        "matched": matched(),
        "messages": messages(),
        "solved": (Solved(), (torch.randn(8, 4),)),
        "queried_second": (Queried(False), (torch.randn(8, 5, 4),)),
        **routing(),
    }


@cache
def step_of(name: str) -> tuple[Whole, list[torch.Tensor | None]]:
    """Return a model's whole program and what it computes."""
    whole = Whole.of(*models()[name])
    return whole, whole.run()


def programs(model: nn.Module, example: Any, count: int) -> tuple[torch.fx.GraphModule, tuple[Totals, ...], Decisions]:
    """Return the program of one of `count` micro-batches of a model."""
    return one_of(Whole.of(model, example), count)


def one_of(whole: Whole, count: int) -> tuple[torch.fx.GraphModule, tuple[Totals, ...], Decisions]:
    """Return the program of one of `count` micro-batches, what is summed first, and the decisions."""
    captured = whole.captured
    options = PlanOptions.parse(fix={"microbatch": captured.graph.batch_size // count})
    plan = plan_captured(captured, "model", ClusterSpec.parse("cpu:1"), options, Silent())
    assert plan.workload.num_microbatches == count
    return *localised(captured.joint, captured.graph, plan.decisions, 0), plan.decisions


def parts(whole: Whole, gm: torch.fx.GraphModule, number: int, count: int) -> dict[str, torch.Tensor]:
    """Return the values of the micro-batch's placeholders: its share of what is split along the batch."""
    found = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in whole.values:
            value = whole.values[node.name]
            small = tuple(node.meta["val"].shape)
            found[node.name] = value if tuple(value.shape) == small else value.chunk(count)[number]
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(models()))
def test_micro_batches_add_up_to_the_step(name: str, count: int):
    whole, want = step_of(name)
    gm, totals, decisions = one_of(whole, count)

    given = [parts(whole, gm, number, count) for number in range(count)]
    sums: dict[str, torch.Tensor] = {}
    for turn in totals:
        terms = [turn.program(*[{**each, **sums}[name] for name in turn.takes]) for each in given]
        sums |= {name: sum(term[i] for term in terms) for i, name in enumerate(turn.names)}
    order = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    made = [gm(*[{**each, **sums}[name] for name in order]) for each in given]

    for place, output in enumerate(whole.captured.graph.outputs):
        if output.ref is None:
            continue
        in_time = decisions.outputs_in_time[output.name] if output.kind == "output" else Partial()
        values = [each[place] for each in made]
        got = torch.cat(values) if isinstance(in_time, Shard) else sum(values)
        torch.testing.assert_close(got, want[place], rtol=1e-5, atol=1e-6)


class Rows(nn.Module):
    """Reads a row of a flat table for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rows", torch.arange(32.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.rows.view(8, 4).exp()).square().mean()


class Positions(nn.Module):
    """Reads a row of a table for each sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("rows", torch.arange(32.0).reshape(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.rows).square().mean()


@pytest.mark.parametrize("model", [Positions(), Rows()])
def test_a_table_with_a_row_a_sample_is_refused(model: nn.Module):
    with pytest.raises(InfeasibleError, match="differs from micro-batch to micro-batch and comes from"):
        programs(model, (torch.randn(8, 4),), 2)


@pytest.mark.parametrize("name", SAMPLES)
def test_weights_that_differ_from_sample_to_sample_are_refused_wherever_samples_are(name: str):
    with pytest.raises(InfeasibleError, match="needs all samples|differs from micro-batch"):
        programs(Second(SAMPLES[name]), (torch.randn(8, 3, 4),), 2)


class Tabled(nn.Module):
    """Features times a table that nobody trains, which has a row a sample once it is laid out."""

    def __init__(self, laid: Callable[[torch.Tensor], torch.Tensor], table: torch.Tensor, trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.laid = laid
        self.table = nn.Parameter(table, requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.laid(self.table)).square().mean()


LAID: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "as it is": (lambda table: table, (8, 4)),
    "transposed": (lambda table: table.t(), (4, 8)),
    "behind another dimension": (lambda table: table.exp(), (1, 8, 4)),
    "times a matrix": (lambda table: table @ torch.ones(4, 4), (8, 4)),
    "in one": (lambda table: table.view(8, 4), (32,)),
}


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", LAID)
def test_a_parameter_with_a_row_a_sample_is_refused(name: str, trained: bool):
    laid, shape = LAID[name]

    with pytest.raises(InfeasibleError, match="has a row for each sample|comes from table|comes from view"):
        programs(Tabled(laid, torch.randn(shape), trained), (torch.randn(8, 4),), 2)


@pytest.mark.parametrize(
    "how",
    ["neighbours", "beside", "numbers", "positions", "table", "diagonal", "first", "returned", "halves", "swapped"],
)
def test_rows_and_places_of_the_whole_batch_are_refused(how: str):
    with pytest.raises(InfeasibleError, match="needs all samples|differs from micro-batch"):
        programs(Ranked(how), (torch.randn(8, 4),), 2)


def test_an_input_with_samples_in_another_dimension_is_named():
    class Remembering(nn.Linear):
        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat([memory[0], x], 1)).square().mean()

    with pytest.raises(InfeasibleError, match="comes from memory .an input whose first dimension is not the batch"):
        programs(Remembering(4, 4), (torch.randn(8, 3, 4), torch.randn(2, 8, 1, 4)), 2)


def test_places_that_may_be_other_samples_are_refused_with_what_would_show_that_they_are_not():
    with pytest.raises(InfeasibleError, match=r"index_select.* needs all samples .* \(places % rows\) \+ begins"):
        programs(*messages(bounded=False), 2)


def test_places_beyond_the_rows_of_a_sample_are_refused():
    with pytest.raises(InfeasibleError, match="needs all samples|differs from micro-batch"):
        programs(Near(far=True), (torch.randn(8, 5, 4),), 2)


class SelfTaught(nn.Module):
    """Learns what it finds likely itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        made = self.linear(x)
        return functional.cross_entropy(made, made.argmax(-1))


def test_a_mean_over_targets_that_the_model_makes_is_refused_with_ways_out():
    with pytest.raises(InfeasibleError, match="mean over targets that the model makes itself"):
        programs(SelfTaught(), (torch.randn(8, 4),), 2)


def test_a_loss_that_balances_experts_over_the_whole_batch_is_refused():
    with pytest.raises(InfeasibleError, match="needs all samples of a step at once"):
        programs(Experts(balance=0.1), (torch.randn(8, 3, 8),), 2)


@pytest.mark.parametrize(
    ("time", "inside"),
    [
        (Shard(0), (Shard(0), Shard(0, outer=2))),
        (Shard(0), (Replicate(), Shard(1))),
        (Replicate(), (Shard(0), Partial())),
        (Partial(), (Replicate(), Shard(0))),
        (Shard(0, outer=16), (Shard(0, outer=2), Shard(0, outer=32))),
        (Shard(0, outer=16), (Shard(0), Shard(0, outer=16))),
    ],
)
def test_layouts_are_parted_as_they_were_joined(time, inside: Layout):
    whole = joined(time, inside, 4)

    assert parted(whole, 4) == (time, inside)


def test_a_split_of_the_sequence_is_outside_of_samples_that_follow_it():
    # [sequence, batch] merged: 16 steps of 12 samples, 3 of them at a time, and the steps over two ranks.
    assert joined(Shard(0, outer=16), (Shard(0),), 4) == (Shard(0, outer=16), Shard(0))
    assert joined(Shard(0, outer=16), (Shard(0, outer=16),), 4) == (Shard(0, outer=16), Shard(0, outer=64))


def test_decisions_of_one_micro_batch_stay_as_they_are():
    model, example = cases()["mlp"]
    decisions = autopar.plan(model, "cpu:1", example_inputs=example).decisions

    assert with_time(decisions) is decisions
