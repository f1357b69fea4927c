"""Rough seconds of trials, for an order to try them in, and what follows from these for sure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log

from autopar.api.crossings import least_handing
from autopar.api.kinds import alone, shape_of, tensor_parallel
from autopar.api.pipelining import Wanted
from autopar.api.schedules import run_of, ways_to_run
from autopar.api.sequences import share_of_tokens
from autopar.api.solving import Solving
from autopar.api.turns import AT_MOST
from autopar.api.wishes import Wishes
from autopar.api.works import Works
from autopar.costs.links import Message
from autopar.costs.rough import Rough, Shape, Taken, evenly
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.roles import gradient_like, of_parameters, parameter_like, passes
from autopar.search.ilp import Ilp, Limits
from autopar.search.recomputing import share_of_seconds
from autopar.search.trials import Recompute, Trial, settled
from autopar.strategies.experts import experts
from cost_models.errors import CostModelError

_SAMPLED = 2
"""Micro-batch sizes for each width whose seconds are computed; those between are interpolated."""

_SHARE, _AGAIN_SHARE = 0.4, 0.15
"""Share of the time left after which estimates of further widths are taken from those of the others, and what
recomputation adds to them is."""


@dataclass
class Estimates:
    """What trials take, from what micro-batches take on tensor-parallel ranks alone; remembers what they share."""

    works: Works
    mixes: bool
    """Whether blocks may be recomputed each in its way."""

    left_s: Callable[[], float]
    """Return what is left of the time limit."""

    no_price: dict[int, str] = field(init=False, default_factory=dict)
    """Why nothing has a price on as many ranks along which tensors are split."""

    _taken: dict[tuple[Recompute, int, int], Taken] = field(init=False, default_factory=dict)
    """By recomputation, ranks along which tensors are split, and samples of a micro-batch."""

    _least_s: dict[tuple[Recompute, int, int], float] = field(init=False, default_factory=dict)
    """The same without what ranks that split the batch may share, which says nothing of what each of them does."""

    _mixed: dict[Trial, float] = field(init=False, default_factory=dict)
    """Estimates of trials that recompute everything, over those of recomputing only what memory asks for."""

    _fastest: dict[Trial, Wanted] = field(init=False, default_factory=dict)
    """The schedule that an estimate is of."""

    _sizes: dict[int, list[int]] = field(init=False, default_factory=dict)
    """Micro-batch sizes whose seconds are computed, sorted, by the ranks along which tensors are split."""

    _kept_s: float = field(init=False, default=0.0)
    """What estimates leave of the time limit."""

    _kept_of_again_s: float = field(init=False, default=0.0)
    """The same of what recomputation adds."""

    @property
    def solving(self) -> Solving:
        """Return what solves trials."""
        return self.works.solving

    @property
    def wishes(self) -> Wishes:
        """Return what trials have to meet."""
        return self.works.wishes

    def of(self, trials: Sequence[Trial], *, fits: bool) -> dict[Trial, float]:
        """Return about how many seconds a step of each trial takes; infinite where it has no price or does not fit.

        `fits`: something is known to fit with nothing recomputed, so that estimates of recomputing matter little.
        """
        self._kept_s, self._kept_of_again_s = (
            (1.0 - each) * max(self.left_s(), 0.0) for each in (_SHARE, _AGAIN_SHARE)
        )
        wanted: dict[int, set[int]] = {}
        for trial in (each for one in trials for each in self._settled(one)):
            wanted.setdefault(shape_of(trial).width, set()).add(self._size(trial))
        self._sizes = {width: _spread(sorted(sizes), _SAMPLED) for width, sizes in wanted.items()}
        return {trial: self._with_host_s(trial, fits=fits) for trial in trials}

    def more(self, trials: Sequence[Trial], *, fits: bool) -> dict[Trial, float]:
        """Return the same of further trials."""
        for trial in (each for one in trials for each in self._settled(one)):
            sizes, size = self._sizes.setdefault(shape_of(trial).width, []), self._size(trial)
            if not sizes or not sizes[0] <= size <= sizes[-1]:
                insort(sizes, size)
        return {trial: self._with_host_s(trial, fits=fits) for trial in trials}

    def _with_host_s(self, trial: Trial, *, fits: bool) -> float:
        return max(self._estimate_s(trial, fits=fits), self.solving.issued_s(trial))

    def way(self, trial: Trial) -> Wanted | None:
        """Return the schedule by which a pipeline is estimated to be fastest, if it was."""
        return self._fastest.get(trial)

    def slack(self, trial: Trial) -> float:
        """Return how many times as long as the best plan a trial may take: what recomputing less is to save."""
        return self._mixed.get(trial, 1.0)

    def bound_s(self, trial: Trial) -> float:
        """Return seconds that no plan of a trial beats, 0 if nothing is known; less may be recomputed: not if mixed."""
        ways: tuple[Recompute, ...] = (trial.recompute, "none")
        issued_s = self.solving.issued_s(trial)
        if self.is_unknown(trial):
            return issued_s
        sample_s = max(self._sample_s(trial, self._least_s, way) for way in ways)
        samples = self.solving.program.batch_size / trial.replicas
        return max(issued_s, sample_s * samples / self.solving.at_once(trial))

    def microbatch_s(self, trial: Trial) -> float:
        """Return seconds that a micro-batch takes at least through all stages, nothing recomputed, 0 if unknown."""
        return 0.0 if self.is_unknown(trial) else self._sample_s(trial, self._least_s) * self._size(trial)

    def relaxed_s(self, trial: Trial, left_s: float | None = None) -> float:
        """Return the bound of a trial's relaxation if memory were no limit, all its stages one after another.

        Not after `left_s`: a share of what is left for trials is what the relaxation may take by default.
        """
        return self._relaxed_s(trial, AT_MOST * self.left_s() if left_s is None else left_s)[0]

    def _relaxed_s(
        self, trial: Trial, left_s: float, without: Callable[[Graph], frozenset[str]] | None = None
    ) -> tuple[float, Mapping[str, float]]:
        """Return that bound without what some operators take, and the least that each of these takes."""
        try:
            _, pricing = self.solving.price(trial, self.wishes, without)
        except (CostModelError, InfeasibleError) as error:
            self.no_price.setdefault(shape_of(trial).width, str(error))
            return inf, {}
        limits = Limits(inf, max(left_s, 0.1), seed=self.solving.options.seed)
        return Ilp(pricing.table).relaxed(limits).free_s, pricing.without_s

    def _sample_s(
        self, trial: Trial, known_s: Mapping[tuple[Recompute, int, int], float], recompute: Recompute = "none"
    ) -> float:
        """Return what a sample takes at least on the ranks that share it: samples cost least in large batches.

        Tokens that several ranks split cost no less than an even share of it. 0 for axes that may split the batch:
        other ranks may then do what is counted here.
        """
        if any(axis.role == "free" for axis in trial.ranks):
            return 0.0
        tokens, width = alone(trial)
        largest = self._largest(trial)
        return known_s.get((recompute, width, largest), 0.0) / (max(largest, 1) * tokens)

    def work_s(self, trial: Trial) -> float:
        """Return about what a trial's work takes, nothing recomputed, collectives of its samples' ranks included."""
        known_s = {key: sum(taken) for key, taken in self._taken.items()}
        return self._sample_s(trial, known_s) * (self.solving.program.batch_size / trial.replicas)

    def is_unknown(self, trial: Trial) -> bool:
        """Return whether what was looked at bounds nothing of a trial: its samples may cost less than those did.

        In a micro-batch that is larger, or where experts are split: a rank reads fewer for the tokens of more samples.
        """
        return self._size(trial) > self._largest(trial) or any(axis.role == "ep" for axis in trial.ranks)

    def _largest(self, trial: Trial) -> int:
        """Return the most samples of a micro-batch that seconds are computed of, 0 if of none."""
        return self._sizes.get(alone(trial)[1], [0])[-1]

    def _size(self, trial: Trial) -> int:
        return max(1, self.solving.program.batch_size // (trial.microbatches * trial.replicas))

    def _settled(self, trial: Trial) -> list[Trial]:
        """Return what a trial is at its simplest: itself, or with free axes of one kind, where the batch divides."""
        found = [replace(trial, mesh=mesh) for mesh in settled(trial.mesh)]
        batch = self.solving.program.batch_size // trial.microbatches
        return [each for each in found if batch % each.replicas == 0] or [trial]

    def _estimate_s(self, trial: Trial, *, fits: bool) -> float:
        """Return about what a trial takes: with free axes, what they take that are all of the better kind."""
        found = {each: self._settled_s(each, fits=fits) for each in self._settled(trial)}
        best = min(found, key=found.__getitem__)
        if best in self._mixed:
            self._mixed[trial] = self._mixed[best]
        if best in self._fastest:
            self._fastest[trial] = self._fastest[best]
        return found[best]

    def _settled_s(self, trial: Trial, *, fits: bool) -> float:
        shape, size = shape_of(trial), self._size(trial)
        budget = self.solving.mean_budget(trial.depth)
        # Devices that are faster than the slowest take a larger share of the work.
        tokens = share_of_tokens(self.solving.program, *alone(trial))
        once = self._microbatch("none", shape, size).times(Taken(tokens, 1.0, 1.0, tokens))
        once = once.times(evenly(shape.depth / self.solving.pace(shape.depth)))
        if trial.recompute == "none":
            return self._run_s(trial, self.solving.rough("none", self.wishes), once)
        more = self._more(trial.recompute, shape, fits=fits)
        rough = self.solving.rough(trial.recompute, self.wishes)
        found = self._run_s(trial, rough, once.times(more))
        if not self.mixes or found == inf:
            return found
        share = self.solving.rough("none", self.wishes).share_over(shape, rough, budget)
        ways = self.works.ways(self._sizes[shape.width][-1], shape.width)
        share = share if ways is None else share_of_seconds(ways, share)
        mixed = self._run_s(trial, rough, once.towards(once.times(more), share))
        self._mixed[trial] = found / mixed if mixed else 1.0
        return mixed

    def _run_s(self, trial: Trial, rough: Rough, microbatch: Taken) -> float:
        """Return what a step takes by the fastest schedule, given a micro-batch through all stages on one replica.

        With messages between stages: all over the slowest of the links, or one way. That is as fast as schedules can
        be: one that has few micro-batches under way waits for messages besides.
        """
        shape, budget = shape_of(trial), self.solving.mean_budget(trial.depth)
        if trial.depth == 1:
            return rough.estimates_s(shape, microbatch, budget)[0]
        ways = ways_to_run(trial, self.wishes, rough.blocks)
        runs = [run_of(wanted, trial.microbatches) for wanted in ways]
        steps = rough.estimates_s(shape, microbatch, budget, runs)
        sizes = tuple(axis.size for axis in trial.ranks)
        sent = self.works.floors.crossing_bytes / (shape.microbatches * shape.replicas * shape.width)
        handing = least_handing(self.solving.equal, trial.depth, sizes, sent)
        found = [
            max(step_s, run.rounds * shape.microbatches * handing.most_s) + 2.0 * run.rounds * handing.path_s
            for run, step_s in zip(runs, steps, strict=True)
        ]
        best_s = min(found)
        self._fastest[trial] = ways[found.index(best_s)]
        return best_s

    def _more(self, recompute: Recompute, shape: Shape, *, fits: bool) -> Taken:
        """Return how many times as long a micro-batch takes with recomputation, at the largest size if it is needed."""
        if fits:  # likely nothing comes of it, and work tells enough
            rough, plain = (self.solving.rough(way, self.wishes) for way in (recompute, "none"))
            return evenly(rough.work / plain.work)
        size = self._sizes[shape.width][-1]
        less = self._microbatch("none", shape, size)
        return self._microbatch(recompute, shape, size).over(less) if sum(less) < inf else evenly(1.0)

    def _microbatch(self, recompute: Recompute, shape: Shape, size: int) -> Taken:
        """Return what a micro-batch of a size takes, of sizes that are not computed what lies between those that are.

        Ranks that split experts read their own for the tokens of as many times the samples.
        """
        theirs = self._between(recompute, shape.width, size * shape.experts).experts_s / shape.experts
        return self._between(recompute, shape.width, size)._replace(experts_s=theirs)

    def _between(self, recompute: Recompute, width: int, size: int) -> Taken:
        known = self._sizes[width]
        if recompute != "none" and size > known[-1]:
            # Of programs that are recomputed one size is computed.
            return self._computed(recompute, width, known[-1]).times(evenly(size / known[-1]))
        below = max((each for each in known if each <= size), default=known[0])
        above = min((each for each in known if each >= size), default=known[-1])
        if size > known[-1] and len(known) > 1:
            below, above = known[-2:]
        low, high = (self._computed(recompute, width, each) for each in (below, above))
        return low.towards(high, (size - below) / (above - below)) if above > below else low.times(evenly(size / above))

    def _computed(self, recompute: Recompute, width: int, size: int) -> Taken:
        """Return the seconds of a micro-batch through all stages on tensor-parallel ranks alone; memory is no limit."""
        key = (recompute, width, size)
        if key not in self._taken:
            known = [each for each, found in self._taken.items() if sum(found) < inf]
            if recompute != "none" and self.left_s() < self._kept_of_again_s:
                again = [each for each in known if each[0] == recompute and ("none", *each[1:]) in known]
                if again:
                    like = min(again, key=lambda each: abs(log(each[1] / width)))
                    more = self._taken[like].over(self._taken["none", like[1], like[2]])
                    return self._computed("none", width, size).times(more)
            if known and self.left_s() < self._kept_s:
                return self._scaled(key, known)
            trial = tensor_parallel(self.solving.program.batch_size, size, width, recompute)
            least_s, shared_s = self._relaxed_s(trial, AT_MOST * self.left_s(), of_parameters)
            self._least_s[key] = least_s / trial.microbatches
            taken = _taken(self.solving.graph(recompute, self.wishes), least_s, shared_s)
            self._taken[key] = taken.times(evenly(1.0 / trial.microbatches))
        return self._taken[key]

    def _scaled(self, wanted: tuple[Recompute, int, int], known: Sequence[tuple[Recompute, int, int]]) -> Taken:
        """Return the same from the nearest width and size that were computed.

        Work is shared evenly; what was beyond it was collectives, which take as many times as long as the links say.
        """
        recompute, width, size = wanted
        near = min(known, key=lambda key: (key[0] != recompute, abs(log(key[1] / width)), abs(log(key[2] / size))))
        works = [self.solving.rough(way, self.wishes).work for way in (recompute, near[0])]
        whole = [key for key in known if key[0] == near[0] and key[1] == 1]
        alone = min(whole, key=lambda key: abs(log(key[2] / near[2])), default=None)
        found, more = self._taken[near], (works[0] / works[1]) * near[1] / width
        own_s = found.own_s
        if alone is not None:
            own_s = min(own_s, self._taken[alone].own_s * near[2] / (alone[2] * near[1]))
        waits_s = 0.0
        if width > 1 and near[1] > 1:  # who computes alone waits for nobody
            waits_s = (found.own_s - own_s) * self._slower(width, near[1], size)
        scaled = found._replace(own_s=own_s + waits_s * width / near[1])
        return scaled.times(Taken(more * size / near[2], more, more, more * size / near[2]))

    def _slower(self, width: int, than: int, size: int) -> float:
        """Return how many times as long a value between blocks takes to be reduced over ranks as over fewer or more."""
        batch = self.solving.program.batch_size
        reduced = Message("all_reduce", 0, round(self.works.floors.crossing_bytes * size / batch))
        here_s, there_s = (
            self.solving.links(tensor_parallel(batch, batch, ranks)).message_s(reduced) for ranks in (width, than)
        )
        return here_s / there_s if there_s else 1.0


def _taken(graph: Graph, own_s: float, shared_s: Mapping[str, float]) -> Taken:
    """Return what a program takes, given what each operator does that ranks which split the batch need not repeat."""
    starts, ends, theirs = parameter_like(graph), gradient_like(graph), experts(graph)
    casts_s = sums_s = experts_s = 0.0
    for name, taken_s in shared_s.items():
        if name in starts:
            casts_s += taken_s
        elif name in ends and passes(graph.by_name[name]):
            sums_s += taken_s
        elif name in theirs.gradients or name in theirs.products:
            experts_s += taken_s
        else:
            own_s += taken_s
    return Taken(own_s, casts_s, sums_s, experts_s)


def _spread(sizes: Sequence[int], most: int) -> list[int]:
    """Return the smallest and largest of sorted sizes and some between."""
    if len(sizes) <= most:
        return list(sizes)
    return [sizes[round(place * (len(sizes) - 1) / (most - 1))] for place in range(most)]
