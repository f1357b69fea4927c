"""Time of collectives under the alpha-beta model, over the hops of a group.

Symbols, used by every formula here:
    n      bytes of the *full* tensor: once gathered, before scattering, what every
           rank reduces or receives; of an all-to-all, the LOCAL buffer of one rank
    p      ranks of the group
    r      parts of the group that meet on one level (the product over levels is p)
    g      ranks of the group inside one endpoint of the level
    alpha  latency of one message on the level, s         (Hop.latency_s)
    B      bandwidth that the group reaches there, byte/s (Hop.achieved_bytes_per_s)

Every algorithm is a latency A (summed over levels), a transfer N (the slowest
level: chunks are pipelined through the levels) and a fill, the price of cutting
the message into chunks. The best number of chunks costs 2 sqrt(A N) on top; NCCL's
chunks end at the size of its buffers, so that its fill ends at a multiple of A.

The library of the group (`Hop.library`) has these algorithms of all_reduce, and `auto` takes the
fastest for each size:
    ring              NCCL: p chunks go round, so nothing is left to fill, and every step waits for a
                      whole chunk (`ring_latency_factor`). gloo: chunks as in a tree, but across several levels p
                      chunks as NCCL's (2 hosts x 2 ranks at 1 Gbit/s, 1, 8 and 32 MiB: measured 14, 115 and 436 ms,
                      so priced 18, 108 and 416, filled like a tree 35, 155 and 510)
    low_latency_ring  NCCL's LL protocol: flags travel with the data, a quarter of the bandwidth
    tree              two binary trees over each level: an inner endpoint of one is a leaf of the other, so
                      each sends n/2 up and n/2 to two children in one and n/2 up in the other: 2 n at most
    in_switch         NVLS in the node, trees over the other levels (NVLSTree)

Sources: ring and pairwise exchange: Thakur, Rabenseifner & Gropp, "Optimization
of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005. Double
binary tree: Sanders, Speck & Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35, 2009. In-switch
reduction: every rank sends n once and receives n / p besides what it owns (or
the reverse), hence n (1 + 1/p). The constants, with what they are fitted to:
catalogue, `libraries`; predicted beside measured: docs/accuracy.md.

Not modelled: contention between collectives of different axes, stragglers, the
LL128 protocol, and sizes at which NCCL takes another algorithm than the fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError, suggestion
from cost_models.formula import Formula, registry
from cost_models.library import Library, nccl
from cost_models.topology import Hop

FloatArray = npt.NDArray[np.float64]

_THAKUR = "Thakur, Rabenseifner & Gropp 2005"
_LEVEL = (
    ("n", "bytes of the full tensor"),
    ("r", "parts of the group on this level"),
    ("B", "bandwidth of the group on this level, byte/s"),
)
_LATENCY = (("r", "parts of the group on this level"), ("alpha", "latency of one message, s"))

_PARTS_OF_TOTAL = (
    ("call", "host and launch, s"),
    ("A", "latency over all levels, s"),
    ("N", "transfer on the slowest level, s"),
)

FORMULAS: Mapping[str, Formula] = registry(
    Formula("whole_message", "call + A + N", _PARTS_OF_TOTAL, "Hockney 1994"),
    Formula(
        "total",
        "call + A + 2*sqrt(A*N) + N",
        _PARTS_OF_TOTAL,
        "optimal chunking of a pipeline: Sanders, Speck & Traeff 2009, section 2",
    ),
    Formula(
        "chunked",
        "call + A + Min(2*c*sqrt(A*N), l*A) + N",
        (
            *_PARTS_OF_TOTAL,
            ("c", "fill over that of the best number of chunks"),
            ("l", "fill with the largest chunks, in units of A"),
        ),
        "as `total`, with chunks that end at the library's buffers",
    ),
    Formula("gather_transfer", "n*(r - 1)/r/B", _LEVEL, _THAKUR),
    Formula("all_reduce_transfer", "2*n*(r - 1)/r/B", _LEVEL, _THAKUR),
    Formula("in_switch_transfer", "n*(1 + 1/r)/B", _LEVEL, "counting what a rank sends; NCCL NVLS"),
    Formula(
        "two_tree_transfer",
        "n*Min(r/2, 2)/B",
        _LEVEL,
        "counting what an endpoint of two binary trees sends; of 2 endpoints each sends n, from 4 on some send 2 n",
    ),
    Formula("broadcast_transfer", "n/B", _LEVEL, "Sanders, Speck & Traeff 2009"),
    Formula(
        "all_to_all_transfer",
        "n*g*(1 - g/p)/B",
        (
            ("n", "bytes of one rank's local buffer"),
            ("g", "ranks of the group inside one endpoint"),
            ("p", "ranks of the group"),
            ("B", "bandwidth of the group on this level, byte/s"),
        ),
        f"{_THAKUR} (pairwise exchange), all that leaves an endpoint",
    ),
    Formula("ring_latency", "(r - 1)*alpha", _LATENCY, _THAKUR),
    Formula(
        "chunk_ring_latency",
        "s*(r - 1)*alpha",
        (("s", "latency of a chunk at full bandwidth over a small message's"), *_LATENCY),
        f"{_THAKUR}; NCCL's Simple protocol",
    ),
    Formula("tree_latency", "ceiling(log(r)/log(2))*alpha", _LATENCY, "Sanders, Speck & Traeff 2009"),
    Formula("message_latency", "alpha", (("alpha", "latency of one message, s"),), "one message"),
)


@dataclass(frozen=True)
class Terms:
    """The parts of a collective's time for one algorithm; they add to the total."""

    algorithm: str
    call_s: float
    latency_s: float
    transfer_s: FloatArray
    fill_s: FloatArray
    formulas: tuple[Formula, ...]

    @property
    def total_s(self) -> FloatArray:
        """Return the time of one call."""
        return self.call_s + self.latency_s + self.transfer_s + self.fill_s


