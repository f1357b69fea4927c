"""Where the elements of a rank's part lie in the whole dimension, and which places of the whole a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.placement import Layout, Shard
from autopar.rewrite.site import Site

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Digit:
    """What one axis leaves to this rank of a dimension: block `at` of `ranks`, in each run of `block * ranks`."""

    axis: int
    outer: int
    ranks: int
    block: int
    at: int


def digits(site: Site, layout: Layout, dim: int, extent: int) -> list[Digit]:
    """Return what this rank holds of a dimension of global size `extent`, outermost split first."""
    found = [
        Digit(axis, placement.outer, size, extent // (placement.outer * size), site.coordinate[axis])
        for axis, (placement, size) in enumerate(zip(layout, site.mesh.sizes, strict=True))
        if isinstance(placement, Shard) and placement.dim == dim
    ]
    return sorted(found, key=lambda digit: digit.outer)


def locate(site: Site, index: fx.Node, held: list[Digit]) -> tuple[fx.Node | None, fx.Node]:
    """Return for global places which are *not* this rank's (`None`: all are), and the local place of each.

    Local places are within bounds for every global place within bounds, this rank's or not.
    """
    missing: fx.Node | None = None
    for digit in held:
        number = index if digit.block == 1 else floor(site, index, digit.block)
        if digit.outer > 1:
            number = site.call(aten.remainder.Scalar, number, digit.ranks)
        other = site.call(aten.ne.Scalar, number, digit.at)
        missing = other if missing is None else either(site, missing, other)
        inside = site.call(aten.remainder.Scalar, index, digit.block)
        if digit.outer > 1:
            run = site.call(aten.mul.Scalar, floor(site, index, digit.block * digit.ranks), digit.block)
            inside = site.call(aten.add.Tensor, run, inside)
        index = inside
    return missing, index


def count_before(site: Site, end: fx.Node, held: list[Digit]) -> fx.Node:
    """Return how many of this rank's places lie before the global place `end`, at most the end of the dimension."""
    for digit in held:
        run = digit.block * digit.ranks
        whole = site.call(aten.mul.Scalar, floor(site, end, run), digit.block)
        rest = site.call(aten.remainder.Scalar, end, run)
        begun = site.call(aten.clamp.default, site.call(aten.sub.Tensor, rest, digit.at * digit.block), 0, digit.block)
        end = site.call(aten.add.Tensor, whole, begun)
    return end


def own_part(site: Site, value: fx.Node, layout: Layout, shape: tuple[int, ...]) -> fx.Node:
    """Return this rank's part of a tensor that it holds whole, without communication."""
    now = list(shape)
    for dim, extent in enumerate(shape):
        for digit in reversed(digits(site, layout, dim, extent)):
            length = now[dim] // digit.outer
            block = length // digit.ranks
            if digit.outer == 1:
                value = site.call(aten.slice.Tensor, value, dim, digit.at * block, (digit.at + 1) * block)
            else:
                split = [*now[:dim], digit.outer, digit.ranks, block, *now[dim + 1 :]]
                value = site.call(aten.select.int, site.call(aten.reshape.default, value, split), dim + 1, digit.at)
                value = site.call(aten.reshape.default, value, [*now[:dim], digit.outer * block, *now[dim + 1 :]])
            now[dim] = digit.outer * block
    return value


def floor(site: Site, value: fx.Node, by: int) -> fx.Node:
    """Return integers divided by a number, rounded down."""
    return site.call(aten.div.Tensor_mode, value, by, rounding_mode="floor")


def either(site: Site, a: fx.Node | None, b: fx.Node | None) -> fx.Node:
    """Return where one of two conditions holds; `None` holds nowhere."""
    if a is None or b is None:
        one = b if a is None else a
        if one is None:
            raise ValueError("neither condition is given")
        return one
    return site.call(aten.bitwise_or.Tensor, a, b)


def widened(site: Site, value: fx.Node, dims: int) -> fx.Node:
    """Return a tensor with `dims` dimensions of size 1 added at the end."""
    for _ in range(dims):
        value = site.call(aten.unsqueeze.default, value, -1)
    return value
