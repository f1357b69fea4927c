"""Cores that the ranks of a machine share: how fast each computes while others do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Machines whose ranks are runs in rank order, and what such a run computes at once.

    Cores are shared evenly, as by processor sharing (Kleinrock, "Time-shared systems: a theoretical treatment", J. ACM
    14(2), 1967): k ranks of a machine that compute go at min(1, cores / k) of the rate of one that has a core.
    """

    cores: float
    """Of one machine, in ranks that compute unhindered; two hardware threads of one core may be 1.2, say."""

    ranks: int
    """Of one machine."""

    width: int = 1
    """Ranks that compute at the same time because they are one rank of a pipeline."""

    def __post_init__(self) -> None:
        if self.cores <= 0 or self.ranks < 1 or self.width < 1:
            raise ValueError(
                f"{self.ranks} ranks in groups of {self.width} cannot share {self.cores:g} cores: more than 0 of each"
            )

    def rates(self, computing: Collection[int]) -> dict[int, float]:
        """Return, of each pipeline rank that computes, its rate over that of ranks with a core each.

        Where the pipeline rank lies on several machines, its slowest rank counts.
        """
        on = {each: Counter(rank // self.ranks for rank in self._members(each)) for each in computing}
        at_work: Counter[int] = Counter()
        for ranks in on.values():
            at_work.update(ranks)
        return {each: min(min(1.0, self.cores / at_work[machine]) for machine in ranks) for each, ranks in on.items()}

    def _members(self, pipeline_rank: int) -> range:
        return range(pipeline_rank * self.width, (pipeline_rank + 1) * self.width)
