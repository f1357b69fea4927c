"""Operators that captured programs contain beside torch's own: `autopar_ops::NAME`."""

from __future__ import annotations

from typing import Any

import torch

_ATEN: Any = torch.ops.aten
_NONE = 0
"""Torch's number for `reduction="none"`."""

PART_BYTES = {"cpu": 1 << 20, "other": 1 << 26}
"""How much of the logits' gradient is made at a time: what a core's cache holds; on other devices, enough that starting
a kernel costs nothing beside it."""

_ARGUMENTS = "Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight"

_LIBRARY: Any = torch.library.Library("autopar_ops", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"cross_entropy_backward(Tensor grad_output, Tensor self, {_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"cross_entropy_backward_(Tensor grad_output, Tensor(a!) self, {_ARGUMENTS}) -> Tensor(a!)")


def cross_entropy_backward(grad_output: torch.Tensor, scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of logits [n, c, ...] from that of `nll_loss` of their `log_softmax`, `scores`.

    Arguments are those of `aten.nll_loss_backward`. That operator and log_softmax's own backward make two tensors of
    the logits' size beside `scores`, the first of zeros but for a number a row. Here both run on a few rows at a time:
    the result is the same bit for bit, and the first is never whole.
    """
    return _made_in(torch.empty_like(scores), grad_output, scores, *rest)


def _cross_entropy_backward_(grad_output: torch.Tensor, scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    # The kernel reads a row to its end before it writes it, and then each number where it read it.
    return _made_in(scores, grad_output, scores, *rest)


def _made_in(
    made: torch.Tensor,
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    kernel = _ATEN.nll_loss2d_backward.default if scores.dim() == 4 else _ATEN.nll_loss_backward.default
    samples = max(1, scores.shape[0])
    sample_bytes = max(1, scores.numel() * scores.element_size() // samples)
    count = max(1, PART_BYTES["cpu" if scores.device.type == "cpu" else "other"] // sample_bytes)
    for first in range(0, scores.shape[0], count):
        rows = slice(first, first + count)
        part = scores[rows]
        own = grad[rows] if reduction == _NONE else grad
        given = kernel(own, part, target[rows], weight, reduction, ignored, total)
        _ATEN._log_softmax_backward_data.out(given, part, 1, scores.dtype, out=made[rows])
        del given  # before the next is made
    return made


def _as_scores(grad_output: torch.Tensor, scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(scores)


def _the_scores(grad_output: torch.Tensor, scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return scores


_LIBRARY.impl("cross_entropy_backward", cross_entropy_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("cross_entropy_backward_", _cross_entropy_backward_, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_ops::cross_entropy_backward", _as_scores, lib=_LIBRARY)
torch.library.register_fake("autopar_ops::cross_entropy_backward_", _the_scores, lib=_LIBRARY)

CROSS_ENTROPY_BACKWARD: Any = torch.ops.autopar_ops.cross_entropy_backward.default
CROSS_ENTROPY_BACKWARD_: Any = torch.ops.autopar_ops.cross_entropy_backward_.default
