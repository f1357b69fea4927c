"""Sharding rules of normalisation.

Statistics of a sample (layer, RMS, group norm) stay inside a rank when samples
are split. Those of a batch are joined by the lowering `sync` when the batch is:
the mean first, then the squares around it, so that precision is the whole's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.placement import Placement, Shard
from autopar.ir.rule import Dims, letters, plain
from autopar.ir.strategy import Inner, Strategy
from autopar.strategies.call import Call
from autopar.strategies.softmax import sum_dtype


def _normed(call: Call) -> tuple[Dims, Dims, Dims, frozenset[str]]:
    """Return the dimensions of data, statistics (1 where reduced) and weight, and the factors kept whole."""
    rank = len(call.shape("input"))
    last = len(call.arg("normalized_shape"))
    names = letters(rank)
    statistics = plain((*names[: rank - last], *(None,) * last))
    return plain(names), statistics, plain(names[rank - last :]), frozenset(names[rank - last :])


def _layer_norm(call: Call) -> Iterator[Strategy]:
    data, statistics, weight, whole = _normed(call)
    inputs = {"input": data, "weight": weight, "bias": weight}
    return call.named(inputs, [data, *(statistics,) * (len(call.op.outputs) - 1)], whole=whole)


def _layer_norm_backward(call: Call) -> Iterator[Strategy]:
    data, statistics, weight, whole = _normed(call)
    inputs = {"grad_out": data, "input": data, "mean": statistics, "rstd": statistics, "weight": weight, "bias": weight}
    return call.named(inputs, [data, *(weight,) * (len(call.op.outputs) - 1)], whole=whole)


def _grouped(call: Call) -> tuple[Dims, Dims, Dims]:
    """Return the dimensions of the data, of the statistics and of the weight of a group norm."""
    space: Dims = ((),) * (len(call.shape("input")) - 2)
    return (("n",), ("g", "c"), *space), (("n",), ("g",)), (("g", "c"),)


def _group_norm(call: Call) -> Iterator[Strategy]:
    data, statistics, weight = _grouped(call)
    inputs = {"input": data, "weight": weight, "bias": weight}
    return call.named(inputs, [data, statistics, statistics], whole=frozenset("c"))


def _group_norm_backward(call: Call) -> Iterator[Strategy]:
    data, statistics, weight = _grouped(call)
    inputs = {"grad_out": data, "input": data, "mean": statistics, "rstd": statistics, "weight": weight}
    return call.named(inputs, [data, weight, weight], whole=frozenset("c"))


_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


def _batch_norm(call: Call) -> Iterator[Strategy]:
    """Yield those of a batch norm: channels apart, samples apart with joint statistics."""
    rank = len(call.shape("input"))
    data: Dims = (("n",), ("c",), *((),) * (rank - 2))
    inputs: dict[str, Dims] = {"input": data, **dict.fromkeys(_CHANNEL, (("c",),))}
    outputs: list[Dims | None] = [data]
    outputs += [(("c",),) if _is_statistic(call, i) else ((),) for i in range(1, len(call.op.outputs))]
    apart = {(i, "c") for i in range(1, len(call.op.outputs)) if not _is_statistic(call, i)}
    apart |= {(i, "n") for i in range(1, len(call.op.outputs))}
    training = _trains(call)
    yield from call.named(inputs, outputs, whole=frozenset("n" if training else ""), apart=frozenset(apart))
    if training:
        index = call.index("input")
        dtype = sum_dtype(call.metas[index or 0].dtype)
        inner = Inner("all_reduce", dtype, input=index, without=tuple(d for d in range(rank) if d != 1))
        yield from _samples(call, {"input": 0}, [0], (inner, inner))


def _is_statistic(call: Call, index: int) -> bool:
    """Return whether an output has one number a channel; in evaluation some are empty."""
    return call.result(index) == call.shape("input")[1:2]


def _trains(call: Call) -> bool:
    for name in ("training", "train", "update"):
        if name in call.arguments:
            return bool(call.arg(name))
    return "no_training" not in call.op.target


def _batch_norm_backward(call: Call) -> Iterator[Strategy]:
    """Yield those of its gradient; joined, the sums give whole gradients of weight and bias."""
    rank = len(call.shape("input"))
    data: Dims = (("n",), ("c",), *((),) * (rank - 2))
    inputs: dict[str, Dims] = {"grad_out": data, "input": data, **dict.fromkeys(_CHANNEL, (("c",),))}
    training = bool(call.arg("train"))
    yield from call.named(inputs, [data, (("c",),), (("c",),)], whole=frozenset("n" if training else ""))
    if training:
        index = call.index("input")
        dtype = sum_dtype(call.metas[index or 0].dtype)
        without = tuple(d for d in range(rank) if d != 1)
        inner = Inner("all_reduce", dtype, input=index, without=without, times=2)
        yield from _samples(call, {"grad_out": 0, "input": 0}, [0], (inner,))


def _samples(
    call: Call, inputs: Mapping[str, int], outputs: Iterable[int], inner: tuple[Inner, ...]
) -> Iterator[Strategy]:
    places = {call.index(name): dim for name, dim in inputs.items()}
    outers = dict.fromkeys(outer for i, dim in places.items() if i is not None for outer in call.digits(i, dim))
    for outer in outers:
        ins: dict[int | None, Placement] = {i: Shard(dim, outer) for i, dim in places.items()}
        yield call.strategy(ins, {i: Shard(0, outer) for i in outputs}, "sync", inner)


def _weight_norm(call: Call) -> Iterator[Strategy]:
    """Yield those of a weight as direction and length (and its gradient): along the dimension that has lengths."""
    rank = len(call.metas[0].shape)
    dim = call.dim("dim", rank)
    along = plain("a" if d == dim else None for d in range(rank))
    lengths = {meta.shape for meta in (*call.metas, *call.op.outputs) if meta is not None and len(meta.shape) < rank}
    if lengths:
        return iter((call.replicated(),))
    inputs = dict.fromkeys(("v", "g", "grad_w", "saved_v", "saved_g", "saved_norms"), along)
    return call.named(inputs, [along, along])


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _layer_norm,
    "aten._fused_rms_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten._weight_norm_interface.default": _weight_norm,
    "aten._weight_norm_interface_backward.default": _weight_norm,
}
