"""What bounds operators on a CPU core beside memory: work on one element, one row or one window after the other.

Counted in evaluations of exp, whose rate a device has (`DeviceSpec.transcendentals_per_s`) and `autopar calibrate`
measures: vectorised functions and scalar loops both follow a core's speed, so that one figure stands for it. Figures
were measured with torch 2.13, one thread of an AMD EPYC (Zen 3), float32, and are rounded; exp: 1.06 ns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op

Shape = tuple[int, ...]

_OF_RESULT: Mapping[str, float] = {
    "exp": 1.0, "exp2": 1.0, "expm1": 1.0, "log": 1.0, "log2": 1.0, "log1p": 1.0, "sigmoid": 1.0, "softplus": 2.0,
    "sin": 1.5, "cos": 1.5, "erf": 1.5, "tanh": 3.0, "atan2": 1.4, "silu": 1.0, "silu_backward": 1.0,
    "gelu": 1.0, "gelu_backward": 2.0, "mish": 4.0, "mish_backward": 4.0, "elu": 1.0, "logsumexp": 1.0,
    "_softmax": 1.0, "_log_softmax": 1.0, "_log_softmax_backward_data": 1.0, "_safe_softmax": 1.0,
    "cross_entropy_backward": 1.0,
    "native_dropout": 8.0, "bernoulli": 8.0, "rand_like": 4.0, "rand": 4.0, "randn": 8.0, "randn_like": 8.0,
    "where": 1.0, "masked_fill": 1.0, "gather": 1.5, "scatter": 2.0, "scatter_add": 1.8, "cumsum": 0.9, "cumprod": 0.9,
    "native_batch_norm": 1.8, "_native_batch_norm_legit": 1.8, "_native_batch_norm_legit_functional": 1.8,
    "avg_pool2d_backward": 1.7, "upsample_nearest2d": 0.6, "upsample_bilinear2d": 2.4, "upsample_bicubic2d": 7.1,
    "grid_sampler_2d": 2.5, "im2col": 1.4, "_fft_r2c": 3.0, "_fft_c2r": 1.2, "_fft_c2c": 3.0, "_cdist_forward": 2.2,
}  # fmt: skip
"""By operator, for each element of its largest result.

Random numbers are drawn one by one, from a generator that does not vectorise. Choices by a mask: of a causal one; a
random one costs up to 4, for branches are mispredicted."""

_OF_INPUT: Mapping[str, float] = {
    "sort": 45.0, "argsort": 45.0, "topk": 4.0, "argmax": 0.8, "argmin": 0.8,
    "var": 5.5, "var_mean": 5.5, "std": 5.5, "std_mean": 5.5, "_adaptive_avg_pool2d": 0.9,
}  # fmt: skip
"""By operator, for each element of the tensor that it reads. Sorted are rows of 2048, those of 8 in a fifth of that;
`topk` of rows of 2048 and more takes 2, of 64 9."""

_OF_WINDOW: Mapping[str, float] = {"max_pool2d_with_indices": 4.0, "avg_pool2d": 1.7}
"""By operator, for each element of each window."""

_LOOKUPS = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put"})
_EACH_LOOKUP, _EACH_ROW, _IN_ROW = 4.5, 50.0, 0.6
"""Of operators that take tensors as indices: a single element, and a row and each element of it."""

_EACH_SUM, _IN_SUM = 70.0, 0.7
"""Of an embedding's gradient, which adds row by row: a row, and each element of it."""

_EACH_SCORE, _EACH_DRAWN = 1.8, 1.5
"""Of attention in blocks (`own_attention.py`), beside what other kernels do: what is computed of each score in passes
of their own, and 16 random bits. Of a causal mask as of all scores, for masking takes what is left out.
Measured beside torch's kernel without dropout on one core of an Intel Xeon, four shapes of 128 to 2048 tokens; what of
it the bits take was measured alone."""

_TANH_GELU = 3.5
"""gelu by tanh, forward or backward; by erf it is vectorised."""

_CHEAP_POWERS = frozenset({-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0})
_POWER = 2.8
"""Any power that is not a product, a root or an inverse."""


def evaluations(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Return the evaluations of exp that `op` takes as long as, on local shapes of what it reads and makes."""
    name = op.target.partition(".")[2].partition(".")[0].removesuffix("_")
    if name in {"gelu", "gelu_backward"} and "tanh" in (*op.args, *dict(op.kwargs).values()):
        return _TANH_GELU * _largest(outs)
    if each := _OF_RESULT.get(name):
        return each * _largest(outs)
    if each := _OF_INPUT.get(name):
        return each * _largest(ins)
    if each := _OF_WINDOW.get(name):
        return each * _largest(outs) * _area(op)
    if name in _LOOKUPS:
        return _looked_up(op, ins, outs)
    if name.startswith("_scaled_dot_product_block"):
        query, key = ins[1:3] if name.endswith("backward") else ins[:2]
        drawn = any(isinstance(arg, float) and arg > 0.0 for arg in op.args)
        return (_EACH_SCORE + _EACH_DRAWN * drawn) * math.prod(query[:-1]) * key[-2]
    if name == "embedding_dense_backward":
        grad, indices = ins[:2]
        return _EACH_SUM * math.prod(indices) + _IN_SUM * math.prod(grad)
    if name == "pow" and isinstance(op.args[-1], int | float) and float(op.args[-1]) not in _CHEAP_POWERS:
        return _POWER * _largest(outs)
    return 0.0


def _largest(shapes: Sequence[Shape]) -> float:
    return float(max(map(math.prod, shapes), default=0))


def _area(op: Op) -> int:
    """Return the elements of a window; one number stands for both sides."""
    window = op.args[1]
    sides = window if isinstance(window, tuple) else (window,)
    numbers = [side for side in sides if isinstance(side, int)]
    return math.prod(numbers) if len(numbers) > 1 else math.prod(numbers) ** 2


def _looked_up(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Return what reading or writing by index costs: rows are what lies behind the last dim that is indexed."""
    indices = op.args[1]
    if not isinstance(indices, tuple):
        return 0.0
    last = max((dim for dim, index in enumerate(indices) if index is not None), default=-1)
    row = math.prod(ins[0][last + 1 :])
    moved = math.prod(ins[-1]) if "put" in op.target else _largest(outs)
    return moved * (_EACH_LOOKUP if row <= 1 else _EACH_ROW / row + _IN_ROW)
