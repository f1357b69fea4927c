"""Operators that captured programs contain beside torch's own: `autopar_ops::NAME`."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.errors import NotFiniteError

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

_ALIGNED = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_LIBRARY.define(f"ctc_loss({_ALIGNED}, int blank, bool zero_infinity) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"ctc_loss_backward(Tensor grad, {_ALIGNED}, Tensor losses, Tensor log_alpha, int blank, bool zero_infinity)"
    " -> Tensor"
)

_LIBRARY.define("is_finite(Tensor self) -> Tensor")
_LIBRARY.define("finite(Tensor self, str where) -> Tensor", tags=(torch.Tag.pointwise,))


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    return values.isfinite().all()


def not_finite(where: str, count: int, of: int) -> NotFiniteError:
    """Return the error for values that are not finite where forward would have taken another branch for them."""
    return NotFiniteError(
        f"{count} of {of} values that {where} asks about are not finite (NaN or infinite); the program was captured "
        "with the branch for finite ones, and has no other\n"
        "find what overflows (a learning rate, a division by zero, a loss of float16), or compute both branches and "
        "choose with torch.where"
    )


def _finite(values: torch.Tensor, where: str) -> torch.Tensor:
    """Return the values, a tensor of its own, and raise where one is not finite; the branch for those was not traced.

    A GPU is not waited for: its own assertion ends the program.
    """
    if values.device.type == "meta":
        return torch.empty_like(values)
    found = values.isfinite()
    if values.device.type != "cpu":
        torch._assert_async(found.all(), f"values that {where} asks about are not finite")
    elif not found.all():
        raise not_finite(where, int((~found).sum()), values.numel())
    return values.clone()


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


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sample and its forward variables [n, t, 2 s + 1], as `torch._ctc_loss` does.

    Given are log-probabilities [t, n, c] and padded targets [n, s]. Torch makes the variables as long as the longest
    target, a number that only the lengths tell; here they are as long as a target may be, which is a size. What is
    beyond is never read.
    """
    losses, made = torch._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    steps, samples = log_probs.shape[:2]
    log_alpha = made.new_full((samples, steps, 2 * targets.shape[1] + 1), -math.inf)
    step, place = (torch.arange(size, device=made.device) for size in made.shape[1:])
    lengths = (each.to(made.device) for each in (input_lengths, 2 * target_lengths + 1))
    used_steps, used = (at < each[:, None] for at, each in zip((step, place), lengths, strict=True))
    # The kernel leaves memory as it finds it where a sample has no variables.
    log_alpha[..., : len(place)] = made.masked_fill(~(used_steps[:, :, None] & used[:, None]), -math.inf)
    return losses, log_alpha


def _ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    log_alpha: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    longest = int(target_lengths.max()) if len(target_lengths) else 0
    made = log_alpha[..., : 2 * longest + 1].contiguous()
    given: torch.Tensor = _ATEN._ctc_loss_backward.Tensor(
        grad, log_probs, targets, input_lengths, target_lengths, losses, made, *rest
    )
    return given


def _ctc_shapes(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    steps, samples = log_probs.shape[:2]
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * targets.shape[1] + 1)


def _ctc_saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.rest = inputs[4:]


def _ctc_gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.autopar_ops.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest), *(None,) * 5


_LIBRARY.impl("is_finite", _is_finite, "CompositeExplicitAutograd")
_LIBRARY.impl("finite", _finite, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_ops::is_finite", lambda self: self.new_empty((), dtype=torch.bool), lib=_LIBRARY)
torch.library.register_fake("autopar_ops::finite", lambda self, _: torch.empty_like(self), lib=_LIBRARY)

_LIBRARY.impl("ctc_loss", ctc_loss, "CompositeExplicitAutograd")
_LIBRARY.impl("ctc_loss_backward", _ctc_loss_backward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_ops::ctc_loss", _ctc_shapes, lib=_LIBRARY)
torch.library.register_fake(
    "autopar_ops::ctc_loss_backward", lambda grad, log_probs, *_: torch.empty_like(log_probs), lib=_LIBRARY
)
torch.library.register_autograd("autopar_ops::ctc_loss", _ctc_gradient, setup_context=_ctc_saved, lib=_LIBRARY)

_LIBRARY.impl("cross_entropy_backward", cross_entropy_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("cross_entropy_backward_", _cross_entropy_backward_, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_ops::cross_entropy_backward", _as_scores, lib=_LIBRARY)
torch.library.register_fake("autopar_ops::cross_entropy_backward_", _the_scores, lib=_LIBRARY)

CROSS_ENTROPY_BACKWARD: Any = torch.ops.autopar_ops.cross_entropy_backward.default
CROSS_ENTROPY_BACKWARD_: Any = torch.ops.autopar_ops.cross_entropy_backward_.default
