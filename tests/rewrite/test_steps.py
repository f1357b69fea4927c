"""Reshard steps as collectives, on all ranks at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn

from autopar.costs.packing import packing
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Replicate, Shard, is_valid, local_shape, short
from autopar.ir.reshard import Step, is_reachable, route
from autopar.rewrite.marks import Mark
from autopar.rewrite.steps import Writer
from tests.support import lockstep
from tests.support.decide import mesh_of
from tests.support.whole import filled, part

MESHES = [
    (mesh_of(tp=2), (8,)),
    (mesh_of(tp=2), (4, 6)),
    (mesh_of(dp=2, tp=2), (8, 4)),
    (mesh_of(dp=2, tp=2), (16,)),
    (mesh_of(dp=4, tp=2), (16, 8)),
    (mesh_of(a=2, b=2, c=2), (8, 2, 4)),
]


def layouts(shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """Return every valid layout, digits of every dimension included."""
    options = [Replicate(), Partial(), *(Shard(d, o) for d, n in enumerate(shape) for o in (1, 2, 4, 8) if o < n)]
    return [each for each in itertools.product(options, repeat=len(mesh.axes)) if is_valid(shape, each, mesh.sizes)]


def moved(whole: torch.Tensor, before: Layout, after: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Return what each rank holds after the steps from one layout to the other; padding holds nothing of use before."""
    shape = tuple(whole.shape)
    programs = []
    for rank in range(mesh.world_size):
        graph = fx.Graph()
        writer = Writer(graph, mesh, mesh.coordinate(rank))
        value = graph.placeholder("x")
        for step in route(before, after, shape, mesh.sizes):
            value = writer.step(value, step, shape, Mark("x", "forward"))
        graph.output((value,))
        programs.append(fx.GraphModule(nn.Module(), graph))
    room = local_shape(shape, before, mesh.sizes)
    given = [[filled(part(whole, before, mesh, rank), room)] for rank in range(mesh.world_size)]
    return [made[0] for made in lockstep.run(programs, given, mesh)]


