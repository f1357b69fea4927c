"""Sharding rules of convolutions: batch, output channels, input channels, and groups of channels.

    input [n, (g i), *space]   weight [(g o), i, *kernel]   bias [(g o)]   ->   [n, (g o), *space]

A transposed convolution has its weight the other way round, [(g i), o, *kernel].
Splitting the groups makes `groups` local. Space is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.rule import Dims
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def _dims(call: Call, rank: int) -> tuple[Dims, Dims, Dims, Dims]:
    """Return the dimensions of input, weight, bias and output."""
    space: Dims = ((),) * (rank - 2)
    ins: tuple[str, ...] = ("i",)
    outs: tuple[str, ...] = ("o",)
    group = ("g",) if int(call.arg("groups")) > 1 else ()
    depth = (*group, *ins), (*group, *outs)
    weight: Dims = (depth[0], outs, *space) if call.arg("transposed") else (depth[1], ins, *space)
    return (("n",), depth[0], *space), weight, (depth[1],), (("n",), depth[1], *space)


def _forward(call: Call) -> Iterator[Strategy]:
    rank = len(call.result())
    if len(call.metas[0].shape) != rank or rank < 3:
        return iter((call.replicated(),))
    data, weight, bias, out = _dims(call, rank)
    return call.named({"input": data, "weight": weight, "bias": bias}, [out], added=["bias"])


def _backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.shape("input"))
    if rank < 3:
        return iter((call.replicated(),))
    data, weight, bias, out = _dims(call, rank)
    return call.named(
        {"grad_output": out, "input": data, "weight": weight}, [data, weight, bias], apart=frozenset({(2, "i")})
    )


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.convolution.default": _forward,
    "aten.convolution_backward.default": _backward,
}