@overload
def collective_s(op: str, full_bytes: float, hops: Sequence[Hop], algorithm: str = "auto") -> float: ...
@overload
def collective_s(op: str, full_bytes: npt.NDArray[Any], hops: Sequence[Hop], algorithm: str = "auto") -> FloatArray: ...
def collective_s(
    op: str, full_bytes: float | npt.NDArray[Any], hops: Sequence[Hop], algorithm: str = "auto"
) -> float | FloatArray:
    """Return the time in seconds of one collective, alone on its links.

    `full_bytes` is the whole tensor: once gathered (all_gather), before
    scattering (reduce_scatter), of one rank (all_reduce, broadcast,
    point_to_point); for all_to_all the LOCAL buffer of one rank. `hops` comes
    from `axis_hops`; a group of one rank costs 0. A point_to_point goes to the
    neighbour on the axis and is priced on the outermost level. `auto` takes the
    fastest algorithm for each size.

    Raises `CostModelError` for an unknown operation or algorithm.
    """
    sizes = np.asarray(full_bytes, dtype=np.float64)
    candidates = _algorithms(op, algorithm, hops)
    if math.prod(hop.ranks for hop in hops) == 1:
        total: FloatArray = np.zeros_like(sizes)
    else:
        total = np.minimum.reduce([_terms(op, sizes, hops, each).total_s for each in candidates])
    return total if isinstance(full_bytes, np.ndarray) else float(total)


def collective_terms(op: str, full_bytes: float, hops: Sequence[Hop], algorithm: str = "auto") -> Terms:
    """Return the parts of `collective_s` and the formulas behind them, for `explain`."""
    sizes = np.asarray(full_bytes, dtype=np.float64)
    candidates = _algorithms(op, algorithm, hops)
    if math.prod(hop.ranks for hop in hops) == 1:
        return Terms("none", 0.0, 0.0, np.zeros_like(sizes), np.zeros_like(sizes), ())
    return min((_terms(op, sizes, hops, each) for each in candidates), key=lambda terms: float(terms.total_s))


def host_s(op: str, full_bytes: float, hops: Sequence[Hop]) -> float:
    """Return the seconds that one collective takes from a CPU core that computes at the same time, the call left out.

    Every byte that a rank sends is copied to a socket, one like it copied from a socket and perhaps added: time that
    grows with bytes, not with how long the link takes. 0 where no level says what a host handles.
    """
    known = [replace(hop, bytes_per_s=hop.host_bytes_per_s, efficiency=1.0) for hop in hops if hop.host_bytes_per_s]
    if not known:
        return 0.0
    return float(collective_terms(op, full_bytes, [replace(hop, efficiency_of={}) for hop in known]).transfer_s)


OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point")

_RINGS = ("ring", "low_latency_ring")
_ALGORITHMS_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "nccl": {
        "all_reduce": (*_RINGS, "tree", "in_switch"),
        "all_gather": _RINGS,
        "reduce_scatter": _RINGS,
        "all_to_all": ("pairwise",),
        "broadcast": ("tree",),
        "point_to_point": ("direct",),
    },
    "gloo": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("ring",),
        "all_to_all": ("pairwise",),
        "broadcast": ("tree",),
        "point_to_point": ("direct",),
    },
}
"""Of each library, the algorithms that it chooses from; rings of both cross nodes whole (`two_level`: ours do not)."""


def _library(hops: Sequence[Hop]) -> Library:
    return hops[0].library if hops else nccl()


def _algorithms(op: str, algorithm: str, hops: Sequence[Hop]) -> tuple[str, ...]:
    if op not in OPS:
        message = f"unknown collective {op!r}{suggestion(op, OPS)}; known: {', '.join(OPS)}"
        raise CostModelError(message)
    has_switch = any(hop.in_switch_reduction and hop.ranks > 1 for hop in hops)
    algorithms = _ALGORITHMS_OF[_library(hops).name][op]
    possible = tuple(each for each in algorithms if each != "in_switch" or has_switch)
    if algorithm == "auto":
        return possible
    if algorithm not in possible:
        reason = "" if algorithm != "in_switch" else " (no level of this group reduces in its switch)"
        message = f"{op} has no algorithm {algorithm!r} here{reason}; it has: auto, {', '.join(possible)}"
        raise CostModelError(message)
    return (algorithm,)


def _terms(op: str, sizes: FloatArray, hops: Sequence[Hop], algorithm: str) -> Terms:
    latency_s, transfer_s, formulas = _PARTS[algorithm](op, sizes, [hop.serving(op) for hop in hops])
    call_s = max(hop.call_s for hop in hops)
    total, numbers = _total(algorithm, _library(hops), len(hops))
    total_s = total.evaluate(call=call_s, A=latency_s, N=transfer_s, **numbers)
    fill_s = total_s - call_s - latency_s - transfer_s
    return Terms(algorithm, call_s, latency_s, transfer_s, fill_s, (total, *formulas))


def _total(algorithm: str, library: Library, levels: int) -> tuple[Formula, Mapping[str, float]]:
    """Return the formula that puts the parts together, and the library's own numbers in it."""
    if algorithm in ("pairwise", "direct") or (algorithm in _RINGS and (library.name == "nccl" or levels > 1)):
        return FORMULAS["whole_message"], {}
    if math.isinf(library.fill_limit):
        return FORMULAS["total"], {}
    return FORMULAS["chunked"], {"c": library.chunk_fill, "l": library.fill_limit}


_Part = tuple[float, FloatArray, tuple[Formula, ...]]


def _ring(op: str, sizes: FloatArray, hops: Sequence[Hop]) -> _Part:
    """One ring through all ranks: every step waits for the slowest link."""
    latency_s, transfer_s, formulas = _one_ring(op, sizes, _flat(hops))
    factor = _library(hops).ring_latency_factor
    if factor == 1.0:
        return latency_s, transfer_s, formulas
    return factor * latency_s, transfer_s, (FORMULAS["chunk_ring_latency"], *formulas[1:])


def _low_latency_ring(op: str, sizes: FloatArray, hops: Sequence[Hop]) -> _Part:
    latency_s, transfer_s, formulas = _one_ring(op, sizes, _flat(hops))
    return latency_s, transfer_s / _library(hops).low_latency_rate, formulas


def _one_ring(op: str, sizes: FloatArray, ring: Hop) -> _Part:
    rounds = 2 if op == "all_reduce" else 1
    transfer = FORMULAS["all_reduce_transfer" if op == "all_reduce" else "gather_transfer"]
    latency = FORMULAS["ring_latency"]
    latency_s = rounds * float(latency.evaluate(r=ring.ranks, alpha=ring.latency_s))
    return latency_s, transfer.evaluate(n=sizes, r=ring.ranks, B=ring.achieved_bytes_per_s), (latency, transfer)


