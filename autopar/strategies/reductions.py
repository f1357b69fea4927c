"""Sharding rules of reductions, scans and orderings along dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta
from autopar.strategies.call import Call
from autopar.strategies.views import replicate_only


def _reduced(call: Call, dims: Sequence[int]) -> tuple[Dims, Dims]:
    """Return the dimensions of input and output of a reduction of `dims`, kept as 1 or dropped."""
    names = letters(len(call.metas[0].shape))
    if len(call.result()) == len(names):
        return plain(names), plain(None if i in dims else name for i, name in enumerate(names))
    return plain(names), plain(name for i, name in enumerate(names) if i not in dims)


def _reduction(
    reduce: str | None, *, linear: bool = False, lowering: str = "", dim: str = "dim"
) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of a reduction; `reduce` says how parts combine (`None`: they do not)."""

    def rule(call: Call) -> Iterator[Strategy]:
        rank = len(call.metas[0].shape)
        dims = call.dims(dim, rank)
        ins, outs = _reduced(call, dims)
        names = letters(rank)
        return call.by(
            Rule(
                inputs=(ins,),
                outputs=tuple(None if meta is None else outs for meta in call.op.outputs),
                reduce=reduce,
                linear=(frozenset({0}),) if linear else (),
                lowering={names[i]: lowering for i in dims} if lowering else None,
            )
        )

    return rule


def _along(*, linear: bool = False, names: Sequence[str] = ("dim",)) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of an operator that keeps the shape and works along the dimensions told by `names`."""

    def rule(call: Call) -> Iterator[Strategy]:
        rank = max(len(meta.shape) for meta in call.metas)
        held = {d for name in names for d in call.dims(name, rank)}
        kept = plain(None if i in held else each for i, each in enumerate(letters(rank)))
        count = len(call.metas)
        return call.by(
            Rule(
                inputs=tuple(kept if len(meta.shape) == rank else ((),) * len(meta.shape) for meta in call.metas),
                outputs=tuple(None if meta is None else kept for meta in call.op.outputs),
                linear=(frozenset(range(count)),) if linear else (),
            )
        )

    return rule


def leading(last: int, *, linear: bool = False) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of an operator that works on the last dimensions, and on each of those before by itself."""

    def rule(call: Call) -> Iterator[Strategy]:
        shape = call.metas[0].shape
        rank = len(shape)
        kept = plain(name if i < rank - last else None for i, name in enumerate(letters(rank)))

        def of(meta: TensorMeta | None) -> Dims | None:
            if meta is None:
                return None
            return kept[: len(meta.shape)] if meta.shape[: rank - last] == shape[:-last] else ((),) * len(meta.shape)

        return call.by(
            Rule(
                inputs=(kept,),
                outputs=tuple(of(meta) for meta in call.op.outputs),
                linear=(frozenset({0}),) if linear else (),
            )
        )

    return rule


def _searched(values: str, sequence: str) -> Callable[[Call], Iterator[Strategy]]:
    """Return the rule of looking values up in ordered sequences, each whole: one for all, or one a row."""

    def rule(call: Call) -> Iterator[Strategy]:
        names = plain(letters(len(call.result())))
        row = ((),) if len(call.shape(sequence)) == 1 else (*names[:-1], ())
        inputs = [names if i == call.index(values) else row for i in range(len(call.metas))]
        return call.by(Rule(inputs=tuple(inputs), outputs=(names,)))

    return rule


def _roll(call: Call) -> Iterator[Strategy]:
    dims = call.arg("dims")
    return _along(linear=True)(call) if not dims else _along(linear=True, names=("dims",))(call)


def _renorm(call: Call) -> Iterator[Strategy]:
    """Yield those of scaling each slice along one dimension to a norm."""
    rank = len(call.metas[0].shape)
    kept = plain(name if i == call.dim("dim", rank) else None for i, name in enumerate(letters(rank)))
    return call.by(Rule(inputs=(kept,), outputs=(kept,)))


