"""What the shapes of tensors cannot tell about splitting one factor by several axes.

Where a dimension merges factors and none of them is a dimension by itself (a
convolution's groups), two axes that each split the outer factor may together
ask for more parts than it has, though the merged dimension divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopar.ir.graph import Op
from autopar.ir.microbatches import OWN
from autopar.ir.placement import Replicate, Shard
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta
from autopar.strategies.call import Call

Split = Callable[[Strategy], bool]


def fits_mesh(op: Op, metas: tuple[TensorMeta, ...], strategy: MeshStrategy, sizes: Sequence[int]) -> bool:
    """Return whether the axes of a strategy, each valid by itself and by shapes together, do not exhaust a factor."""
    check = _CHECKS.get(op.target)
    return _keeps_samples(strategy) and (check is None or check(Call(op, metas, 1, ()), strategy, sizes))


def _keeps_samples(strategy: MeshStrategy) -> bool:
    """Return whether an axis that does an operator on its own rows has the same rows of all: none splits outside it."""
    own = [place for place, each in enumerate(strategy.axes) if each.lowering == OWN]
    for layout in (*strategy.inputs, *(each for each in strategy.outputs if each is not None)) if own else ():
        for place in own:
            mine = layout[place]
            for other, each in enumerate(layout):
                if other in own or not isinstance(mine, Shard) or not isinstance(each, Shard):
                    continue
                if each.dim == mine.dim and each.outer < mine.outer:
                    return False
    return True


def _ranks(strategy: MeshStrategy, sizes: Sequence[int], splits: Split) -> int:
    return math.prod(size for each, size in zip(strategy.axes, sizes, strict=True) if splits(each))


def _groups(call: Call, strategy: MeshStrategy, sizes: Sequence[int]) -> bool:
    """Return whether a convolution's groups divide by the axes that split them: channels on both sides."""
    groups = int(call.arg("groups"))

    def splits(each: Strategy) -> bool:
        # Groups are the one factor that data, gradient or output, and weight share in their channels.
        return groups > 1 and each.inputs[0] == Shard(1) and _is_channel(each) and each.inputs[1] != Replicate()

    return groups % _ranks(strategy, sizes, splits) == 0


def _is_channel(each: Strategy) -> bool:
    others = (*each.inputs[1:], *each.outputs)
    return all(placement is None or placement in {Shard(0), Shard(1)} for placement in others)


def _copies(call: Call, strategy: MeshStrategy, sizes: Sequence[int]) -> bool:
    """Return whether each repetition divides by the axes that split it rather than what is repeated."""
    for dim, count in enumerate(call.arg("repeats")):

        def splits(each: Strategy, dim: int = dim) -> bool:
            made = each.outputs[0]
            return isinstance(made, Shard) and made.dim == dim and each.inputs[0] == Replicate()

        if count % _ranks(strategy, sizes, splits):
            return False
    return True


_CHECKS: Mapping[str, Callable[[Call, MeshStrategy, Sequence[int]], bool]] = {
    "aten.convolution.default": _groups,
    "aten.convolution_backward.default": _groups,
    "aten.repeat.default": _copies,
}