def _tree(op: str, sizes: FloatArray, hops: Sequence[Hop]) -> _Part:
    library = _library(hops)
    rounds = 2 if op == "all_reduce" else 1
    both_ways = "two_tree_transfer" if library.name == "nccl" else "all_reduce_transfer"
    transfer = FORMULAS[both_ways if op == "all_reduce" else "broadcast_transfer"]
    latency = FORMULAS["tree_latency"]
    latency_s = rounds * sum(float(latency.evaluate(r=hop.ranks, alpha=hop.latency_s)) for hop in hops)
    slowest = [
        transfer.evaluate(n=sizes, r=hop.ranks, B=hop.achieved_bytes_per_s * library.tree_efficiency) for hop in hops
    ]
    return latency_s, np.maximum.reduce(slowest), (latency, transfer)


def _in_switch(op: str, sizes: FloatArray, hops: Sequence[Hop]) -> _Part:
    """Reduce in the switch where a level can, a tree on the others (NCCL's NVLS and NVLSTree)."""
    reducing = [hop for hop in hops if hop.in_switch_reduction]
    others = [hop for hop in hops if not hop.in_switch_reduction]
    efficiency = _library(hops).in_switch_efficiency
    transfer = FORMULAS["in_switch_transfer"]
    latency_s = 2 * sum(hop.latency_s for hop in reducing)
    slowest = [transfer.evaluate(n=sizes, r=hop.ranks, B=hop.achieved_bytes_per_s * efficiency) for hop in reducing]
    if not others:
        return latency_s, np.maximum.reduce(slowest), (transfer,)
    tree_latency_s, tree_s, formulas = _tree(op, sizes, others)
    return latency_s + tree_latency_s, np.maximum.reduce([*slowest, tree_s]), (transfer, *formulas)


def _pairwise(op: str, sizes: FloatArray, hops: Sequence[Hop]) -> _Part:
    transfer, latency = FORMULAS["all_to_all_transfer"], FORMULAS["ring_latency"]
    ranks = math.prod(hop.ranks for hop in hops)
    flat = _flat(hops)
    inside = np.cumprod([1, *(hop.ranks for hop in hops)])
    slowest = [
        transfer.evaluate(n=sizes, g=float(g), p=ranks, B=hop.achieved_bytes_per_s)
        for g, hop in zip(inside, hops, strict=False)
    ]
    latency_s = float(latency.evaluate(r=ranks, alpha=flat.latency_s))
    return latency_s, np.maximum.reduce(slowest), (latency, transfer)


def _direct(op: str, sizes: FloatArray, hops: Sequence[Hop]) -> _Part:
    outer = hops[-1]
    transfer = FORMULAS["broadcast_transfer"].evaluate(n=sizes, r=2, B=outer.achieved_bytes_per_s)
    return outer.latency_s, transfer, (FORMULAS["message_latency"], FORMULAS["broadcast_transfer"])


_PARTS: Mapping[str, Callable[[str, FloatArray, Sequence[Hop]], _Part]] = {
    "ring": _ring,
    "low_latency_ring": _low_latency_ring,
    "tree": _tree,
    "in_switch": _in_switch,
    "pairwise": _pairwise,
    "direct": _direct,
}


def _flat(hops: Sequence[Hop]) -> Hop:
    """Return the hops as one ring: the slowest bandwidth, the mean latency of its links."""
    ranks = math.prod(hop.ranks for hop in hops)
    latency_s = 0.0
    outside = ranks
    for hop in hops:
        outside //= hop.ranks
        latency_s += hop.latency_s * (hop.ranks - 1) * outside
    slowest = min(hops, key=lambda hop: hop.achieved_bytes_per_s)
    return Hop(
        ranks=ranks,
        bytes_per_s=slowest.bytes_per_s,
        latency_s=latency_s / (ranks - 1),
        level="ring",
        efficiency=slowest.efficiency,
        library=slowest.library,
    )
