"""Plain data parallelism along one axis: the strategy of each operator that follows the batch split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Graph
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta


def follow_batch(graph: Graph, size: int, found: Mapping[str, tuple[Strategy, ...]]) -> dict[str, Strategy]:
    """Return the strategy of each representative operator under plain data parallelism along one axis.

    Inputs are split along the batch; each operator takes the strategy that moves the
    fewest bytes given what its inputs are, and of those the one that keeps most of its
    outputs split. Gradients of parameters come out Partial.
    """
    placed: dict[tuple[str, int], Placement | None] = {}
    follow: dict[str, Strategy] = {}
    for instance in graph.ops:
        rep = graph.representative(instance.name)
        if rep in follow:
            continue
        # The first instance decides for all: in backward that is the last layer's, whose inputs are known.
        op, options = instance, found[rep]
        if op.kind == "call":
            now = [placed.get((graph.representative(ref.op), ref.index)) for ref in op.refs]
            if all(p is None or p == Replicate() for p in now):
                options = options[:1]
            metas = [graph.meta(ref) for ref in op.refs]
            mine = min(options, key=lambda s: mismatch(s, now, metas, op.outputs, size))
        else:
            mine = options[0]
        follow[rep] = mine
        for index, placement in enumerate(mine.outputs):
            placed[rep, index] = placement
        meta = op.outputs[0] if op.outputs else None
        batched = meta is not None and meta.shape[:1] == (graph.batch_size,) and graph.batch_size % size == 0
        if op.kind == "input" and batched and graph.batch_size:
            placed[rep, 0] = Shard(0)
        if op.kind == "tangent" and batched and graph.batch_size:
            mine = next((s for s in options if s.outputs[0] == Shard(0)), mine)
            follow[rep], placed[rep, 0] = mine, mine.outputs[0]
    return follow


def mismatch(
    strategy: Strategy,
    now: Sequence[Placement | None],
    metas: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta | None],
    size: int,
) -> tuple[float, float]:
    """Return bytes moved to bring inputs from where they are (`None`: anywhere) to a strategy's, and bytes made."""
    moved = 0.0
    for have, want, meta in zip(now, strategy.inputs, metas, strict=True):
        if have == want or have is None or isinstance(have, Replicate):
            # A replicated value is sliced for nothing; masking it to a Partial gains nothing either.
            moved += 1e-3 * meta.nbytes if isinstance(want, Partial) and not isinstance(have, Partial) else 0.0
        elif isinstance(want, Partial):
            moved += 4.0 * meta.nbytes
        else:
            moved += meta.nbytes * (2.0 if isinstance(have, Partial) and isinstance(want, Replicate) else 1.0)
    held = sum(
        meta.nbytes / (size if isinstance(p, Shard) else 1) * (1.5 if isinstance(p, Partial) else 1.0)
        for p, meta in zip(strategy.outputs, outputs, strict=True)
        if meta is not None
    )
    return (moved, held)
