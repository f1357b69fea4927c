"""Sharding rules of table look-ups and their gradients.

Splitting the table by rows (`vocab`) needs a lowering: each rank looks up the
rows it holds, and gives zero for the others, so that the results add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.placement import Partial, Shard
from autopar.ir.rule import letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def _embedding(call: Call) -> Iterator[Strategy]:
    indices = letters(len(call.shape("indices")))
    yield from call.named(
        {"weight": (("v",), ("w",)), "indices": plain(_apart(indices))},
        [(*plain(_apart(indices)), ("w",))],
        whole=frozenset("v"),
    )
    weight = call.index("weight")
    if weight is not None:
        for outer in call.digits(weight, 0):
            yield call.strategy({weight: Shard(0, outer)}, {0: Partial()}, "vocab")


def _embedding_backward(call: Call) -> Iterator[Strategy]:
    rank = len(call.shape("indices"))
    indices = plain(_apart(letters(rank)))
    by_frequency = bool(call.arg("scale_grad_by_freq"))
    yield from call.named(
        {"grad_output": (*indices, ("w",)), "indices": indices},
        [(("v",), ("w",))],
        whole=frozenset(("v", *_apart(letters(rank)))) if by_frequency else frozenset(),
        lowering={"v": "vocab"},
        linear=(("grad_output",),),
    )


def _apart(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the index factors under names that the table's own (`v`, `w`) cannot be."""
    return tuple(f"{name}'" for name in names)


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
}
