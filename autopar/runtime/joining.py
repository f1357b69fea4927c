"""How the terms that micro-batches give for one value make that value."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

JOIN: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""Two terms to one, by the reduction of which they are terms."""
