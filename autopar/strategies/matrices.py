"""Sharding rules of factorisations and solutions of whole matrices, of which each sample may have its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.rule import Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call
from autopar.strategies.matmul import aligned
from autopar.strategies.reductions import leading


def _solve_triangular(call: Call) -> Iterator[Strategy]:
    """Yield those of a triangular system: each matrix by itself, and each right-hand side (`left`: a column)."""
    lead = letters(len(call.result()) - 2)
    sides = (None, "k'") if call.arg("left") is not False else ("k'", None)
    matrix = (*aligned(call.metas[0].shape[:-2], plain(lead)), (), ())
    rest = (*aligned(call.metas[1].shape[:-2], plain(lead)), *plain(sides))
    return call.by(
        Rule(inputs=(matrix, rest), outputs=((*plain(lead), *plain(sides)),), linear=(frozenset({1}),))
    )  # fmt: skip


RULES: Mapping[str, Callable[[Call], Iterator[Strategy]]] = {
    "aten.linalg_inv_ex.default": leading(2),
    "aten.linalg_qr.default": leading(2),
    "aten._linalg_svd.default": leading(2),
    "aten._linalg_eigh.default": leading(2),
    "aten.linalg_solve_triangular.default": _solve_triangular,
}
