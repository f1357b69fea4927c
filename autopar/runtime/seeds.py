"""The seed of each step, equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.errors import generators_drifted
from autopar.runtime.program import Seeding
from autopar.runtime.ranks import Ranks

_MASK = (1 << 64) - 1


def microbatch_seed(seed: int, microbatch: int) -> int:
    """Return the seed of one micro-batch of a step, unrelated to the others' (splitmix64); the first has the step's."""
    if not microbatch:
        return seed
    z = (seed ^ microbatch * 0xD1342543DE82EF95) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class Seeds:
    """Draws one seed a step from torch's default generator, so that `torch.manual_seed` decides it.

    Ranks whose generators are in the same state at the first step draw for themselves, and
    compare in the background. Ranks that were seeded differently all take rank 0's, at the
    price of one small broadcast a step.
    """

    def __init__(self, seeding: Seeding, ranks: Ranks) -> None:
        self._next = seeding.next_seed
        self._ranks = ranks
        self._shared: bool | None = None
        self._check: tuple[int, torch.Tensor, Any] | None = None

    def draw(self) -> int:
        """Return the seed of the next step; all ranks must call this.

        Raises:
            RanksDisagreeError: the ranks drew alike at first and no longer do.
        """
        seed = self._next()
        if self._ranks.world_size == 1:
            return seed
        if self._shared is None:
            self._shared = len(set(self._ranks.gather(seed))) > 1
        if self._shared:
            told = torch.tensor([seed], device=self._ranks.device)
            dist.broadcast(told, src=0)
            return int(told)
        self._verify()
        # Of a number and its negative, the maxima over all ranks tell whether all have the same.
        pair = torch.tensor([seed, -seed], device=self._ranks.device)
        self._check = (seed, pair, dist.all_reduce(pair, dist.ReduceOp.MAX, async_op=True))
        return seed

    def _verify(self) -> None:
        if self._check is None:
            return
        seed, pair, work = self._check
        work.wait()
        if pair.tolist() != [seed, -seed]:
            raise generators_drifted()