def _whole(call: Call) -> Iterator[Strategy]:
    """Yield those of an operator that is linear in all its inputs together, each of them whole."""
    inputs = tuple(((),) * len(meta.shape) for meta in call.metas)
    outputs = tuple(None if meta is None else ((),) * len(meta.shape) for meta in call.op.outputs)
    return call.by(Rule(inputs=inputs, outputs=outputs, linear=(frozenset(range(len(inputs))),)))


def _histogram(call: Call) -> Iterator[Strategy]:
    """Yield those of a histogram: counts of parts add up, if all parts have the same bounds."""
    low, high = call.arg("min"), call.arg("max")
    names = plain(letters(len(call.metas[0].shape)))
    return call.by(Rule(inputs=(names,), outputs=(((),),), reduce="sum" if low < high else None))


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.sum.default": _reduction("sum", linear=True),
    "aten.sum.dim_IntList": _reduction("sum", linear=True),
    "aten.mean.default": _reduction("sum", linear=True, lowering="scale"),
    "aten.mean.dim": _reduction("sum", linear=True, lowering="scale"),
    "aten.amax.default": _reduction("max"),
    "aten.amin.default": _reduction("min"),
    "aten.max.default": _reduction("max"),
    "aten.min.default": _reduction("min"),
    "aten.max.dim": _reduction(None),
    "aten.min.dim": _reduction(None),
    "aten.argmax.default": _reduction(None),
    "aten.argmin.default": _reduction(None),
    "aten.prod.default": _reduction(None),
    "aten.prod.dim_int": _reduction(None),
    "aten.any.default": _reduction(None),
    "aten.any.dim": _reduction(None),
    "aten.any.dims": _reduction(None),
    "aten.all.default": _reduction(None),
    "aten.all.dim": _reduction(None),
    "aten.all.dims": _reduction(None),
    "aten.var.correction": _reduction(None),
    "aten.std.correction": _reduction(None),
    "aten.var_mean.correction": _reduction(None),
    "aten.std_mean.correction": _reduction(None),
    "aten.logsumexp.default": _reduction(None),
    "aten.linalg_vector_norm.default": _reduction(None),
    "aten.norm.ScalarOpt_dim": _reduction(None),
    "aten.count_nonzero.dim_IntList": _reduction("sum"),
    "aten.count_nonzero.default": _reduction("sum"),
    "aten.median.default": _reduction(None),
    "aten.median.dim": _reduction(None),
    "aten.kthvalue.default": _reduction(None),
    "aten.mode.default": _reduction(None),
    "aten.cumsum.default": _along(linear=True),
    "aten.cumprod.default": _along(),
    "aten.cummax.default": _along(),
    "aten.cummin.default": _along(),
    "aten.logcumsumexp.default": _along(),
    "aten.sort.default": _along(),
    "aten.sort.stable": _along(),
    "aten.argsort.default": _along(),
    "aten.topk.default": _along(),
    "aten.flip.default": _along(linear=True, names=("dims",)),
    "aten.roll.default": _roll,
    "aten.rot90.default": _along(linear=True, names=("dims",)),
    "aten.glu.default": _along(),
    "aten.glu_backward.default": _along(),
    "aten._fft_c2c.default": _along(linear=True),
    "aten._fft_r2c.default": _along(linear=True),
    "aten._fft_c2r.default": _along(linear=True),
    "aten.tril.default": leading(2, linear=True),
    "aten.triu.default": leading(2, linear=True),
    "aten.histc.default": _histogram,
    "aten.renorm.default": _renorm,
    "aten.trace.default": _whole,
    "aten.block_diag.default": _whole,
    "aten.bincount.default": replicate_only,
    "aten.searchsorted.Tensor": _searched("self", "sorted_sequence"),
    "aten.bucketize.Tensor": _searched("self", "boundaries"),
    "aten.unique_consecutive.default": replicate_only,
}
