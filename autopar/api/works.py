"""What blocks of a program take and hold at least on the ranks along which tensors are split: once for a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.api.floors import Floors, Work
from autopar.api.kinds import tensor_parallel
from autopar.api.solving import Solving
from autopar.api.wishes import Wishes
from autopar.errors import InfeasibleError
from autopar.search.recomputing import Ways
from cost_models.cluster import ClusterSpec
from cost_models.errors import CostModelError


@dataclass
class Works:
    """The blocks of the program of one search, as they are with nothing recomputed; remembers what was asked."""

    solving: Solving
    wishes: Wishes
    _known: dict[tuple[int, int, str], Work | None] = field(init=False, default_factory=dict)
    """By samples of a micro-batch, ranks along which tensors are split, and the cluster that they are on, if told."""

    @cached_property
    def floors(self) -> Floors:
        """Return the blocks between which the program may be cut."""
        return Floors(self.solving.graph("none", self.wishes), self.solving.optimizer)

    def of(self, size: int, width: int, cluster: ClusterSpec | None = None) -> Work | None:
        """Return what blocks take at least with micro-batches of a size; `None` where operators have no price.

        On the slowest of all devices, or on those of a cluster of equal ones.
        """
        key = size, width, "" if cluster is None else cluster.fingerprint()
        if key not in self._known:
            trial = tensor_parallel(self.solving.program.batch_size, size, width)
            try:
                options, links = self.solving.choices(trial, self.wishes), self.solving.links(trial)
                device = links.cluster.device if cluster is None else cluster.device
                self._known[key] = self.floors.work(options, links.sizes, device)
            except (CostModelError, InfeasibleError):
                self._known[key] = None
        return self._known[key]

    def ways(self, size: int, width: int) -> Ways | None:
        """Return what ways of recomputing each block take at least, and keep of all samples, whole; `None` as above."""
        work = self.of(size, width)
        return None if work is None else Ways(work.again_s, self.floors.saved_bytes)
