"""What blocks of a program take and hold at least on the ranks that share samples: once for a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.api.carried import Carried
from autopar.api.floors import Floors, Parts, Work
from autopar.api.kinds import on_ranks
from autopar.api.solving import Solving
from autopar.api.wishes import Wishes
from autopar.errors import InfeasibleError
from autopar.ir.stages import homes
from autopar.search.meshes import Candidate, MeshAxis
from autopar.search.moved import Moved
from autopar.search.recomputing import Ways
from autopar.search.trials import Trial
from cost_models.cluster import ClusterSpec
from cost_models.errors import CostModelError


@dataclass
class Works:
    """The blocks of the program of one search, as they are with nothing recomputed; remembers what was asked."""

    solving: Solving
    wishes: Wishes
    _known: dict[tuple[int, Candidate, str], Work | None] = field(init=False, default_factory=dict)
    """By samples of a micro-batch, the ranks that do it, and the cluster that they are on, if told."""

    _ways: dict[tuple[int, int], Ways | None] = field(init=False, default_factory=dict)
    """By samples of a micro-batch, and ranks along which tensors are split."""

    _carried: dict[int, Carried | None] = field(init=False, default_factory=dict)
    """By ranks that take other samples."""

    @cached_property
    def floors(self) -> Floors:
        """Return the blocks between which the program may be cut."""
        return Floors(self.solving.graph("none", self.wishes), self.solving.optimizer)

    def of(self, size: int, ranks: Candidate, cluster: ClusterSpec | None = None) -> Work | None:
        """Return what blocks take at least with micro-batches of a size on some ranks; `None` where there is no price.

        On the slowest of all devices, or on those of a cluster of equal ones.
        """
        key = size, ranks, "" if cluster is None else cluster.fingerprint()
        if key not in self._known:
            trial = on_ranks(self.solving.program.batch_size, size, ranks)
            try:
                options, links = self.solving.choices(trial, self.wishes), self.solving.links(trial)
                device = links.cluster.device if cluster is None else cluster.device
                self._known[key] = self.floors.work(options, links.sizes, device)
            except (CostModelError, InfeasibleError):
                self._known[key] = None
        return self._known[key]

    def shared(self, size: int, ranks: Candidate, sharing: int, cluster: ClusterSpec | None = None) -> Parts | None:
        """Return the same where so many such groups of ranks split the batch, and parameters with it."""
        own, batch = self.of(size, ranks, cluster), self.solving.program.batch_size
        together = size * sharing
        # Where the batch does not divide by them all, fewer samples take no longer.
        theirs = self.of(together, ranks, cluster) if sharing > 1 and batch % together == 0 else own
        return None if own is None or theirs is None else own.shared_by(sharing, theirs)

    def moved(self, trial: Trial) -> Moved | None:
        """Return what a trial moves of each block's parameters and gradients at least; `None` if nothing is known."""
        ranks = next(
            (axis.size for role in ("dp_shard", "dp_replicate") for axis in trial.ranks if axis.role == role), 1
        )
        if ranks == 1:
            return None
        if ranks not in self._carried:
            try:
                options = self.solving.choices(Trial((MeshAxis("dp_shard", ranks),)), self.wishes)
                floors = self.floors
                self._carried[ranks] = Carried(floors.graph, homes(floors.graph), floors.optimizer, options)
            except (CostModelError, InfeasibleError):
                self._carried[ranks] = None
        carried = self._carried[ranks]
        return None if carried is None else carried.moved(trial, self.solving.links(trial))

    def ways(self, size: int, width: int) -> Ways | None:
        """Return what ways of recomputing each block take at least, and keep of all samples, whole; `None` as above."""
        key = size, width
        if key not in self._ways:
            work = self.of(size, (MeshAxis("tp", width),) if width > 1 else ())
            again = None if work is None else work.shared_by(1, work).again_s
            self._ways[key] = None if again is None else Ways(again, self.floors.saved_bytes)
        return self._ways[key]
