"""What collectives of blocks inside rows cost beside what travels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costs.links import Links
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.tensor import TensorMeta
from cost_models import compute
from cost_models.cluster import ClusterSpec

LINKS = Links(ClusterSpec.parse("h100-sxm-80gb:8"), (8,))
ROWS, ROW = TensorMeta((4, 2048, 4096), "bfloat16"), TensorMeta((1, 8192, 4096), "bfloat16")


def way(
    meta: TensorMeta, before: Placement, after: Placement, links: Links = LINKS, order: tuple[int, ...] = ()
) -> tuple[float, float]:
    """Return the seconds of bringing a tensor from one placement to another, and those of them that can be hidden."""
    routes = links.routes(((before,),), ((after,),), meta, order=order)
    return float(routes.price_s[0, 0]), float(routes.hidable_s[0, 0])


@pytest.mark.parametrize(
    ("before", "after", "inside", "outside"),
    [
        (Shard(1), Replicate(), 1.0, 0.0),
        (Partial(), Shard(1), 1.0, 0.0),
        # What is sent lies inside rows of either; what comes, of the one with rows.
        (Shard(1), Shard(2), 2 / 8, 1 / 8),
        (Partial(), Replicate(), 0.0, 0.0),
    ],
    ids=["gather", "scatter", "exchange", "sum"],
)
def test_copies_inside_rows_are_priced_and_hidden_by_nothing(
    before: Placement, after: Placement, inside: float, outside: float
):
    inside_s, hidable_s = way(ROWS, before, after)
    outside_s, also_hidable_s = way(ROW, before, after)

    assert inside_s - outside_s == pytest.approx(copied_s(inside) - copied_s(outside))
    assert hidable_s == pytest.approx(also_hidable_s)


def copied_s(share: float) -> float:
    """Return the seconds to read and write a share of the tensor."""
    return compute.memory_bound_s(2 * share * ROWS.numel * ROWS.item_bytes, LINKS.cluster.device) if share else 0.0


def test_a_transposed_matrix_is_gathered_as_it_lies():
    matrix = TensorMeta((4096, 1024), "bfloat16")

    as_it_lies = way(matrix, Shard(0), Replicate())
    assert way(matrix, Shard(1), Replicate(), order=(1, 0)) == as_it_lies
    assert way(matrix, Shard(1), Replicate())[0] > as_it_lies[0]


def test_software_that_lays_out_tensors_for_its_collectives_copies_nothing():
    others = replace(LINKS, packs=False)

    assert way(ROWS, Shard(1), Replicate(), others) == pytest.approx(way(ROW, Shard(1), Replicate()))


def test_blocks_inside_rows_are_held_once_more_while_they_are_gathered():
    links = Links(ClusterSpec.parse("h100-sxm-80gb:4x2"), (2, 4))
    value, whole = TensorMeta((8, 64, 32), "bfloat16"), (Replicate(), Replicate())
    wanted = (whole, (Shard(1), Replicate()))

    def held(order: tuple[int, ...], *sources: tuple[Placement, Placement]) -> list[list[float]]:
        return links.routes(sources, wanted, value, order=order).gathering_bytes.tolist()

    # Within rows while a rank has a quarter of them; then the first dimension, which comes as it lies.
    assert held((), (Shard(1), Shard(0)), (Shard(0), Replicate())) == [[value.nbytes / 4, 0.0], [0.0, 0.0]]
    assert held((), (Shard(1), Shard(2))) == [[value.nbytes, value.nbytes / 2]]
    # A value that is transposed travels as it lies in memory.
    assert held((), (Shard(1), Replicate())) == [[value.nbytes, 0.0]]
    assert held((1, 0, 2), (Shard(1), Replicate())) == [[0.0, 0.0]]
    assert held((), (Partial(), Replicate())) == [[0.0, 0.0]]
