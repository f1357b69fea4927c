"""One layer of a recurrent network as one operator: `autopar_ops::lstm_layer` and `autopar_ops::rnn_layer`.

    input [t, b, i], states [d, b, h], weights   →   output [t, b, d h], last states [d, b, h]      d: directions

Torch would unroll it over the steps of a sequence, thousands of operators that cost more to plan and to launch than to
compute, and that no device's own kernel (cuDNN's, MIOpen's, oneDNN's) stands for. Backward runs the layer again and
differentiates what torch's kernel of the device did, so nothing of it is kept but what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]

_READS = "Tensor input, Tensor[] states, Tensor[] weights, str kind, bool biased, bool batch_first"
_LIBRARY: Any = torch.library.Library("autopar_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"lstm_layer({_READS}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"rnn_layer({_READS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"lstm_layer_backward(Tensor grad_out, Tensor grad_hidden, Tensor grad_cell, {_READS}) -> Tensor[]")
_LIBRARY.define(f"rnn_layer_backward(Tensor grad_out, Tensor grad_hidden, {_READS}) -> Tensor[]")


def _run(
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: Kind,
    biased: bool,
    batch_first: bool,
    *,
    train: bool = False,
) -> tuple[Tensor, ...]:
    """Return the output and the last states of one layer, by torch's kernel of the device."""
    both = states[0].shape[0] == 2
    run: Any = getattr(torch, kind)
    hidden = tuple(states) if kind == "lstm" else states[0]
    made: tuple[Tensor, ...] = run(input, hidden, list(weights), biased, 1, 0.0, train, both, batch_first)
    return tuple(each.contiguous() for each in made)


def _gradients(
    grads: Sequence[Tensor], input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *how: Any
) -> list[Tensor]:
    """Return the gradients of the input, the states and the weights, in this order."""
    read = [each.detach().requires_grad_() for each in (input, *states, *weights)]
    count = len(states)
    with torch.enable_grad():
        made = _run(read[0], read[1 : 1 + count], read[1 + count :], *how, train=True)
        found = torch.autograd.grad(made, read, list(grads))
    return [each.contiguous() for each in found]


def _shapes(
    input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], kind: Kind, *_: Any
) -> tuple[Tensor, ...]:
    directions, size = states[0].shape[0], states[0].shape[2]
    return (
        input.new_empty((*input.shape[:2], directions * size)),
        *(each.new_empty(each.shape) for each in states),
    )


def _lstm_backward(grad_out: Tensor, grad_hidden: Tensor, grad_cell: Tensor, *read: Any) -> list[Tensor]:
    return _gradients((grad_out, grad_hidden, grad_cell), *read)


def _rnn_backward(grad_out: Tensor, grad_hidden: Tensor, *read: Any) -> list[Tensor]:
    return _gradients((grad_out, grad_hidden), *read)


def _like_read(input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (input, *states, *weights)]


def _saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, states, weights, *how = inputs
    ctx.states, ctx.how = len(states), how
    ctx.save_for_backward(input, *states, *weights)


def _differentiated(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    input, *rest = ctx.saved_tensors
    of_states = ctx.states
    ops = torch.ops.autopar_ops
    backward = ops.lstm_layer_backward if of_states == 2 else ops.rnn_layer_backward
    found = backward(*grads, input, rest[:of_states], rest[of_states:], *ctx.how)
    return found[0], list(found[1 : 1 + of_states]), list(found[1 + of_states :]), None, None, None


for _name, _impl, _fake in (
    ("lstm_layer", _run, _shapes),
    ("rnn_layer", _run, _shapes),
    ("lstm_layer_backward", _lstm_backward, lambda _out, _hidden, _cell, *read: _like_read(*read)),
    ("rnn_layer_backward", _rnn_backward, lambda _out, _hidden, *read: _like_read(*read)),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_ops::{_name}", _fake, lib=_LIBRARY)
for _name in ("lstm_layer", "rnn_layer"):
    torch.library.register_autograd(f"autopar_ops::{_name}", _differentiated, setup_context=_saved, lib=_LIBRARY)

LSTM_LAYER: Any = torch.ops.autopar_ops.lstm_layer.default
RNN_LAYER: Any = torch.ops.autopar_ops.rnn_layer.default
