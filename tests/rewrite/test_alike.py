"""Values that no rank computes alone: whether the parts that micro-batches cut from them are alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from autopar.rewrite.alike import Values, are_alike, has_gathered

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
SAMPLES, RANKS = 8, 2

Steps = tuple[tuple[Callable[..., object], tuple[object, ...]], ...]

REPEATED: Steps = ((_aten.repeat.default, ([SAMPLES, 1],)),)
"""A table of one row for all samples, given to each of them; a collective comes before or after."""

OWN: Steps = ((_aten.exp.default, ()),)
"""A table that has a row a sample."""

SUM: Steps = ((_c10d.all_reduce.default, ("sum", "tp")), (_c10d.wait_tensor.default, ()))
GATHER: Steps = ((_c10d.all_gather_into_tensor.default, (RANKS, "tp")), (_c10d.wait_tensor.default, ()))
SCATTER: Steps = ((_c10d.reduce_scatter_tensor.default, ("sum", RANKS, "tp")), (_c10d.wait_tensor.default, ()))
TURN: Steps = ((_aten.t.default, ()),)


def _nodes(rows: int, steps: Steps, dtype: torch.dtype = torch.float32) -> list[fx.Node]:
    graph = fx.Graph()
    node = graph.placeholder("table")
    node.meta["val"] = torch.zeros(rows, 4, dtype=dtype)
    for target, args in steps:
        node = graph.call_function(target, (node, *args))
    return list(graph.nodes)


def _parts(nodes: list[fx.Node]) -> list[torch.Tensor] | None:
    return Values().parts(nodes[-1], nodes, 0, 2)


@pytest.mark.parametrize(
    "steps",
    [
        REPEATED + SUM,
        OWN + SUM + REPEATED,
        REPEATED + TURN + GATHER + TURN,
        REPEATED + TURN + SCATTER + TURN,
        OWN + TURN + GATHER + TURN + REPEATED,
    ],
)
def test_rows_given_to_all_samples_are_alike_behind_collectives(steps: Steps):
    nodes = _nodes(1, steps)

    parts = _parts(nodes)

    assert parts is not None
    assert parts[0].shape[0] == SAMPLES // 2
    assert are_alike(parts)


@pytest.mark.parametrize("steps", [OWN + SUM, OWN + TURN + GATHER + TURN, OWN + TURN + SCATTER + TURN])
def test_rows_of_samples_differ_behind_collectives(steps: Steps):
    parts = _parts(_nodes(SAMPLES, steps))

    assert parts is not None
    assert not are_alike(parts)


def test_rows_of_other_ranks_are_taken_to_differ_and_said_to_be_of_others():
    nodes = _nodes(1, REPEATED + GATHER)

    parts = _parts(nodes)

    assert parts is not None
    assert not are_alike(parts)
    assert has_gathered(nodes)
    assert not has_gathered(_nodes(1, REPEATED + SUM))


def test_places_of_other_ranks_are_not_guessed():
    assert _parts(_nodes(1, REPEATED + GATHER, torch.int64)) is None
