"""Sharding rules of a recurrent layer: samples alone, for each step needs all features of the one before it.

input [t, b, i], states [d, b, h], weights whole   ->   out [t, b, d h], states [d, b, h]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import autopar.own_recurrence  # noqa: F401  rules ask for the signatures of its operators
from autopar.ir.rule import Dims
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call

_STATE: Dims = ((), ("b",), ())


def _of_samples(call: Call) -> Dims:
    return (("b",), (), ()) if call.arg("batch_first") else _STATE


def _forward(call: Call) -> Iterator[Strategy]:
    outputs = [_of_samples(call), *[_STATE] * (len(call.op.outputs) - 1)]
    return call.named({"input": _of_samples(call), "states": _STATE}, outputs)


def _backward(call: Call) -> Iterator[Strategy]:
    of_states = {"grad_hidden": _STATE, "grad_cell": _STATE, "states": _STATE}
    states = len(call.arg("states"))
    weights: list[Dims] = [((),) * (0 if meta is None else len(meta.shape)) for meta in call.op.outputs[1 + states :]]
    return call.named(
        {"grad_out": _of_samples(call), "input": _of_samples(call), **of_states},
        [_of_samples(call), *[_STATE] * states, *weights],
        linear=[["grad_out", "grad_hidden", "grad_cell"]],
    )


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "autopar_ops.lstm_layer.default": _forward,
    "autopar_ops.rnn_layer.default": _forward,
    "autopar_ops.lstm_layer_backward.default": _backward,
    "autopar_ops.rnn_layer_backward.default": _backward,
}
