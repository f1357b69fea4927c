"""Recomputation block by block: what a plan that recomputes everything need not recompute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autopar.api.floors import WAYS, names_again
from autopar.api.pipelining import Pipelined
from autopar.api.solved import Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.wishes import Wishes
from autopar.capture.recompute import KEPT, SUFFIX, block_of, blocks_of
from autopar.costs.again import Again
from autopar.costs.outcome import Outcome
from autopar.costs.table import Builder, Pricing
from autopar.ir.graph import Graph
from autopar.ir.stages import stage_of
from autopar.search.fitting import solve_program
from autopar.search.ilp import Ilp, Limits, Solution
from autopar.search.recomputing import Room, Ways, cheapest, held
from autopar.search.reserve import reserving, worth
from autopar.search.stages import most_in_flight
from autopar.search.trials import Recompute, Trial

_WORTH = 0.01
"""Share of the memory that has to be left for another choice to be tried."""

_IDLE = 0.5
"""Share of the gap that the search is content with by which recomputing less has to beat the best plan to be tried."""

_TRIES = 6
"""Choices that are priced and cut: that tells more of memory than what is foreseen here."""

_SURE = 2
"""Tries however late it is: the first tells what is too much, the second fits, often."""

_SMALL = 100
"""Nodes of a table up to which layouts are chosen anew for what was found; larger ones take many times as long to solve
as where all blocks are alike, and gain little.
"""

_TO_LEAVE_ROOM = 0.5
"""Share of the time left in which layouts that leave room are chosen: what follows takes as long."""

_NEAR = 0.003
"""Share of a step that these may be from the best ones: what each amount of memory spares is known no better."""


def lighter(
    solving: Solving, wishes: Wishes, one: Solved, left_s: float, best_s: float, others: Sequence[Pipelined] = ()
) -> Solved | None:
    """Return a faster plan on the mesh of a solved trial that recomputes all, which recomputes less; `None` if none.

    None is tried that is not foreseen to take less than `best_s`. `others` are further ways to run its stages: one that
    is slower with all recomputed may hold fewer micro-batches at a time, and so recompute less.
    """
    if one.outcome is None or one.trial.recompute != "full":
        return None
    again = _again(solving.graph("none", wishes), one.outcome)
    if not again.paths:
        return None
    ends = time.process_time() + left_s
    ways = _ways(again)
    one = _promising(solving, again, ways, one, others)
    best: Solved | None = None
    sure = _SURE
    for layouts in (_with_room(solving, wishes, again, ways, one, left_s, best_s), one):
        if layouts is not None and layouts.outcome is not None:
            own = again if layouts is one else _again(solving.graph("none", wishes), layouts.outcome)
            found = _lightened(solving, wishes, own, ways if own is again else _ways(own), layouts, ends, best_s, sure)
            sure = 0
            if found is not None and (best is None or found.step_s < best.step_s):
                best, best_s = found, min(best_s, found.step_s)
    return best if best is not None and best.step_s < one.step_s else None


def _lightened(
    solving: Solving, wishes: Wishes, again: Again, ways: Ways, one: Solved, ends: float, best_s: float, sure: int
) -> Solved | None:
    """Return a faster plan in the layouts of a solved trial that recomputes all, which recomputes less.

    By `ends`, but for so many tries as are `sure`.
    """
    rooms = _all_rooms(again, one)
    least = max(room.held_bytes for room in rooms)
    low, limit, best = least, float(solving.budget), None
    high, gained_s = inf, 0.0
    spent_s = 0.0
    for number in range(_TRIES):
        chosen = cheapest(ways, rooms, limit)
        recompute = _named(again.paths, _plainest(ways, chosen)) if chosen is not None else "full"
        started = time.process_time()
        late = ends - started <= spent_s and (number >= sure or best is not None)
        if chosen is None or recompute == "full" or late:
            break
        saved_s = _saved_s(ways, chosen)
        foreseen_s = _foreseen_s(one, saved_s)
        if foreseen_s > best_s * (1.0 - _IDLE * solving.options.gap) or saved_s <= gained_s:
            break
        foreseen = max(held(ways, room, chosen) for room in rooms)
        # What recomputes nothing is a trial of its own.
        tried = None if recompute == "none" else _as_before(solving, wishes, one, best or one, recompute)
        spent_s = time.process_time() - started
        if tried is None or isinstance(tried, float):
            # The next choice holds less than this one: as much less as that was too much, if that is known.
            over = tried - solving.budget if tried is not None else 0.0
            less = low + (foreseen - low) / 2
            limit = min(foreseen, limit) - 1.0 if high == inf and over <= 0.0 else less
            limit = max(foreseen - over, low) if 0.0 < over < foreseen - low else limit
            high = foreseen
        else:
            best, low, gained_s = tried, foreseen, saved_s
            spare = solving.budget - _peak(tried)
            limit = min(foreseen + spare, low + (high - low) / 2)
        if limit - low < _WORTH * solving.budget:
            break
    if best is not None and best.outcome is not None and len(best.outcome.pricing.clusters) <= _SMALL:
        return _solved(solving, wishes, best, best.trial.recompute, ends - time.process_time()) or best
    return best


def _with_room(
    solving: Solving, wishes: Wishes, again: Again, ways: Ways, one: Solved, left_s: float, best_s: float
) -> Solved | None:
    """Return a trial that recomputes all in layouts that leave room to recompute less, where that is worth it.

    `again` and `ways` are of the layouts that are fastest with all recomputed; they take what memory there is. Not
    worth it is also what is foreseen to take longer than `best_s` with less recomputed.
    """
    outcome, trial = one.outcome, one.trial
    if outcome is None or left_s <= 0:
        return None
    rooms = _all_rooms(again, one)
    copies = np.max([room.copies for room in rooms], axis=0) / trial.depth
    amounts, spared_s = worth(ways, copies, float(solving.budget))
    table = outcome.pricing.table
    if one.pipeline is not None:
        table = outcome.pricing.staged(solving.split(trial, wishes, one.pipeline.wanted)).table
    limits = Limits(solving.budget, left_s * _TO_LEAVE_ROOM, max(solving.options.gap, _NEAR), solving.options.seed)
    program = Ilp(reserving(table, amounts, spared_s * trial.microbatches))
    solution = solve_program(program, limits)
    if solution.status == "interrupted":
        raise KeyboardInterrupt
    options = solution.options[:-1]
    # What these layouts leave, as the table knows it, beside what the others do.
    left_bytes = solving.budget - max(room.held_bytes for room in rooms)
    spared = float(np.interp(left_bytes, amounts, spared_s)) * trial.microbatches
    known_s = one.solution.objective_s + float(spared_s.max()) * trial.microbatches - spared
    if not options or options == outcome.options or solution.objective_s > (1.0 - limits.gap) * known_s:
        return None
    chosen = cheapest(ways, rooms, float(solving.budget))
    foreseen_s = one.step_s if chosen is None else _foreseen_s(one, _saved_s(ways, chosen))
    if foreseen_s * solution.objective_s / known_s >= best_s:
        return None
    priced = Waiting(trial, outcome.links, outcome.pricing, program, 0.0, 0.0)
    solution = replace(solution, options=options)
    if one.pipeline is not None:
        return solving.cut(trial, priced, wishes, solution, [one.pipeline.wanted])
    found = solving.outcome(priced, wishes, solution)
    return Solved(trial, solution, found, found.step_s)


def _promising(solving: Solving, again: Again, ways: Ways, one: Solved, others: Sequence[Pipelined]) -> Solved:
    """Return a trial in the way to run its stages that is foreseen to be fastest where less is recomputed."""

    def foreseen_s(each: Solved) -> float:
        chosen = cheapest(ways, _all_rooms(again, each), float(solving.budget))
        return inf if chosen is None else _foreseen_s(each, _saved_s(ways, chosen))

    found = [one, *(replace(one, pipeline=each, step_s=each.step_s) for each in others)]
    return min(found, key=foreseen_s) if others else one


def _saved_s(ways: Ways, chosen: Sequence[int]) -> float:
    """Return what a micro-batch saves of recomputing all, through all stages."""
    return float((ways.seconds[:, -1] - ways.seconds[np.arange(len(chosen)), list(chosen)]).sum())


def _foreseen_s(one: Solved, saved_s: float) -> float:
    return one.step_s - saved_s * one.trial.microbatches / one.trial.depth


def _all_rooms(again: Again, one: Solved) -> list[Room]:
    if one.pipeline is None or one.outcome is None:
        return list(_rooms(again))
    return list(_staged_rooms(again, one.outcome, one.pipeline))


def _peak(found: Solved) -> int:
    if found.pipeline is not None:
        return max(found.pipeline.rank_bytes)
    return 0 if found.outcome is None else found.outcome.memory().total


def _as_before(
    solving: Solving, wishes: Wishes, one: Solved, best: Solved, recompute: Recompute
) -> Solved | float | None:
    """Return the plan that recomputes so in the layouts of a solved one, if it fits and is faster than the best.

    Else the bytes that it holds, if these are too many and known, or `None`.
    """
    if one.outcome is None:
        return None
    trial = replace(one.trial, recompute=recompute)
    priced = _priced_as(solving, wishes, trial, one.outcome)
    options = _same_options(priced.pricing, one.outcome)
    if options is None:
        return None
    solution = Solution("gap", options, inf, 0.0)
    if one.pipeline is not None:
        found = solving.cut(trial, priced, wishes, solution, [one.pipeline.wanted], best.pipeline)
    else:
        outcome = solving.outcome(priced, wishes, solution)
        if (total := outcome.memory().total) > solving.budget:
            return float(total)
        found = Solved(trial, replace(solution, objective_s=outcome.step_s), outcome, outcome.step_s)
    return found if found.outcome is not None and found.step_s < best.step_s else None


def _priced_as(solving: Solving, wishes: Wishes, trial: Trial, known: Outcome) -> Waiting:
    """Return a trial priced in the layouts of a solved one alone: those of all others take several times as long."""
    graph = solving.graph(trial.recompute, wishes)
    reps = {graph.representative(op.name) for op in graph.ops}
    choices = {rep: (known.strategy(_rep_in(known, rep)),) for rep in reps}
    in_float32 = solving.options.reduce_dtype == "fp32"
    outputs = {name: known.output_layout(name) for name in known.pricing.sink_layouts}
    pricing = Builder(
        graph, choices, known.links, solving.optimizer, wishes.gathers, wishes.reductions, in_float32, outputs=outputs
    ).build()
    return Waiting(trial, known.links, pricing, Ilp(pricing.table), 0.0, 0.0)


def _rep_in(known: Outcome, name: str) -> str:
    """Return what stands for an operator in a solved program; one that runs again there only is as that it repeats."""
    return known.graph.representative(name if name in known.graph.by_name else name.removesuffix(SUFFIX))


def _same_options(pricing: Pricing, known: Outcome) -> tuple[int, ...] | None:
    """Return the options of a priced program that do as a solved one does; `None` if some operator cannot."""
    found = []
    for cluster in pricing.clusters:
        reps = [_rep_in(known, each) for each in cluster.members]
        wanted = tuple(known.strategy(rep) for rep in reps)
        way = (known.keeps_gather(reps[0]), known.reduces_early(reps[0]))
        same = (
            k
            for k, option in enumerate(cluster.options)
            if option == wanted and (not cluster.once or (cluster.once[k], cluster.early[k]) == way)
        )
        place = next(same, None)
        if place is None:
            return None
        found.append(place)
    return (*found, *(0 for _ in pricing.sink_layouts))  # decided, and behind the clusters' nodes


def _solved(solving: Solving, wishes: Wishes, one: Solved, recompute: Recompute, left_s: float) -> Solved | None:
    priced = solving.unbounded(replace(one.trial, recompute=recompute), wishes)
    if priced is None:
        return None
    # A block less may save less than the gap that other searches are content with.
    cutoff_s = one.step_s / (1.0 - solving.options.gap)
    ways = [one.pipeline.wanted] if one.pipeline else []
    found = solving.solve(priced, wishes, ways, cutoff_s, left_s, ("even",))
    return found if found.outcome is not None and found.step_s < one.step_s else None


def _again(plain: Graph, outcome: Outcome) -> Again:
    known = set(blocks_of(plain))
    block = {op.name: block_of(op) for op in plain.ops if op.phase == "forward" and block_of(op) in known}
    copy_of = {
        op.name: op.name.removesuffix(SUFFIX)
        for op in outcome.graph.ops
        if op.name.endswith(SUFFIX) and op.name.removesuffix(SUFFIX) in block
    }
    return Again(outcome, plain, block, copy_of)


def _ways(again: Again) -> Ways:
    names = [names_again(again.plain, way) for way in WAYS]
    kept = np.array([again.kept_bytes(each) for each in names]).T
    return Ways(np.array([again.seconds(each) for each in names]).T, kept - kept[:, -1:])


def _rooms(again: Again) -> Iterator[Room]:
    for most, waits in again.moments:
        yield Room(most, np.array(waits, dtype=float))


def _staged_rooms(again: Again, outcome: Outcome, pipeline: Pipelined) -> Iterator[Room]:
    """Yield the room of each pipeline rank: a block's values are there for each micro-batch in flight on its stage."""
    home = stage_of(outcome.graph, pipeline.stages)
    stage = {path: home[name] for name, path in again.block.items()}
    flying = most_in_flight(pipeline.schedule)
    for rank, most in enumerate(pipeline.rank_bytes):
        copies = [
            float(flying[stage[path]]) if pipeline.schedule.rank_of[stage[path]] == rank else 0.0
            for path in again.paths
        ]
        yield Room(float(most), np.array(copies))


def _plainest(ways: Ways, chosen: Sequence[int]) -> list[int]:
    """Return the first of the ways that are the same for a block, but `full` where that is one of several.

    Where nothing is cast, no casts are repeated; where attention has no kernel of its own, none is kept.
    """
    same = (ways.seconds == ways.seconds[np.arange(len(chosen)), list(chosen)][:, None]) & (
        ways.kept_bytes == ways.kept_bytes[np.arange(len(chosen)), list(chosen)][:, None]
    )
    return [int(each) for each in np.where(same[:, -1] & ~same[:, 0], same.shape[1] - 1, np.argmax(same, axis=1))]


def _named(paths: Sequence[str], chosen: Sequence[int]) -> Recompute:
    ways = {WAYS[each] for each in chosen}
    if len(ways) == 1:
        return ways.pop()
    return tuple((path, WAYS[each]) for path, each in zip(paths, chosen, strict=True) if WAYS[each] != KEPT)