def total(made: list[torch.Tensor], layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the sum of the terms that the ranks beside `rank` hold."""
    at = mesh.coordinate(rank)
    beside = [
        other
        for other in range(mesh.world_size)
        if all(isinstance(p, Partial) or a == b for p, a, b in zip(layout, at, mesh.coordinate(other), strict=True))
    ]
    return torch.stack([made[other] for other in beside]).sum(0)


@pytest.mark.parametrize(("mesh", "shape"), MESHES, ids=[f"{mesh} {list(shape)}" for mesh, shape in MESHES])
def test_every_route_between_layouts_gives_each_rank_its_part(mesh: Mesh, shape: tuple[int, ...]):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
    found = layouts(shape, mesh)
    pairs = [(a, b) for a in found for b in found if is_reachable(a, b)]
    chosen = random.Random(0).sample(pairs, min(len(pairs), 120))

    for before, after in chosen:
        made = moved(whole, before, after, mesh)

        plain = tuple(Replicate() if isinstance(p, Partial) else p for p in after)
        for rank in range(mesh.world_size):
            name = f"{[*map(short, before)]} -> {[*map(short, after)]} on rank {rank}"
            assert torch.equal(total(made, after, mesh, rank), part(whole, plain, mesh, rank)), name


PADDED = [
    (mesh_of(dp=3), (7,)),
    (mesh_of(dp=3), (4, 5)),
    (mesh_of(dp=4), (9, 2)),
    (mesh_of(tp=2, dp=3), (14, 8)),
    (mesh_of(dp=3, tp=2), (8, 10)),
]


def is_cut(layout: Layout, sizes: Sequence[int]) -> bool:
    """Return whether axes split each dimension one inside the other, from the outside on."""
    digits = sorted((p.dim, p.outer, size) for p, size in zip(layout, sizes, strict=True) if isinstance(p, Shard))
    taken: dict[int, int] = {}
    for dim, outer, size in digits:
        if outer != taken.get(dim, 1):
            return False
        taken[dim] = outer * size
    return True


def chunk(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return what a rank holds as torch cuts it: outer digits first, the last pieces shorter or empty."""
    shards = [
        (p, n, i) for p, n, i in zip(layout, mesh.sizes, mesh.coordinate(rank), strict=True) if isinstance(p, Shard)
    ]
    for placement, size, at in sorted(shards, key=lambda each: each[0].outer):
        pieces = whole.chunk(size, placement.dim)
        whole = pieces[at] if at < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


@pytest.mark.parametrize(("mesh", "shape"), PADDED, ids=[f"{mesh} {list(shape)}" for mesh, shape in PADDED])
def test_every_route_from_and_to_padded_parts_gives_each_rank_what_torch_cuts(mesh: Mesh, shape: tuple[int, ...]):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
    options = [Replicate(), Partial(), *(Shard(d, o) for d in range(len(shape)) for o in (1, 2))]
    every = [each for each in itertools.product(options, repeat=len(mesh.axes)) if is_cut(each, mesh.sizes)]
    found = [each for each in every if is_valid(shape, each, mesh.sizes, padded=True)]
    uneven = [each for each in found if not is_valid(shape, each, mesh.sizes)]
    pairs = [(a, b) for a in found for b in found if (a in uneven or b in uneven) and is_reachable(a, b)]
    assert pairs

    for before, after in random.Random(0).sample(pairs, min(len(pairs), 60)):
        made = moved(whole, before, after, mesh)

        plain = tuple(Replicate() if isinstance(p, Partial) else p for p in after)
        for rank in range(mesh.world_size):
            name = f"{[*map(short, before)]} -> {[*map(short, after)]} on rank {rank}"
            assert made[rank].shape == local_shape(shape, after, mesh.sizes), name
            own = chunk(whole, plain, mesh, rank)
            held = total(made, after, mesh, rank)
            for dim, length in enumerate(own.shape):
                held = held.narrow(dim, 0, length)
            assert torch.equal(held, own), name


@pytest.mark.parametrize("reduce", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("after", [(Replicate(),), (Shard(0),), (Shard(1),)], ids=["R", "S0", "S1"])
def test_terms_are_reduced_as_their_placement_says(reduce: str, after: Layout):
    mesh, shape = mesh_of(tp=2), (4, 6)
    terms = [torch.randn(shape), torch.randn(shape)]
    programs = []
    for rank in range(2):
        graph = fx.Graph()
        value = graph.placeholder("x")
        for step in route((Partial(reduce),), after, shape, (2,)):
            value = Writer(graph, mesh, (rank,)).step(value, step, shape, Mark("x", "forward"))
        graph.output((value,))
        programs.append(fx.GraphModule(nn.Module(), graph))

    made = lockstep.run(programs, [[t] for t in terms], mesh)

    stacked = torch.stack(terms)
    whole = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[reduce]
    for rank in range(2):
        torch.testing.assert_close(made[rank][0], part(whole, after, mesh, rank))


class Copied(fx.Interpreter):
    """Runs one rank's program on a tensor and counts the elements that end in other memory than they came from."""

    def __init__(self, program: fx.GraphModule, size: int):
        super().__init__(program)
        self.size, self.numel = size, 0

    def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        name = str(target)
        if "wait_tensor" in name:
            return args[0]
        if "all_gather" in name:
            return torch.cat([args[0]] * self.size)
        if "reduce_scatter" in name:
            return args[0].tensor_split(self.size)[0].clone()
        if name.startswith("_c10d_functional"):
            return args[0].clone()
        made = super().call_function(target, args, kwargs)
        if made.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            self.numel += made.numel()
        return made


def copied(step: Step, shape: tuple[int, ...], mesh: Mesh, order: tuple[int, ...]) -> int:
    """Return the elements that the last rank copies beside what a step's collective moves."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    room = local_shape(shape, step.before, mesh.sizes)
    given = torch.zeros(room)
    if order:
        value = graph.call_function(torch.ops.aten.permute.default, (value, list(order)))
        given = given.permute([order.index(dim) for dim in range(len(order))]).contiguous()
    writer = Writer(graph, mesh, mesh.coordinate(mesh.world_size - 1))
    graph.output(writer.step(value, step, shape, Mark("x", "forward")))
    program = Copied(fx.GraphModule(nn.Module(), graph), mesh.sizes[step.axis])
    program.run(given)
    return program.numel


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (mesh_of(tp=2), (16, 12)),
        (mesh_of(dp=2, tp=2), (48,)),
        (mesh_of(dp=2, tp=2), (16, 24)),
        (mesh_of(dp=4, tp=2), (32, 32)),
        (mesh_of(tp=2), (1, 8, 12)),
        (mesh_of(tp=2), (8, 12, 8)),
        (mesh_of(dp=2, tp=2), (2, 8, 12)),
        (mesh_of(dp=3), (8, 10)),
        (mesh_of(dp=3), (10, 8, 7)),
        (mesh_of(tp=2, dp=3), (14, 16)),
    ],
    ids=str,
)
def test_what_is_priced_as_copied_is_what_steps_copy(mesh: Mesh, shape: tuple[int, ...]):
    options = [Replicate(), Partial(), *(Shard(d, o) for d, n in enumerate(shape) for o in (1, 2) if o < n)]
    every = itertools.product(options, repeat=len(mesh.axes))
    found = [each for each in every if is_valid(shape, each, mesh.sizes, padded=is_cut(each, mesh.sizes))]
    pairs = [(a, b) for a in found for b in found if is_reachable(a, b)]
    orders = [(), *list(itertools.permutations(range(len(shape))))[1:]]
    kinds = set()

    for before, after in random.Random(0).sample(pairs, min(len(pairs), 80)):
        for step in route(before, after, shape, mesh.sizes):
            for order in orders if step.communicates else ():
                priced = packing(step, shape, mesh.sizes, order).numel
                kinds.add((step.kind, priced > 0))
                name = f"{step.kind} {[*map(short, step.before)]} -> {[*map(short, step.after)]}, memory {order}"
                assert priced == copied(step, shape, mesh, order), name

    assert {copies for _, copies in kinds} == {False, True} or len(shape) == 1
