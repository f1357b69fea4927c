"""One operator on every rank of a small mesh, against the same operator on the whole tensors."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.costs.links import inner_bytes
from autopar.ir.graph import Arg, Const, Op, Ref
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Layout, Partial, Shard, is_valid, nest
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta
from autopar.rewrite.localise import localise
from autopar.rewrite.lowerings import lowering_of
from autopar.rewrite.random_ops import step_seed
from autopar.rewrite.site import Site
from autopar.strategies import axis_strategies, fits_mesh
from autopar.strategies.call import overload
from tests.support.lockstep import Issued, run


@dataclass(frozen=True)
class Case:
    """A call of an operator with real tensors."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes_only: bool = False
    """Whether the values mean nothing (`empty`)."""

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors read, in `Op.refs` order."""
        return [each for each in _flat((*self.args, *self.kwargs.values())) if isinstance(each, torch.Tensor)]

    @cached_property
    def whole(self) -> tuple[torch.Tensor | None, ...]:
        """Return what the operator gives for the whole tensors."""
        with step_seed(0):
            made = overload(self.target)(*self.args, **self.kwargs)
        results = made if isinstance(made, tuple | list) else (made,)
        return tuple(each if isinstance(each, torch.Tensor) else None for each in results)

    @cached_property
    def op(self) -> Op:
        """Return the call as the IR's operator, reading `t0`, `t1`..."""
        names = (Ref(f"t{i}") for i in itertools.count())
        outputs = list(self.whole)
        if "backward" in self.target:
            # Kernels give tensors for gradients that were not asked for; programs say None.
            mask = next((a for a in self.args if isinstance(a, list) and a and isinstance(a[0], bool)), None)
            outputs = [out if mask is None or i >= len(mask) or mask[i] else None for i, out in enumerate(outputs)]
        return Op(
            name="op",
            kind="call",
            target=self.target,
            args=tuple(_arg(each, names) for each in self.args),
            kwargs=tuple((key, _arg(value, names)) for key, value in self.kwargs.items()),
            outputs=tuple(None if each is None else _meta(each) for each in outputs),
        )

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        """Return the metas of the tensors read."""
        return tuple(map(_meta, self.tensors))

    def strategies(self, size: int) -> tuple[Strategy, ...]:
        """Return the operator's strategies along an axis, strided ones included."""
        return axis_strategies(self.op, self.metas, size, strided(self.metas), strided(self.op.outputs)).strategies

    def id(self, strategy: object) -> str:
        """Return how to name the case with a strategy."""
        shapes = " ".join("x".join(map(str, t.shape)) or "." for t in self.tensors)
        return f"{self.target}: {strategy} [{shapes}]"


def strided(metas: Sequence[TensorMeta | None]) -> tuple[frozenset[Shard], ...]:
    """Return, for each tensor, every shard of two or three runs that divides it."""
    return tuple(
        frozenset(
            Shard(dim, outer)
            for dim, extent in enumerate(meta.shape if meta else ())
            for outer in (2, 3, 4)
            if extent and extent % (outer * 2) == 0
        )
        for meta in metas
    )


def on_mesh(case: Case, strategies: Sequence[Strategy], sizes: tuple[int, ...]) -> MeshStrategy | None:
    """Return the strategies of several axes together; `None` where a shape does not divide by all."""
    metas, outputs = case.metas, case.op.outputs
    ins = tuple(nest(tuple(s.inputs[i] for s in strategies), sizes) for i in range(len(metas)))
    outs = tuple(
        None if meta is None else nest(tuple(s.outputs[i] for s in strategies), sizes)  # type: ignore[misc]
        for i, meta in enumerate(outputs)
    )
    pairs = (*zip(metas, ins, strict=True), *zip(outputs, outs, strict=True))
    valid = all(meta is None or layout is None or is_valid(meta.shape, layout, sizes) for meta, layout in pairs)
    strategy = MeshStrategy(tuple(strategies), ins, outs)
    return strategy if valid and fits_mesh(case.op, metas, strategy, sizes) else None


def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    """Return a mesh whose axes are named out of alphabetical order."""
    return Mesh(tuple(Axis(name, size) for name, size in zip(("tp", "dp", "ep"), sizes, strict=False)))


def part(value: torch.Tensor, layout: Layout, sizes: Sequence[int], at: Sequence[int]) -> torch.Tensor:
    """Return what the rank at `at` holds of a whole value; axes that are no shard hold all of it."""
    digits = [
        (placement.outer, size, index, placement.dim)
        for placement, size, index in zip(layout, sizes, at, strict=True)
        if isinstance(placement, Shard)
    ]
    for outer, size, index, dim in sorted(digits, reverse=True):
        shape = value.shape
        block = shape[dim] // (outer * size)
        runs = value.reshape(*shape[:dim], outer, size, block, *shape[dim + 1 :])
        value = runs.select(dim + 1, index).reshape(*shape[:dim], outer * block, *shape[dim + 1 :])
    return value.contiguous()


