"""Size arguments of operators on local shapes: what a program says about whole tensors, said of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Shard, local_shape
from autopar.ir.strategy import MeshStrategy

_FAR = 1 << 62
"""A slice that ends beyond this ends where the dimension does."""


@dataclass(frozen=True)
class _Place:
    """One operator, how it is split, and its arguments by name."""

    op: Op
    strategy: MeshStrategy
    sizes: tuple[int, ...]
    arguments: Mapping[str, Any]

    def output(self, index: int = 0) -> tuple[int, ...]:
        """Return the local shape of an output."""
        meta, layout = self.op.outputs[index], self.strategy.outputs[index]
        if meta is None or layout is None:
            raise ValueError(f"output {index} of {self.op.name} is no tensor")
        return local_shape(meta.shape, layout, self.sizes)

    def sizes_told(self) -> tuple[int, ...]:
        """Return the local shape of the first output, -1 where it is as many rows as come to this rank's experts."""
        layout = self.strategy.outputs[0] or ()
        varying = {p.dim for p in layout if isinstance(p, Shard) and p.rows == "expert"}
        return tuple(-1 if dim in varying else size for dim, size in enumerate(self.output()))

    def parts(self, layout: Layout | None, dim: int) -> int:
        """Return over how many ranks a layout splits a dimension."""
        pairs = zip(layout or (), self.sizes, strict=False)
        return math.prod(n for placement, n in pairs if isinstance(placement, Shard) and placement.dim == dim)

    def dim(self, name: str = "dim", index: int = 0) -> int:
        """Return a dimension argument counted from the front of output `index`."""
        meta = self.op.outputs[index]
        rank = len(meta.shape) if meta is not None else 1
        return int(self.arguments[name]) % max(rank, 1)


Edit = Callable[[_Place], Mapping[str, Any]]
"""The arguments to replace, by name."""


def localise(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], strategy: MeshStrategy, mesh: Mesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `op` with sizes, lengths and group counts of one rank; tensors are handed through.

    `args` and `kwargs` are the operator's own, fx nodes standing for tensors. Only numbers change, and none does where
    the strategy splits nothing.
    """
    edit = _EDITS.get(op.target)
    if edit is None or not _splits(strategy):
        return tuple(args), dict(kwargs)
    names = _names(op.target)
    arguments = {**dict(names), **{name: value for (name, _), value in zip(names, args, strict=False)}, **kwargs}
    positions = {name: position for position, (name, _) in enumerate(names)}
    new_args, new_kwargs = list(args), dict(kwargs)
    for name, value in edit(_Place(op, strategy, mesh.sizes, arguments)).items():
        if positions[name] < len(new_args):
            new_args[positions[name]] = value
        else:
            new_kwargs[name] = value
    return tuple(new_args), new_kwargs


@lru_cache(maxsize=4096)
def _names(target: str) -> tuple[tuple[str, Any], ...]:
    """Return name and default of each argument of an operator."""
    space, packet, overload = target.split(".")
    found: Any = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return tuple((arg.name, arg.default_value if arg.has_default_value() else None) for arg in found._schema.arguments)


def _splits(strategy: MeshStrategy) -> bool:
    layouts = (*strategy.inputs, *(layout for layout in strategy.outputs if layout is not None))
    return any(isinstance(placement, Shard) for layout in layouts for placement in layout)


def _shape_to(name: str) -> Edit:
    """Return the edit that writes the local shape of the result into argument `name`."""
    return lambda place: {name: list(place.sizes_told())}


def _strided(place: _Place) -> Mapping[str, Any]:
    """Return local size and strides; dimensions keep the order in memory that the strides told."""
    shape = place.output()
    before: Sequence[int] = place.arguments["stride"]
    order = sorted(range(len(shape)), key=lambda d: (before[d], -d))
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return {"size": list(shape), "stride": stride}


def _repeat(place: _Place) -> Mapping[str, Any]:
    """Return the repetitions of one rank: fewer where the repetition was split, the same where the element was."""
    repeats = list(place.arguments["repeats"])
    made, read = place.strategy.outputs[0], place.strategy.inputs[0]
    for now, before, size in zip(made or (), read, place.sizes, strict=True):
        if isinstance(now, Shard) and not isinstance(before, Shard):
            repeats[now.dim] //= size
    return {"repeats": repeats}


def _cut(value: int | None, parts: int) -> int | None:
    return value if value is None or value >= _FAR else -(-value // parts)


def _bounds(place: _Place) -> Mapping[str, Any]:
    """Return where a slice of whole runs starts and ends in a rank's part; of one element of each run, as before."""
    parts = place.parts(place.strategy.outputs[0], place.dim())
    if parts > 1 and (place.arguments["step"] or 1) > 1:
        return {"end": _FAR}
    return {name: _cut(place.arguments[name], parts) for name in ("start", "end")}


