"""Sharding rules of operators on planes: pooling and resampling treat every image and channel by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autopar.ir.rule import Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def _planes(space: int) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of an operator whose tensors all end in `space` dimensions that stay whole."""

    def rule(call: Call) -> Iterator[Strategy]:
        rank = len(call.result())
        kept = plain((*letters(max(rank - space, 0)), *(None,) * min(space, rank)))
        return call.by(
            Rule(
                inputs=(kept,) * len(call.metas),
                outputs=tuple(None if meta is None else kept for meta in call.op.outputs),
            )
        )

    return rule


_ONE = (
    "adaptive_avg_pool1d", "avg_pool1d", "max_pool1d", "upsample_linear1d", "upsample_linear1d_backward",
    "upsample_nearest1d", "upsample_nearest1d_backward", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact1d_backward",
)  # fmt: skip
_TWO = (
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "upsample_nearest2d", "upsample_nearest2d_backward", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
    "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward", "upsample_bicubic2d", "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward", "fractional_max_pool2d_backward",
)  # fmt: skip
_THREE = (
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "avg_pool3d", "avg_pool3d_backward",
    "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "upsample_nearest3d", "upsample_nearest3d_backward",
    "upsample_trilinear3d", "upsample_trilinear3d_backward", "_upsample_nearest_exact3d",
    "_upsample_nearest_exact3d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
    "fractional_max_pool3d_backward",
)  # fmt: skip


def _im2col(call: Call) -> Iterator[Strategy]:
    """Yield those of unfolding patches (or folding them back): the batch splits, channels merge with the patch."""
    data, columns = ("n", "c"), ("n", None)
    before, after = (data, columns) if len(call.metas[0].shape) == 4 else (columns, data)
    ins = plain((before[0], None, *(None,) * (len(call.metas[0].shape) - 2)))
    outs = plain((after[0], None, *(None,) * (len(call.result()) - 2)))
    return call.by(Rule(inputs=(ins,), outputs=(outs,), linear=(frozenset({0}),)))


def _grid(space: int) -> tuple[Rule, Rule]:
    """Return the rules of sampling at places that each sample has of its own, and of its gradients."""
    data, places = plain(("n", "c", *(None,) * space)), plain(("n", *(None,) * (space + 1)))
    forward = Rule(inputs=(data, places), outputs=(data,), linear=(frozenset({0}),))
    return forward, Rule(inputs=(data, data, places), outputs=(data, places), linear=(frozenset({0}),))


def _grid_backward(rule: Rule) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of the gradients that the mask of outputs asks for."""

    def of(call: Call) -> Iterator[Strategy]:
        asked = tuple(None if meta is None else dims for dims, meta in zip(rule.outputs, call.op.outputs, strict=True))
        return call.by(replace(rule, outputs=asked))

    return of


_GRID_2D, _GRID_2D_BACKWARD = _grid(2)
_GRID_3D, _GRID_3D_BACKWARD = _grid(3)


RULES: Mapping[str, Callable[[Call], Iterator[Strategy]] | Rule] = {
    **{f"aten.{name}.default": _planes(1) for name in _ONE},
    **{f"aten.{name}.default": _planes(2) for name in _TWO},
    **{f"aten.{name}.default": _planes(3) for name in _THREE},
    "aten.grid_sampler_2d.default": _GRID_2D,
    "aten.grid_sampler_2d_backward.default": _grid_backward(_GRID_2D_BACKWARD),
    "aten.grid_sampler_3d.default": _GRID_3D,
    "aten.grid_sampler_3d_backward.default": _grid_backward(_GRID_3D_BACKWARD),
    "aten.affine_grid_generator.default": lambda call: call.by(
        Rule(inputs=(plain(("n", None, None)),), outputs=(plain(("n", *(None,) * (len(call.result()) - 1))),))
    ),
    "aten.im2col.default": _im2col,
    "aten.col2im.default": _im2col,
}