def terms(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return tensors that add up to `value`."""
    generator = torch.Generator().manual_seed(value.numel() + count)
    if value.is_floating_point() or value.is_complex():
        # Terms as large as what they add up to: larger ones would cancel, and hide it by their rounding. Those of what
        # masks with the least number, which some models have in float32, would overflow.
        size = value.abs()
        size = torch.where((size > 0) & (size < 1e30), size, torch.ones_like(size))
        rest = [size * torch.randn(value.shape, dtype=value.dtype, generator=generator) for _ in range(count - 1)]
    else:
        rest = [torch.randint(-3, 3, value.shape, generator=generator).to(value.dtype) for _ in range(count - 1)]
    return [*rest, value - sum(rest)]


def distribute(value: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Return each rank's local tensor of a whole value in a layout."""
    held: dict[tuple[int, ...], torch.Tensor] = {(): value}
    for placement, size in zip(layout, mesh.sizes, strict=True):
        held = {
            (*at, i): each
            for at, now in held.items()
            for i, each in enumerate(terms(now, size) if isinstance(placement, Partial) else [now] * size)
        }
    return [part(held[at], layout, mesh.sizes, at) for at in map(mesh.coordinate, range(mesh.world_size))]


def program(case: Case, strategy: MeshStrategy, mesh: Mesh, rank: int) -> fx.Graph:
    """Return one rank's graph: the operator on local shapes, or its lowering."""
    graph = fx.Graph()
    nodes = iter([graph.placeholder(f"t{i}") for i in range(len(case.tensors))])

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(nodes)
        return [put(each) for each in value] if isinstance(value, list | tuple) else value

    args = tuple(put(each) for each in case.args)
    kwargs = {key: put(value) for key, value in case.kwargs.items()}
    args, kwargs = localise(case.op, args, kwargs, strategy, mesh)
    site = Site(graph, case.op, args, kwargs, strategy, mesh, mesh.coordinate(rank), case.metas)
    if any(site.tags):
        made: Any = lowering_of(case.target)(site)
    else:
        made = site.call(overload(case.target), *args, **kwargs)
        if len(case.whole) > 1 or isinstance(overload(case.target)(*case.args, **case.kwargs), list | tuple):
            made = tuple(site.call(operator.getitem, made, i) for i in range(len(case.whole)))
    graph.output(made if isinstance(made, tuple) else (made,))
    graph.lint()
    return graph


def check(case: Case, strategy: MeshStrategy, mesh: Mesh) -> None:
    """Raise unless every rank makes its part of the whole, with the collectives that the strategy declares."""
    ranks = range(mesh.world_size)
    given = [distribute(t, layout, mesh) for t, layout in zip(case.tensors, strategy.inputs, strict=True)]
    issued: list[list[Issued]] = []
    with step_seed(7):
        made = run(
            [program(case, strategy, mesh, rank) for rank in ranks],
            [[each[rank] for each in given] for rank in ranks],
            mesh,
            issued=issued,
        )
    for index, (whole, layout) in enumerate(zip(case.whole, strategy.outputs, strict=True)):
        if layout is not None and whole is not None:
            _same([made[rank][index] for rank in ranks], whole, layout, mesh, case)
    declared = sorted(
        (inner.op, axis, inner_bytes(inner, case.op, case.metas, strategy, mesh.sizes), inner.reduce)
        for axis, each in enumerate(strategy.axes)
        for inner in each.inner
    )
    for each in issued:
        assert sorted((i.op, i.axis, i.bytes, i.reduce) for i in each) == declared


def _same(made: Sequence[torch.Tensor], whole: torch.Tensor, layout: Layout, mesh: Mesh, case: Case) -> None:
    held = {mesh.coordinate(rank): each for rank, each in enumerate(made)}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Partial):
            held = {at: _joined(held, at, axis, mesh.sizes[axis], placement.reduce) for at in held}
    for at, value in held.items():
        wanted = part(whole, layout, mesh.sizes, at)
        assert value.shape == wanted.shape
        assert value.dtype == wanted.dtype
        if not case.shapes_only:
            narrow = any(t.dtype in {torch.float32, torch.complex64} for t in (wanted, *case.tensors))
            near = 1e-5 if narrow else 1e-9
            # Terms cancel: what they leave is as exact as the largest of them.
            most = max(map(_largest, (whole, *made))) if narrow else 1.0
            torch.testing.assert_close(value, wanted, rtol=near, atol=near * max(most, 1.0), equal_nan=True)


def _largest(value: torch.Tensor) -> float:
    """Return the largest magnitude that is a number, 0 of no elements."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return real.double().abs().nan_to_num(0, 0, 0).max().item() if value.numel() else 0.0


def _joined(
    held: dict[tuple[int, ...], torch.Tensor], at: tuple[int, ...], axis: int, size: int, reduce: str
) -> torch.Tensor:
    along = torch.stack([held[(*at[:axis], i, *at[axis + 1 :])] for i in range(size)])
    joined = {"sum": along.sum, "max": along.amax, "min": along.amin}[reduce](0)
    return joined.to(along.dtype)


def sample(case: Case, sizes: tuple[int, ...], count: int, seed: int) -> list[MeshStrategy]:
    """Return up to `count` strategies on a mesh, at random but always the same ones."""
    options = [case.strategies(size) for size in sizes]
    total = math.prod(map(len, options))
    chosen = random.Random(f"{case.id(seed)}").sample(range(total), min(total, 4 * count))
    found = []
    for number in chosen:
        picked = []
        for each in options:
            number, index = divmod(number, len(each))
            picked.append(each[index])
        strategy = on_mesh(case, picked, sizes)
        if strategy is not None:
            found.append(strategy)
    return found[:count]


def _meta(value: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _arg(value: Any, names: Iterator[Ref]) -> Arg:
    if isinstance(value, torch.Tensor):
        return next(names)
    if isinstance(value, tuple | list):
        return tuple(_arg(each, names) for each in value)
    for kind, name in ((torch.dtype, "dtype"), (torch.device, "device"), (torch.layout, "layout")):
        if isinstance(value, kind):
            return Const(name, str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Const("memory_format", str(value).removeprefix("torch."))
    literal: int | float | bool | str | None = value
    return literal


def _flat(values: Sequence[Any]) -> list[Any]:
    return [leaf for value in values for leaf in (_flat(value) if isinstance(value, list | tuple) else [value])]
