"""Sharding rules of operators that draw random numbers.

Every strategy names the lowering `random`, the replicated one too: ranks that
hold the same part must draw the same numbers, ranks that hold different parts
different ones, and no generator state that each rank advances by itself gives both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.ir.placement import Replicate, Shard
from autopar.ir.rule import Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call

LOWERING = "random"


def drawn(call: Call) -> Iterator[Strategy]:
    """Yield the strategies of an operator that draws one number an element of a tensor it reads."""
    names = plain(letters(len(call.result())))
    rule = Rule(
        inputs=tuple(names if meta.shape == call.result() else ((),) * len(meta.shape) for meta in call.metas),
        outputs=tuple(None if meta is None else names for meta in call.op.outputs),
    )
    return (replace(each, lowering=LOWERING) for each in call.by(rule))


def _rows(call: Call) -> Iterator[Strategy]:
    """Yield the strategies of an operator whose draws along the last dimension depend on each other."""
    rank = len(call.result())
    kept = plain((*letters(rank - 1), None))
    rule = Rule(inputs=(kept,) * len(call.metas), outputs=(kept,))
    return (replace(each, lowering=LOWERING) for each in call.by(rule))


def _made(call: Call) -> Iterator[Strategy]:
    """Yield those of a random tensor made from its shape."""
    yield replace(call.replicated(), lowering=LOWERING)
    rank = len(call.result())
    wanted = sorted(call.wanted[0], key=lambda s: (s.dim, s.outer)) if call.wanted else []
    for shard in (*map(Shard, range(rank)), *(s for s in wanted if s.dim < rank)):
        yield call.strategy(dict.fromkeys(range(len(call.metas)), Replicate()), {0: shard}, LOWERING)


def _dropout(call: Call) -> Iterator[Strategy]:
    """Yield those of dropout; without training it draws nothing."""
    for each in drawn(call):
        yield each if call.arg("train") is not False else replace(each, lowering="")


def alike(call: Call) -> Iterator[Strategy]:
    """Yield the replicated strategy alone: the numbers drawn depend on each other."""
    yield replace(call.replicated(), lowering=LOWERING)


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.native_dropout.default": _dropout,
    **{
        f"aten.{name}": drawn
        for name in (
            "bernoulli.default", "bernoulli.p", "bernoulli.Tensor", "rand_like.default", "randn_like.default",
            "randint_like.default", "randint_like.low_dtype", "exponential.default", "uniform.default",
            "normal_functional.default", "cauchy.default", "geometric.default", "log_normal.default", "random.default",
            "random.from", "random.to", "poisson.default", "normal.float_Tensor", "normal.Tensor_float",
            "normal.Tensor_Tensor", "_standard_gamma.default", "binomial.default",
            "rrelu_with_noise_functional.default",
        )
    },
    **{
        f"aten.{name}": _made
        for name in ("rand.default", "randn.default", "randint.default", "randint.low", "normal.float_float")
    },
    "aten.randperm.default": alike,
    "aten.multinomial.default": _rows,
    "aten._sample_dirichlet.default": _rows,
}  # fmt: skip
