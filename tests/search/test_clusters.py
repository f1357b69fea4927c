"""Which operators follow their producer, and which decide for themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

import autopar
from autopar.api.solving import Solving
from autopar.api.wishes import read_wishes
from autopar.capture.recompute import SUFFIX, blocks_of, recomputed_graph
from autopar.costs.clusters import build
from autopar.ir.graph import Graph
from autopar.ir.placement import Shard
from autopar.ir.plan import Plan
from autopar.models.zoo.llama import LlamaSettings
from autopar.options import PlanOptions
from autopar.search.meshes import MeshAxis
from autopar.search.trials import Recompute, Trial
from tests.support.remembering import remembered
from tests.support.two_hosts import cluster

MESH = (MeshAxis("dp_shard", 2),)


class Residual(nn.Module):
    """Equal residual blocks, and a loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def clustered(graph: Graph, recompute: Recompute = "none") -> list[list[str]]:
    """Return the members of each cluster of a program whose parameters two ranks share."""
    solving = Solving(graph, cluster(1 << 30), PlanOptions.parse())
    trial = Trial(MESH, 1, recompute)
    clusters, _ = build(
        solving.graph(recompute, read_wishes(solving.options)), solving.choices(trial, read_wishes(solving.options))
    )
    return [each.members for each in clusters]


def bytes_of(graph: Graph, name: str) -> int:
    return sum(meta.nbytes for meta in graph.by_name[name].outputs if meta is not None)


def planned(settings: LlamaSettings, on: str, batch: int, **fix: Any) -> Plan:
    with torch.device("meta"):
        model, inputs = settings.model(), settings.inputs(batch, settings.sequence)
    return autopar.plan(model, on, example_inputs=inputs, fix=fix, precision="bf16")


def test_a_follower_as_large_as_what_others_read_decides_for_itself():
    graph = remembered(Residual(1), (torch.empty(8, 32),)).graph
    alone = {name for name, users in graph.users.items() if len(users) == 1}
    followers = [(first, each) for first, *others in clustered(graph) for each in others]

    assert followers
    for leader, follower in followers:
        read = {graph.representative(ref.op) for ref in graph.by_name[follower].refs}
        calls = {name for name in read if graph.by_name[name].kind == "call"}
        assert calls <= alone or bytes_of(graph, follower) < max(bytes_of(graph, name) for name in calls), leader


def test_what_only_some_layers_run_again_follows_their_parameters():
    """Or it could not read what was gathered for another view, as where all run again."""
    graph = remembered(Residual(6), (torch.empty(8, 32),)).graph
    some = tuple((path, "full") for path in blocks_of(graph)[:2])
    program = recomputed_graph(graph, dict(some))
    again = {
        program.representative(op.name)
        for op in program.ops
        if op.name.endswith(SUFFIX) and len(op.refs) == 1 and program.by_name[op.refs[0].op].kind == "parameter"
    }
    led = {
        name
        for first, *others in clustered(graph, some)
        if program.by_name[first].kind == "parameter"
        for name in others
    }

    assert again
    assert again <= led


def test_a_gradient_is_gathered_once_for_both_products_that_read_it():
    plan = planned(LlamaSettings(2, 2048, 16, 16, 8192, vocab=1024, sequence=2048), "h100-sxm-80gb:8", 8, tp=8)
    gathered = Counter(
        (each.tensor.partition(" ")[2], each.bytes)
        for each in plan.decisions.collectives
        if each.op == "all_gather" and each.phase == "backward"
    )

    assert gathered["(layers.0.mlp.down)", 8 * 2048 * 2048 * 2] == 1


def test_tokens_go_to_experts_and_back_once_in_forward_and_once_in_backward():
    plan = planned(LlamaSettings(2, 64, 4, 4, 128, vocab=64, sequence=16, experts=4), "cpu:4", 8, ep=4, pp=1)
    exchanges = Counter(
        each.phase for each in plan.decisions.collectives if each.op == "all_to_all" for _ in range(each.count)
    )

    assert exchanges == {"forward": 2 * 2, "backward": 2 * 2}


class Squashed(nn.Module):
    """A product with a matrix that is computed from a parameter, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.free.tanh()).square().mean()


def test_what_is_computed_from_a_parameter_is_moved_at_its_price_however_that_is_gathered():
    """It is decided with the parameter, is none, and no gather of a parameter pays for it."""
    options = PlanOptions.parse()
    solving = Solving(remembered(Squashed(), (torch.randn(8, 64),)).graph, cluster(1 << 30), options)
    _, pricing = solving.price(Trial((MeshAxis("free", 2),)), read_wishes(options))
    (moved,) = (group for group in pricing.table.groups if group.name == "tanh.0.both")
    assert {"tanh"} < {*pricing.clusters[moved.source].members}
    ways = pricing.clusters[moved.source].once
    made = [pricing.clusters[moved.source].strategy("tanh", at).outputs[0] for at in range(len(ways))]

    prices = {
        (layout, kept): moved.price_s[at].tolist() for layout, kept, at in zip(made, ways, moved.layout, strict=True)
    }

    split = {layout for layout, kept in prices if kept}
    assert split
    assert all(prices[layout, True] == prices[layout, False] for layout in split)
    assert all(sum(price == 0.0 for price in prices[layout, False]) == 1 for layout in split)


class Rounded(nn.Module):
    """A product with inputs that are cast first, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.bfloat16().float()).square().mean()


def test_what_is_computed_from_an_input_need_not_be_whole_because_that_is():
    """Every rank has the batch whole: that each casts all of it, where a part would do, is no way to save a slice."""
    options = PlanOptions.parse()
    solving = Solving(remembered(Rounded(), (torch.randn(8, 64),)).graph, cluster(1 << 30), options)
    wishes = read_wishes(options)
    clusters, home = build(solving.graph("none", wishes), solving.choices(Trial((MeshAxis("free", 2),)), wishes))
    cast = clusters[home["_to_copy"]]

    made = {cast.strategy("_to_copy", at).outputs[0] for at in range(len(cast.options))}

    assert (Shard(0),) in made
