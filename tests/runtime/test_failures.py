"""Collectives that fail are told by the plan's names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import fx

import autopar
from autopar.runtime.backend_words import plainly
from autopar.runtime.executable import compile_graph
from autopar.runtime.failures import told
from tests.support.compiling import compile_with
from tests.support.decide import mesh_of
from tests.support.models import cases
from tests.support.ranks import RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def leave_before_backward(rank: int) -> None:
    model, example = cases()["mlp"]
    mine = compile_with(model, example, mesh_of(dp_shard=2))
    loss = mine(*example)[1]
    if rank == 1:
        import os

        os._exit(1)
    loss.backward()


def test_a_rank_that_dies_fails_the_others_in_a_collective_that_is_named(pool: RankPool):
    first, second = pool.run(leave_before_backward, may_die=True)

    assert second.kind == "died"
    assert first.kind == "CollectiveError"
    assert "rank 0: the collective 'all_gather " in first.error
    assert "@dp_shard backward' with rank 1 failed: " in first.error


def leave_in_a_stage(rank: int) -> None:
    model, example = cases()["mlp"]
    mine = autopar.compile(model, "cpu:2", example_inputs=example, fix={"tp": 2, "microbatch": 4})
    mine(*example)
    if rank == 1:
        import os

        (bound,) = mine.__dict__["_autopar"]._known[True, True]
        bound._ways[True].stages[0].run = lambda *_: os._exit(1)
    mine(*example)


def test_a_rank_that_dies_in_a_stage_is_named_by_those_it_shares_the_stage_with(pool: RankPool):
    first, second = pool.run(leave_in_a_stage, may_die=True)

    assert second.kind == "died"
    assert first.kind == "CollectiveError"
    assert re.match(r"CollectiveError: rank 0: the collective '.* @tp .*' with rank 1 failed: ", first.error)


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError("Timed out waiting 60000ms"),
            "rank 3: the collective 'all_reduce w @dp backward' failed: nothing came for 60 s",
        ),
        (
            RuntimeError("Backend mpi does not support alltoall"),
            "the backend 'mpi' has no all_reduce, which the collective",
        ),
    ],
)
def test_the_failing_line_names_the_collective(error: Exception, text: str):
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(failing, (x,))
    start.meta["collective"] = "all_reduce w @dp backward"
    graph.output((start,))
    program = compile_graph(fx.GraphModule({}, graph), {}, boxed=True)

    with pytest.raises(RuntimeError) as caught:
        program([error])

    assert str(told(caught.value, program, 3, "mpi")).startswith(text)


def test_an_operator_that_fails_is_not_called_a_collective():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, x)),))
    program = compile_graph(fx.GraphModule({}, graph), {}, boxed=False)

    with pytest.raises(RuntimeError) as caught:
        program(torch.ones(2, 3))

    assert told(caught.value, program, 0, "gloo") is None


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (f"{GLOO}Connection closed by peer [127.0.0.1]:37598. This is typically caused by", "its connection closed"),
        (f"{GLOO}Timed out waiting 1800000ms for recv operation to complete", "nothing came for 1800 s"),
        ("NCCL communicator was aborted on rank 1.\nmore", "NCCL communicator was aborted on rank 1"),
        ("", "no message"),
    ],
)
def test_a_backends_words_are_told_plainly(cause: str, words: str):
    assert plainly(cause) == words
