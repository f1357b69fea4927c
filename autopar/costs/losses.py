"""What software other than ours makes of cross entropy: kernels over the logits, and what they hold.

Our programs run `log_softmax` and a backward in one operator (`own_operators.py`). Published runs did not; which they
did is `DeviceSpec.cross_entropy`, set by their stack. Passes are counted in the sources named in `Stack.cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Op

_FORWARD = "aten._log_softmax.default"
_BACKWARD = "autopar_ops.cross_entropy_backward.default"

NLL_FORWARD = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
"""Operators that read one score a row, of all that they are given."""

_AGAIN = 0.25
"""What reading a row again costs of reading it, shortly after: it is in the cache in part (`_EXTRA_PASSES`)."""


@dataclass(frozen=True, slots=True)
class LossKernels:
    """What one operator of the program is in other software; a pass reads or writes as much as the scores are."""

    scores: int
    """Which operand the scores are."""

    passes: float
    held: float = 0.0
    """Times the scores' bytes that are held while it runs, beside what it reads and what it makes.

    Below zero where its result takes the place of what it reads.
    """


_FLASH_BACKWARD = LossKernels(1, 2)

_MADE: Mapping[str, Mapping[str, LossKernels]] = {
    "torch": {
        # The scores are read for their maximum, their sum and the result; what they were cast from stays beside it.
        _FORWARD: LossKernels(0, 2 + 2 * _AGAIN, held=1.0),
        # Of nll_loss zeros but for a number a row; log_softmax reads them for their sum, then both, and writes.
        _BACKWARD: LossKernels(1, 1 + 1 + _AGAIN + 1 + 1, held=1.0),
    },
    "vocab_parallel": {
        # max; subtract; exp; sum; divide, the result in place of the scores.
        _FORWARD: LossKernels(0, 1 + 2 + 2 + 1 + 2),
        # The softmax less one at the target, times the loss's gradient, in place of what forward kept.
        _BACKWARD: LossKernels(1, 2, held=-1.0),
    },
    "vocab_parallel_fused": {
        # The cast makes the maximum, too; subtract, exp and sum; divide.
        _FORWARD: LossKernels(0, 2 + 2),
        # The same, and what it makes goes into the cast.
        _BACKWARD: LossKernels(1, 1, held=-1.0),
    },
    # flash-attn's kernel reads logits of 16 bits for maximum and sum and keeps a number a row.
    "flash": {_FORWARD: LossKernels(0, 1 + _AGAIN), _BACKWARD: _FLASH_BACKWARD},
    "composer": {
        # After backward, both metrics cast them to float32 (a read, a write of twice the bytes) and run torch's
        # log_softmax on that.
        _FORWARD: LossKernels(0, 1 + _AGAIN + 2 * (3 + 2 * (2 + 2 * _AGAIN))),
        _BACKWARD: _FLASH_BACKWARD,
    },
}


def loss_kernels(op: Op, software: str) -> LossKernels | None:
    """Return what an operator of cross entropy is in a kind of software; None: of other operators, and in our own."""
    return _MADE.get(software, {}).get(op.target)
