"""The strategy of each operator along an axis that follows a split of the inputs: of the batch, or of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta


def follow_batch(graph: Graph, size: int, found: Mapping[str, tuple[Strategy, ...]]) -> dict[str, Strategy]:
    """Return the strategy of each representative operator under plain data parallelism along one axis.

    Inputs are split along the batch; each operator takes the strategy that moves the
    fewest bytes given what its inputs are, and of those the one that keeps most of its
    outputs split. Gradients of parameters come out Partial.
    """

    def split(meta: TensorMeta) -> Shard | None:
        batched = meta.shape[:1] == (graph.batch_size,) and graph.batch_size % size == 0
        return Shard(0) if batched and graph.batch_size else None

    return _follow(graph, size, found, split, lambda op, mine, now: mine.outputs)


def follow_tokens(
    graph: Graph, size: int, found: Mapping[str, tuple[Strategy, ...]]
) -> tuple[dict[str, Strategy], frozenset[str]]:
    """Return the same where inputs are split along their tokens, and the representatives in which tokens meet.

    Such an operator, attention say, takes none of its split inputs as it comes. Its readers are taken to find what it
    makes split by tokens again where it has the shape of a split input, else whole.
    """
    met: set[str] = set()

    def split(meta: TensorMeta) -> Shard | None:
        tokens = token_count(graph, meta)
        return Shard(1) if tokens and tokens % size == 0 else None

    def made(op: Op, mine: Strategy, now: Sequence[Placement | None]) -> tuple[Placement | None, ...]:
        before = [(graph.meta(ref), p, want) for ref, p, want in zip(op.refs, now, mine.inputs, strict=True)]
        shards = [(meta.shape, p, want) for meta, p, want in before if isinstance(p, Shard)]
        if all(p == want for _, p, want in shards):
            return mine.outputs
        met.add(graph.representative(op.name))
        if any(p == want for _, p, want in shards):
            return mine.outputs
        taken = [(shape, p) for shape, p, _ in shards]
        return tuple(None if meta is None else _resumed(meta.shape, taken) for meta in op.outputs)

    follow = _follow(graph, size, found, split, made)
    return follow, frozenset(met)


def _resumed(shape: tuple[int, ...], shards: Sequence[tuple[tuple[int, ...], Shard]]) -> Placement:
    """Return the split of the first value that begins with the dimensions of a result, or is whole."""
    alike = (p for other, p in shards if other[: len(shape)] == shape and p.dim < len(shape))
    return next(alike, Replicate())


def token_count(graph: Graph, meta: TensorMeta | None) -> int:
    """Return how many tokens a sample of an input has: of [b, s] where it holds indices, of [b, s, e] else; 0: none."""
    if meta is None or not graph.batch_size or meta.shape[:1] != (graph.batch_size,):
        return 0
    return meta.shape[1] if len(meta.shape) == 2 + meta.is_floating else 0


def _follow(
    graph: Graph,
    size: int,
    found: Mapping[str, tuple[Strategy, ...]],
    split: Callable[[TensorMeta], Shard | None],
    made: Callable[[Op, Strategy, Sequence[Placement | None]], tuple[Placement | None, ...]],
) -> dict[str, Strategy]:
    """Follow the `split` of inputs; `made` says where readers find what an operator makes."""
    placed: dict[tuple[str, int], Placement | None] = {}
    follow: dict[str, Strategy] = {}
    for rep, (op, *_) in graph.instances.items():
        # The first instance decides for all: in backward that is the last layer's, whose inputs are known.
        options = found[rep]
        outputs: tuple[Placement | None, ...]
        if op.kind == "call":
            now = [placed.get((graph.representative(ref.op), ref.index)) for ref in op.refs]
            if all(p is None or p == Replicate() for p in now):
                options = options[:1]
            metas = [graph.meta(ref) for ref in op.refs]
            mine = min(options, key=lambda s: mismatch(s, now, metas, op.outputs, size))
            outputs = made(op, mine, now)
        else:
            mine = options[0]
            outputs = mine.outputs
        follow[rep] = mine
        for index, placement in enumerate(outputs):
            placed[rep, index] = placement
        meta = op.outputs[0] if op.outputs else None
        wanted = split(meta) if meta is not None else None
        if op.kind == "input" and wanted is not None:
            placed[rep, 0] = wanted
        if op.kind == "tangent" and wanted is not None:
            mine = next((s for s in options if s.outputs[0] == wanted), mine)
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
