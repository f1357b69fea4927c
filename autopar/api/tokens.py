"""Sequence parallelism as a wish: whether activations may be split by tokens along `tp`, between its matrix products.

With Megatron-LM (Korthikanti et al. 2022): without it, normalisations, dropout and residual sums are done by every
tensor-parallel rank for all tokens; with it, by each for its part of every sequence. Both are layouts that the search
knows; the wish leaves one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import UsageError
from autopar.ir.graph import Graph
from autopar.ir.placement import Layout, Placement, Replicate, Shard
from autopar.ir.roles import gradient_like, parameter_like
from autopar.ir.strategy import MeshStrategy
from autopar.ir.tensor import TensorMeta
from autopar.search.meshes import Candidate

Options = Mapping[str, tuple[MeshStrategy, ...]]


def by_tokens(
    graph: Graph, candidate: Candidate, options: Options, *, wanted: bool
) -> dict[str, tuple[MeshStrategy, ...]]:
    """Return the options in which activations are (`wanted`) or are not split by tokens along `tp`.

    Raises:
        UsageError: the program reads no sequences.
    """
    axis = next((place for place, each in enumerate(candidate) if each.role == "tp"), None)
    left = dict(options)
    if axis is None:
        return left
    tokens = _token_shape(graph)
    skipped = parameter_like(graph) | gradient_like(graph)
    for op in graph.ops:
        if op.kind != "call" or op.name in skipped or graph.representative(op.name) != op.name:
            continue
        metas = tuple(graph.meta(ref) for ref in op.refs)
        if wanted:
            kept = tuple(s for s in left[op.name] if not _is_whole(op.outputs, s.outputs, axis, tokens))
        else:
            kept = tuple(
                s
                for s in left[op.name]
                if not _is_split(metas, s.inputs, axis, tokens) and not _is_split(op.outputs, s.outputs, axis, tokens)
            )
        left[op.name] = kept or left[op.name]
    return left


def _token_shape(graph: Graph) -> tuple[int, int]:
    """Return batch and sequence length."""
    for op in graph.ops:
        meta = op.outputs[0] if op.kind == "input" else None
        # Token ids are [b, s], features of tokens [b, s, e]; features of samples have no sequence.
        if meta is not None and len(meta.shape) > 1 + meta.is_floating and meta.shape[0] == graph.batch_size:
            return meta.shape[0], meta.shape[1]
    raise UsageError(
        "--fix sequence_parallel: no input of the model has a batch and a sequence dimension; leave it out"
    )


def _token_dims(meta: TensorMeta | None, tokens: tuple[int, int]) -> tuple[int, ...]:
    """Return the dims of a value along which tokens lie: of [b, s, ...], [b, h, s, ...] and [b*s, ...]."""
    if meta is None or len(meta.shape) < 2:
        return ()
    batch, seq = tokens
    if meta.shape[0] == batch and len(meta.shape) > 2:
        return tuple(dim for dim in (1, 2) if meta.shape[dim] == seq)[:1]
    return (0,) if meta.shape[0] == batch * seq else ()


def _is_split(
    metas: tuple[TensorMeta | None, ...], layouts: tuple[Layout | None, ...], axis: int, tokens: tuple[int, int]
) -> bool:
    found: list[tuple[Placement, tuple[int, ...]]] = [
        (layout[axis], _token_dims(meta, tokens)) for meta, layout in zip(metas, layouts, strict=True) if layout
    ]
    return any(isinstance(placement, Shard) and placement.dim in dims for placement, dims in found)


def _is_whole(
    metas: tuple[TensorMeta | None, ...], layouts: tuple[Layout | None, ...], axis: int, tokens: tuple[int, int]
) -> bool:
    return any(
        isinstance(layout[axis], Replicate) and bool(_token_dims(meta, tokens))
        for meta, layout in zip(metas, layouts, strict=True)
        if layout
    )