def _slice_backward(place: _Place) -> Mapping[str, Any]:
    return {"input_sizes": list(place.sizes_told()), **_bounds(place)}


def _pieces(place: _Place) -> Mapping[str, Any]:
    dim = place.dim()
    return {"split_sizes": [place.output(i)[dim] for i in range(len(place.op.outputs))]}


def _piece(place: _Place) -> Mapping[str, Any]:
    return {"split_size": place.output()[place.dim()]}


def _groups(data: int, channels: int) -> Edit:
    """Return the edit of a convolution's `groups`: split where both its data and its channels are.

    `data` is the place of its input among the tensors read; `channels` that of the gradient of its output, or -1 for
    the output itself.
    """

    def edit(place: _Place) -> Mapping[str, Any]:
        groups = int(place.arguments["groups"])
        out = place.strategy.outputs[0] if channels < 0 else place.strategy.inputs[channels]
        for a, b, size in zip(place.strategy.inputs[data], out or (), place.sizes, strict=True):
            split = isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim == 1
            groups //= size if split else 1
        return {"groups": groups}

    return edit


def _convolution_backward(place: _Place) -> Mapping[str, Any]:
    edits = dict(_groups(1, 0)(place))
    biases = place.arguments["bias_sizes"]
    if biases is not None:
        # Where the bias has no gradient, its size is not read; it is kept in step with the channels all the same.
        edits["bias_sizes"] = [biases[0] // place.parts(place.strategy.inputs[0], 1)]
    return edits


def _group_norm(place: _Place) -> Mapping[str, Any]:
    data = place.strategy.inputs[0]
    samples, channels = place.parts(data, 0), place.parts(data, 1)
    return {
        "N": place.arguments["N"] // samples,
        "C": place.arguments["C"] // channels,
        "group": place.arguments["group"] // channels,
    }


def _samples(place: _Place) -> Mapping[str, Any]:
    """Return the size of the picture that a grid is for, with one rank's samples."""
    return {"size": [place.output()[0], *place.arguments["size"][1:]]}


_EDITS: Mapping[str, Edit] = {
    **{
        f"aten.{name}": _shape_to("size")
        for name in (
            "view.default", "_unsafe_view.default", "view_copy.default", "_reshape_copy.default", "expand.default",
            "expand_copy.default", "full.default", "zeros.default", "ones.default", "empty.memory_format",
            "new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default", "rand.default",
            "randn.default", "randint.default", "randint.low", "normal.float_float",
        )
    },
    **{f"aten.{name}.default": _shape_to("input_sizes") for name in ("select_backward", "diagonal_backward")},
    **{
        f"aten.{name}_backward.default": _shape_to("input_size")
        for name in (
            "upsample_linear1d", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
            "_upsample_nearest_exact2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d",
            "_upsample_bicubic2d_aa", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d",
        )
    },
    "aten.reshape.default": _shape_to("shape"),
    "aten.affine_grid_generator.default": _samples,
    "aten.unfold_backward.default": _shape_to("input_sizes"),
    "aten._reshape_alias.default": _strided,
    "aten.new_empty_strided.default": _strided,
    "aten.empty_strided.default": _strided,
    "aten.repeat.default": _repeat,
    "aten.slice.Tensor": _bounds,
    "aten.slice_copy.Tensor": _bounds,
    "aten.slice_scatter.default": _bounds,
    "aten.slice_backward.default": _slice_backward,
    "aten.split.Tensor": _piece,
    "aten.split_copy.Tensor": _piece,
    "aten.unsafe_split.Tensor": _piece,
    "aten.unsafe_split_with_sizes.default": _pieces,
    "aten.split_with_sizes.default": _pieces,
    "aten.split_with_sizes_copy.default": _pieces,
    "aten.embedding_dense_backward.default": lambda place: {"num_weights": place.output()[0]},
    "aten.convolution.default": _groups(0, -1),
    "aten.convolution_backward.default": _convolution_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm,
}  # fmt: skip
"""What to change, by operator; other operators have no arguments that tell sizes of split dimensions."""
