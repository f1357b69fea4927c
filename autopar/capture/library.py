"""What torch's own library asks of values while it is traced, answered without looking at them.

- `torch.distributions` checks parameters and values unless told not to: its checks are left out, as Python's `-O` does.
  Which formula a pair of distributions has for `kl_divergence` is looked up ahead, in a way that cannot be traced.
- `nn.TransformerEncoder` and `nn.TransformerDecoder` compare a mask with the causal one to name its kind; the mask is
  then given as it is, which is the same, and `masks.py` finds causal ones by their values.
- `gaussian_nll_loss` refuses negative variances; they are not looked for.
- `ctc_loss` makes a table as long as the longest target: with padded targets its size is taken from them.
- `torch.bincount` is as long as its largest value asks for; with a `minlength`, as loads of experts have it, that long:
  larger values, for which torch would make it longer, fail when they are counted.
- `torch.combinations` looks for its places by a mask; how many there are, and which, its input's size says.
- `torch.jit.isinstance` of a plain class is Python's own `isinstance`.
- `torch.linalg.inv`, `cholesky` and `solve` refuse singular matrices, by an operator that must stay in order with
  others; here it need not, and is dropped with the other checks.
- Nobody captures a CUDA graph of a model that autopar captures: `torch.cuda.is_current_stream_capturing()` is false.
- `multilabel_margin_loss` stays an operator: what torch 2.13 writes it out in counts the places behind a sample's
  last label as label 0, so the loss is another than in eager.
- `module.to(dtype)` in forward, where the module has that dtype already, changes nothing (Switch's router).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributions import Distribution, kl
from torch.nn import functional
from torch.nn.modules import transformer

import autopar.own_operators  # noqa: F401  the program may contain them
from autopar._torch import without_effect
from autopar._torch_tracing import undecomposed

_jit_isinstance = torch.jit.isinstance


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Let torch's library be traced as if every such check had passed."""
    for pair in kl._KL_REGISTRY:
        kl._KL_MEMOIZE.setdefault(pair, kl._dispatch_kl(*pair))  # type: ignore[no-untyped-call]
    validates = Distribution._validate_args
    with ExitStack() as stack:
        stack.enter_context(patch.object(transformer, "_detect_is_causal_mask", _is_causal))
        stack.enter_context(patch.object(functional, "gaussian_nll_loss", _gaussian_nll_loss))
        stack.enter_context(patch.object(functional, "ctc_loss", _ctc_loss))
        stack.enter_context(patch.object(torch, "bincount", _bincount))
        stack.enter_context(patch.object(torch.Tensor, "bincount", _bincount))
        stack.enter_context(patch.object(torch, "combinations", _combinations))
        stack.enter_context(patch.object(torch.jit, "isinstance", _isinstance))
        for library in (torch.cuda, torch.xpu):
            stack.enter_context(patch.object(library, "is_current_stream_capturing", _is_capturing, create=True))
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(without_effect("aten::_linalg_check_errors"))
        stack.enter_context(undecomposed(torch.ops.aten.multilabel_margin_loss_forward.default))
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(validates)


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return what the caller said of the mask; `False` where nothing was said: it counts as any other mask."""
    return is_causal is True


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return `torch.nn.functional.ctc_loss`; targets without padding, one behind the other, are torch's to refuse."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        return _torch_ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity=zero_infinity
        )
    inputs, aims = _lengths(input_lengths, log_probs), _lengths(target_lengths, log_probs)
    losses: torch.Tensor
    losses, _ = torch.ops.autopar_ops.ctc_loss(log_probs, targets, inputs, aims, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == "mean":
        return (losses / aims.clamp_min(1)).mean()
    return losses.sum() if reduction == "sum" else losses


_torch_ctc_loss = functional.ctc_loss


def _lengths(given: torch.Tensor | Sequence[int], beside: torch.Tensor) -> torch.Tensor:
    """Return lengths as a tensor; equal ones belong to no sample, so that micro-batches have theirs."""
    if isinstance(given, torch.Tensor):
        return given
    if len(set(given)) == 1:
        return torch.full((len(given),), given[0], dtype=torch.int64, device=beside.device)
    return torch.tensor(list(given), device=beside.device)


def _bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Return `torch.bincount` of values below `minlength`; without that its length is torch's to find."""
    if minlength == 0:
        return _torch_bincount(input, weights, minlength)
    if weights is None:
        counted = torch.ones_like(input, dtype=torch.int64)
    else:
        counted = weights.detach()
        counted = counted if counted.dtype is torch.float32 else counted.double()
    return input.new_zeros(minlength, dtype=counted.dtype).scatter_add(0, input.long(), counted)


_torch_bincount = torch.bincount


def _combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Return `torch.combinations`; what is no vector, or gives none, is torch's to answer."""
    again = 1 if with_replacement else 0
    room = range(input.numel() + again * (r - 1))
    places = list(itertools.combinations(room, r)) if input.dim() == 1 and r > 0 else []
    if not places:
        return _torch_combinations(input, r, with_replacement)
    # With replacement they are those of a longer vector, each place moved back by how many come before it.
    return input[torch.tensor([[at - again * i for i, at in enumerate(each)] for each in places], device=input.device)]


_torch_combinations = torch.combinations


def _isinstance(value: object, kind: Any) -> bool:
    return isinstance(value, kind) if isinstance(kind, type) else _jit_isinstance(value, kind)  # type: ignore[no-untyped-call]


def _is_capturing() -> bool:
    return False


def _apply(self: nn.Module, function: Any, recurse: bool = True) -> Any:
    """Return the module as it is, if that is all that the function would make of it; else torch's to refuse."""
    for each in (*self.parameters(), *self.buffers()):
        made = function(each)
        if made.dtype is not each.dtype or made.device != each.device or made.shape != each.shape:
            return _torch_apply(self, function, recurse)  # type: ignore[no-untyped-call]
    return self


_torch_apply = nn.Module._apply


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return `torch.nn.functional.gaussian_nll_loss` of variances that are not negative."""
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
