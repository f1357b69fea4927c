"""Which reductions of gradients, and which gathers of parameters, travel together.

A reduction of its own can start as soon as its gradient is there, but each call costs latency; a merged one waits for
its last member. Reductions of one mesh axis run one after another, in the order in which their gradients become
ready, so the best merging is a cut of that sequence into runs. What each takes from computation (a CPU's transfers, a
GPU's multiprocessors) delays the gradients behind it. Of all cuts that one is taken after which the step ends first,
and of those equally good, the one with the fewest calls; that is exact where what a call takes from computation is a
constant and a share of its bytes.

Gathers are the same seen backwards in time: one must be over when its first parameter is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.costs.issued import Issued
from autopar.costs.links import Links, Message
from autopar.ir.graph import Ref

LATENCY_SHARE = 0.01
"""A message is large enough when less than this share of its seconds would be saved by making it twice as large."""


PATIENCE = 0.05
"""Share of the seconds by which a run holds its first members back that it has to save.

Where collectives fit easily behind computation, nothing else keeps them from waiting for each other until they just
fit; a prediction that is a little short then costs more than the calls that were saved.
"""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One gradient that is summed over the ranks of one axis; or a gather, backwards in time."""

    name: str
    """Of the parameter."""

    axis: int
    bytes: int
    dtype: str
    ready_s: float
    """Moment of the backward pass at which the gradient's local term is there."""

    number: int = 0
    """Its place among the program's collectives."""


@dataclass(frozen=True, slots=True)
class Clock:
    """When operators run in their phase, collectives left out."""

    begin_s: Mapping[str, float]
    end_s: Mapping[str, float]
    whole_s: Mapping[str, float]
    """Of each phase, all of its computation."""

    microbatches: int


Seconds = Callable[[int], float]
"""Seconds of one reduction of so many bytes."""

_Reached = tuple[float, float, int]
"""When reductions are done, by how much they delay computation, and where the last run of them began."""


def bucketed(
    reductions: Sequence[Reduction],
    seconds: Seconds,
    end_s: float,
    issue_s: Seconds,
    enough: float = LATENCY_SHARE,
    most_bytes: float = math.inf,
    patience: float = PATIENCE,
    smooth_s: Seconds | None = None,
) -> list[list[Reduction]]:
    """Return the reductions of one axis and dtype, in the order of readiness, cut into runs that travel together.

    `end_s` is when the computation of the backward pass ends, `issue_s` what of a reduction's seconds computation gives
    for it, so that all that follows comes later; its link is taken for all of them. Runs are not made longer where that
    saves less than the share `enough` of their seconds, or than the share `patience` of what it holds back (with 0
    every cut is looked at), nor larger than `most_bytes`. What it saves is told by `smooth_s`, of link and computation
    together, where `seconds` jump: a run behind such a jump is no reason to leave out longer ones.
    """
    whole_s = smooth_s or (lambda size: seconds(size) + issue_s(size))
    ready = sorted(reductions, key=lambda each: each.ready_s)
    if not ready:
        return []
    # reached[j][calls]: the first j, reduced in so many calls, at the earliest.
    reached: list[dict[int, _Reached]] = [{0: (0.0, 0.0, 0)}]
    for stop in range(1, len(ready) + 1):
        best: dict[int, _Reached] = {}
        size, last = 0, ready[stop - 1]
        for start in range(stop - 1, -1, -1):
            size += ready[start].bytes
            if start < stop - 1 and size > most_bytes:
                break
            taken, issued = seconds(size), issue_s(size)
            if start < stop - 1:
                earlier = size - last.bytes
                # A call less saves its link time, and computation what issuing takes.
                saved_s = whole_s(earlier) + whole_s(last.bytes) - whole_s(size)
                if patience and patience * min(seconds(earlier), last.ready_s - ready[start].ready_s) > saved_s:
                    break
            for calls, (free, later, _) in reached[start].items():
                done = max(free, last.ready_s + later) + taken
                if calls + 1 not in best or done < best[calls + 1][0]:
                    best[calls + 1] = (done, later + issued, start)
            if start < stop - 1 and 2 * whole_s(size) - whole_s(2 * size) < enough * whole_s(size):
                break
        reached.append(_worth_their_calls(best))
    calls = min(reached[-1], key=lambda n: (max(reached[-1][n][0], end_s + reached[-1][n][1]), n))
    runs: list[list[Reduction]] = []
    stop = len(ready)
    while stop:
        start = reached[stop][calls][2]
        runs.append(ready[start:stop])
        stop, calls = start, calls - 1
    return runs[::-1]


def _worth_their_calls(found: dict[int, _Reached]) -> dict[int, _Reached]:
    """Return those numbers of calls that are done earlier than with any smaller number."""
    kept: dict[int, _Reached] = {}
    for calls in sorted(found):
        if not kept or found[calls][0] < min(done for done, _, _ in kept.values()):
            kept[calls] = found[calls]
    return kept


def runs_of(
    messages: Sequence[Issued], dtypes: Mapping[Ref, str], clock: Clock, links: Links, spare_bytes: int
) -> tuple[tuple[Issued, ...], ...]:
    """Return the collectives of one step that travel together, each run in the order of readiness or of use.

    A gather's run is held whole, and so is the one before it while it runs; so is what is scattered: each takes at most
    half of `spare_bytes`.
    Programs with micro-batches gather and scatter one by one.
    """
    named = Counter((each.message.op, each.message.axis, each.phase, each.tensor) for each in messages)
    kinds: dict[tuple[str, int, str, str, bool], list[Reduction]] = {}
    for number, each in enumerate(messages):
        if not each.mergeable or each.source is None or each.copy is None:
            continue
        message, dtype = each.message, dtypes[each.source]
        if named[message.op, message.axis, each.phase, each.tensor] > 1:
            continue  # a plan could not tell them apart
        if clock.microbatches > 1 and message.op != "all_reduce":
            continue
        end_s = clock.whole_s[each.phase]
        if message.op == "all_gather":
            ready_s = end_s - clock.begin_s[each.at]
        else:
            ready_s = clock.end_s[each.source.op] if clock.microbatches == 1 else end_s
        made = Reduction(each.tensor, message.axis, message.bytes, dtype, ready_s, number)
        # Copies that forward keeps for backward are apart from those that each phase makes for itself.
        kinds.setdefault((message.op, message.axis, dtype, each.phase, bool(each.copy[3])), []).append(made)
    runs: list[tuple[Issued, ...]] = []
    for (op, axis, _, phase, _), members in kinds.items():
        most = math.inf if op == "all_reduce" else spare_bytes / 2
        seconds = cache(lambda size, op=op, axis=axis: links.message_s(Message(op, axis, size)))
        issue_s = cache(lambda size, op=op, axis=axis: links.shown_s(Message(op, axis, size)))
        smooth_s = cache(lambda size, op=op, axis=axis: links.smooth_s(Message(op, axis, size)))
        found = bucketed(members, seconds, clock.whole_s[phase], issue_s, most_bytes=most, smooth_s=smooth_s)
        for run in found:
            ordered = sorted(run, key=lambda each: each.number) if op == "all_gather" else run
            if len(run) > 1:
                runs.append(tuple(messages[each.number] for each in ordered))
    return tuple(runs)


def together(run: Sequence[Issued]) -> Message:
    """Return the message that stands for those of a run."""
    messages = [each.message for each in run]
    return replace(
        messages[0], bytes=sum(m.bytes for m in messages), packed_bytes=sum(m.packed_bytes for m in messages)
    )
