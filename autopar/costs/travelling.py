"""What parameters and gradients take as they travel, alone or together, beyond what a table prices them at.

Which of them travel together follows from all layouts, so a table cannot know it. It prices each that may (one gather
of a parameter, one sum of a gradient: `links.TRAVELS`) as its part of one large collective (`Links.bucket_bytes`):
latency is paid once, which is the least that it can take. What an outcome's calls really take is added to its seconds
here, where each of them can begin; a bound of the table stays one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.costs.buckets import together
from autopar.costs.issued import Issued
from autopar.costs.links import Message
from autopar.costs.segments import Segments
from autopar.costs.timing import Beyond

if TYPE_CHECKING:
    from autopar.costs.outcome import Outcome


def beyond(outcome: Outcome) -> Beyond | None:
    """Return, by segment, what an outcome's collectives take beyond the table's parts; `None` if it has no parts."""
    links = outcome.links
    if not links.bucket_bytes:
        return None
    segments = Segments.of(outcome.graph)
    found = Beyond(np.zeros(segments.total), np.zeros(segments.total))

    def add(at: int, issued: Issued, message: Message, times: int) -> None:
        # Sums over micro-batches hide behind the last of them, which is the outcome's to say.
        hides = issued.behind and (outcome.microbatches == 1 or not issued.finishes)
        hidden_s = links.hidable_s(message) if hides else 0.0
        found.hidden_s[at] += times * hidden_s
        found.shown_s[at] += times * (links.message_s(message) - hidden_s)

    run_of = outcome.run_of
    places: dict[int, list[int]] = {}
    for each in outcome.messages():
        if not each.behind and each not in run_of:
            continue
        gathers = each.message.op == "all_gather"
        at = segments.of_op[each.at if gathers or each.source is None else each.source.op]
        if each.behind:
            add(at, each, replace(each.message, flat=True), -each.times)
        else:  # what something else reads, too: the table waits for it where it is cast, alone
            add(segments.of_op[each.at], each, each.message, -each.times)
        if each in run_of:
            places.setdefault(run_of[each], []).append(at)
        else:
            add(at, each, each.message, each.times)
    for number, run in enumerate(outcome.runs):
        # A gather is over when its first parameter is read, a reduction begins when its last gradient is there.
        first = min if run[0].message.op == "all_gather" else max
        add(first(places[number]), run[0], together(run), run[0].times)
    return found


def travelling(outcome: Outcome, issued: Iterable[Issued]) -> list[Message]:
    """Return the messages in which some of an outcome's collectives travel: those that are of one run are one."""
    if not outcome.links.bucket_bytes:
        return [each.message for each in issued]
    run_of = outcome.run_of
    alone: list[Message] = []
    runs: dict[int, list[Issued]] = {}
    for each in issued:
        if each in run_of:
            runs.setdefault(run_of[each], []).append(each)
        else:
            alone.append(each.message)
    return alone + [together(run) for run in runs.values()]
