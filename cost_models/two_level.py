"""Time of collectives that run level by level: inside the fast links, across them, and inside again.

An axis of p ranks whose r neighbours share fast links is r x (p / r). In two levels, with the symbols of
`collectives` (n: bytes of the full tensor):

    all_reduce      reduce_scatter(n) inside, all_reduce(n / r) across, all_gather(n) inside
    all_gather      all_gather(n / r) across, all_gather(n) inside
    reduce_scatter  reduce_scatter(n) inside, reduce_scatter(n / r) across
    all_to_all      all_to_all(n) inside, all_to_all(n) across

Across, the r groups of a node run at once and share its adapters: each has 1 / r of the bandwidth. So the slow links
carry 2 n (h - 1) / h of an all-reduce over h nodes, where one flat ring carries 2 n (p - 1) / p: most is won on few
nodes of many ranks, and for p ranks the latency is that of r + h steps. The pieces follow one another; each is a
collective of the library with a call of its own, and priced as such. Cut into k chunks, what is inside of one runs
beside what is across of another, like the stages of a pipeline:

    T(k) = t_inside(n / k) + t_across(n / k) + (k - 1) max(s_inside(n / k), s_across(n / k))

where s is t without the fill of the library's own pipeline, which the chunks before have filled. (32 MiB all-reduced by
gloo on 2 hosts x 2 ranks at 1 Gbit/s, k of 1, 4, 8 and 16: 390, 354, 315 and 322 ms; `T`: 348, 311, 307, 311.)

A gather across brings the blocks of one place inside each node; inside, those of each node are gathered to where they
belong, in one call of the library for all nodes, so that nothing is permuted. A scatter is the reverse. An all-to-all
first hands inside, to the rank of each place, what is for that place in any node: the slow links carry the same bytes
as before, in h - 1 messages a rank instead of p - r, so that it pays where messages are short.

Source: the scheme of two levels is that of MPI libraries, Thakur, Rabenseifner & Gropp 2005 (see `collectives`), and of
NCCL users' own 2D reductions. Not modelled: the
processor's time for what runs inside and across at once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models.collectives import collective_s, collective_terms
from cost_models.topology import Hop

TWO_LEVEL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Operations that have a form in two levels."""


@dataclass(frozen=True)
class Piece:
    """One flat collective of a collective in two levels."""

    op: str
    full_bytes: float
    hops: tuple[Hop, ...]

    @property
    def seconds(self) -> float:
        """Return the time of the piece alone on its links."""
        return float(collective_s(self.op, self.full_bytes, self.hops))

    @property
    def following_s(self) -> float:
        """Return the time of the piece where one like it was before it on its links."""
        terms = collective_terms(self.op, self.full_bytes, self.hops)
        return float(terms.total_s - terms.fill_s)


def pieces(op: str, full_bytes: float, hops: Sequence[Hop], inside: int) -> tuple[Piece, ...]:
    """Return the flat collectives that follow one another where the first `inside` hops are the inner level.

    Raises `ValueError` where the operation has no such form, or a level would be empty.
    """
    if op not in TWO_LEVEL or not 0 < inside < len(hops):
        message = f"{op} over {len(hops)} hops has no form in two levels with {inside} inside"
        raise ValueError(message)
    inner, outer = tuple(hops[:inside]), _shared(hops[inside:], ranks_inside(hops, inside))
    part = full_bytes / ranks_inside(hops, inside)
    return {
        "all_reduce": (
            Piece("reduce_scatter", full_bytes, inner),
            Piece("all_reduce", part, outer),
            Piece("all_gather", full_bytes, inner),
        ),
        "all_gather": (Piece("all_gather", part, outer), Piece("all_gather", full_bytes, inner)),
        "reduce_scatter": (Piece("reduce_scatter", full_bytes, inner), Piece("reduce_scatter", part, outer)),
        "all_to_all": (Piece("all_to_all", full_bytes, inner), Piece("all_to_all", full_bytes, outer)),
    }[op]


def two_level_s(op: str, full_bytes: float, hops: Sequence[Hop], inside: int, chunks: int = 1) -> float:
    """Return the seconds of a collective in two levels, cut into so many chunks."""
    parts = pieces(op, full_bytes / chunks, hops, inside)
    spent = sum(each.seconds for each in parts)
    if chunks == 1:
        return spent
    across_s = sum(each.following_s for each in parts if each.hops[-1] is not hops[inside - 1])
    inside_s = sum(each.following_s for each in parts if each.hops[-1] is hops[inside - 1])
    return spent + (chunks - 1) * max(inside_s, across_s)


def splits(op: str, hops: Sequence[Hop]) -> Iterator[int]:
    """Yield how many of the hops can be the inner level; nothing where there is no form in two levels."""
    if op in TWO_LEVEL:
        for inside in range(1, len(hops)):
            if 1 < ranks_inside(hops, inside) < math.prod(hop.ranks for hop in hops):
                yield inside


def ranks_inside(hops: Sequence[Hop], inside: int) -> int:
    """Return how many ranks of a group share the inner level."""
    return math.prod(hop.ranks for hop in hops[:inside])


def _shared(hops: Sequence[Hop], groups: int) -> tuple[Hop, ...]:
    """Return the outer hops as one of so many groups that cross them at once finds them."""
    return tuple(replace(hop, bytes_per_s=hop.bytes_per_s / groups) for hop in hops)
