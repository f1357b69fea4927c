"""Sharding rules of losses.

`nll_loss` divides by the number (or weight) of the targets that count, all of
them: split by tokens, the lowering adds that number up and each rank's loss is
a term of the whole. Split by classes, each rank looks up the targets it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.placement import Partial, Placement, Shard
from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Inner, Strategy
from autopar.strategies.call import Call
from autopar.strategies.softmax import sum_dtype

MEAN = 1
"""Torch's number for `reduction="mean"`; 0 is none, 2 is sum."""


def _tokens(rank: int) -> tuple[int, ...]:
    """Return the dimensions of the scores that are not the class: all but 1, or none of a single vector."""
    return tuple(d for d in range(rank) if d != 1) if rank > 1 else ()


def _nll_forward(call: Call) -> Iterator[Strategy]:
    yield call.replicated()
    scores, target = (call.index(name) for name in ("self", "target"))
    rank = len(call.shape("self"))
    if scores is None or target is None or rank < 2:
        return
    summed = call.arg("reduction") != 0
    dtype = sum_dtype(call.metas[scores].dtype)
    for at, dim in enumerate(_tokens(rank)):
        for outer in dict.fromkeys((*call.digits(scores, dim), *call.digits(target, at))):
            ins: dict[int | None, Placement] = {scores: Shard(dim, outer), target: Shard(at, outer)}
            out: Placement = Partial() if summed else Shard(at, outer)
            inner = (Inner("all_reduce", dtype, output=1),) if summed else ()
            yield call.strategy(ins, {0: out}, "tokens" if summed else "", inner)
    for outer in call.digits(scores, 1):
        ins = {scores: Shard(1, outer)}
        yield call.strategy(ins, {0: Partial()}, "vocab")


def _nll_backward(call: Call) -> Iterator[Strategy]:
    return _by_tokens_or_classes(call, splits_weight=True)


def _cross_entropy_backward(call: Call) -> Iterator[Strategy]:
    # Where a target is another rank's class its weight still scales the row.
    return _by_tokens_or_classes(call, splits_weight=False)


def _by_tokens_or_classes(call: Call, *, splits_weight: bool) -> Iterator[Strategy]:
    yield call.replicated()
    grad, scores, target, weight = (call.index(name) for name in ("grad_output", "self", "target", "weight"))
    rank = len(call.shape("self"))
    if scores is None or target is None or rank < 2:
        return
    summed = call.arg("reduction") != 0
    for at, dim in enumerate(_tokens(rank)):
        for outer in dict.fromkeys((*call.digits(scores, dim), *call.digits(target, at))):
            ins: dict[int | None, Placement] = {scores: Shard(dim, outer), target: Shard(at, outer)}
            if not summed:
                ins[grad] = Shard(at, outer)
            yield call.strategy(ins, {0: Shard(dim, outer)})
    for outer in call.digits(scores, 1):
        ins = {scores: Shard(1, outer)}
        if weight is not None and splits_weight:
            ins[weight] = Shard(0, outer)
        yield call.strategy(ins, {0: Shard(1, outer)}, "vocab")


def _elementwise(call: Call) -> Iterator[Strategy]:
    """Yield those of a loss of elements: their sum is a sum of parts, their mean one of scaled parts."""
    shape = call.metas[0].shape
    names = letters(len(shape))
    reduction = call.arg("reduction")
    ins: Dims = plain(names)
    summed = reduction != 0
    return call.by(
        Rule(
            inputs=tuple(_operand(meta.shape, shape, ins) for meta in call.metas),
            outputs=((),) if summed else (ins,),
            lowering=dict.fromkeys(names, "scale") if reduction == MEAN else None,
        )
    )


def _elementwise_backward(call: Call) -> Iterator[Strategy]:
    """Yield those of its gradient; with a mean, a part divides by its own number of elements, so it is scaled."""
    shape = call.result()
    names = letters(len(shape))
    dims = plain(names)
    return call.by(
        Rule(
            inputs=tuple(_operand(meta.shape, shape, dims) for meta in call.metas),
            outputs=(dims,),
            lowering=dict.fromkeys(names, "scale") if call.arg("reduction") == MEAN else None,
        )
    )


def _operand(shape: tuple[int, ...], whole: tuple[int, ...], dims: Dims) -> Dims:
    """Return the dimensions of an operand that broadcasts to `whole`."""
    tail = zip(shape, whole[len(whole) - len(shape) :], dims[len(dims) - len(shape) :], strict=True)
    return tuple(dim if old == new else () for old, new, dim in tail)


def _margin(call: Call) -> Iterator[Strategy]:
    """Yield those of a loss of every sample's scores against each other, and of its gradient: classes stay whole."""
    samples: Dims = (("n",),) if len(call.shape("self")) == 2 else ()
    classes: Dims = ((),)
    summed = call.arg("reduction") != 0
    loss: Dims = () if summed else samples
    backward = "grad_output" in call.arguments
    rows = (*samples, *classes)
    inputs: dict[str, Dims] = {"self": rows, "grad_output": loss, "is_target": rows}
    inputs["target"] = samples if call.shape("target") == call.shape("self")[:-1] else rows
    yield from call.named(
        inputs,
        [rows] if backward else [loss, rows][: len(call.op.outputs)],
        linear=[["grad_output"]] if backward else (),
        lowering={"n": "scale"} if call.arg("reduction") == MEAN else None,
    )


_ELEMENTS = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")

RULES: Mapping[str, Callable[[Call], Iterable[Strategy]] | Rule] = {
    "aten.nll_loss_forward.default": _nll_forward,
    "aten.nll_loss2d_forward.default": _nll_forward,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
    "autopar_ops.cross_entropy_backward.default": _cross_entropy_backward,
    "autopar_ops.ctc_loss.default": Rule.parse("_n_ n_ n n -> n n__"),
    "autopar_ops.ctc_loss_backward.default": Rule.parse("n _n_ n_ n n n n__ -> _n_", linear=[[0]]),
    **{f"aten.{name}.default": _elementwise for name in (*_ELEMENTS, "binary_cross_entropy_with_logits")},
    **{f"aten.{name}_backward.default": _elementwise_backward for name in _ELEMENTS},
    "aten.multi_margin_loss.default": _margin,
    "aten.multi_margin_loss_backward.default": _margin,
    "aten.multilabel_margin_loss_forward.default": _margin,
    "aten.multilabel_margin_loss_backward.default": _margin,
}
