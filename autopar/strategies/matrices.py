"""Sharding rules of factorisations and solutions of whole matrices, of which each sample may have its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call
from autopar.strategies.matmul import aligned
from autopar.strategies.reductions import leading

_COLUMNS, _ROWS = (None, "k'"), ("k'", None)
"""Right-hand sides of `A X = B` and of `X A = B`: each is solved by itself."""


def _solve_triangular(call: Call) -> Iterator[Strategy]:
    """Yield those of a triangular system: each matrix by itself, and each right-hand side (`left`: a column)."""
    return _solved(call, matrices={0: 2}, right=1, sides=_sides(call))


def _cholesky_solve(call: Call) -> Iterator[Strategy]:
    """Yield those of a system whose matrix is given by its triangular factor."""
    return _solved(call, matrices={1: 2}, right=0, sides=_COLUMNS)


def _lu_solve(call: Call) -> Iterator[Strategy]:
    """Yield those of a system whose matrix is given by its factors and the order of its rows."""
    return _solved(call, matrices={0: 2, 1: 1}, right=2, sides=_sides(call))


def _solve(call: Call) -> Iterator[Strategy]:
    """Yield those of a system, of which the matrix's factors are returned as well: they know no right-hand sides."""
    matrix, right = (meta.shape for meta in call.metas)
    is_vector = len(right) == 1 or right == matrix[:-1]
    return _solved(call, matrices={0: 2}, right=1, sides=(None,) if is_vector else _sides(call), factors=(2, 1, 0))


def _sides(call: Call) -> tuple[str | None, ...]:
    return _ROWS if call.arg("left") is False else _COLUMNS


def _solved(
    call: Call,
    *,
    matrices: Mapping[int, int],
    right: int,
    sides: tuple[str | None, ...],
    factors: tuple[int, ...] = (),
) -> Iterator[Strategy]:
    """Yield the strategies of systems of equations.

    `matrices` are the inputs, and `factors` the outputs behind the result, that belong to the matrix: how many of their
    last dimensions are the matrix's own. `sides` are the last dimensions of the right-hand sides.
    """
    lead = plain(letters(len(call.result()) - len(sides)))

    def with_lead(slot: int, own: Dims) -> Dims:
        shape = call.metas[slot].shape
        return (*aligned(shape[: len(shape) - len(own)], lead), *own)

    inputs = {slot: with_lead(slot, ((),) * own) for slot, own in matrices.items()}
    each = with_lead(min(matrices), ((),) * matrices[min(matrices)])[: -matrices[min(matrices)]]
    inputs[right] = with_lead(right, plain(sides))
    outputs: list[Dims] = [(*lead, *plain(sides)), *((*each, *((),) * own) for own in factors)]
    every = {factor for dim in outputs[0] for factor in dim}
    apart = {(i, factor) for i in range(1, len(outputs)) for factor in every if (factor,) not in outputs[i]}
    rule = Rule(
        inputs=tuple(inputs[slot] for slot in sorted(inputs)),
        outputs=tuple(outputs),
        apart=frozenset(apart),
        linear=() if factors else (frozenset({right}),),
    )
    return call.by(rule)


RULES: Mapping[str, Callable[[Call], Iterator[Strategy]]] = {
    "aten.linalg_inv_ex.default": leading(2),
    "aten.linalg_qr.default": leading(2),
    "aten._linalg_svd.default": leading(2),
    "aten._linalg_eigh.default": leading(2),
    "aten.linalg_solve_triangular.default": _solve_triangular,
    "aten.cholesky_solve.default": _cholesky_solve,
    "aten.linalg_lu_solve.default": _lu_solve,
    "aten._linalg_solve_ex.default": _solve,
}
