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


def _bag(call: Call) -> Iterator[Strategy]:
    """Yield those of bags that begin where a tensor says: their rows are theirs, columns split."""
    if call.arg("mode") == _MAXIMA:
        yield call.replicated()
        return
    rest = [((),) * len(call.result(i)) for i in range(1, 4)]
    yield from call.named(
        {"weight": ((), ("w",))}, [((), ("w",)), *rest], apart=frozenset((i, "w") for i in range(1, 4))
    )


def _bag_backward(call: Call) -> Iterator[Strategy]:
    if call.arg("mode") == _MAXIMA:
        yield call.replicated()
        return
    yield from call.named({"grad": ((), ("w",))}, [((), ("w",))], linear=(("grad",),))


_MAXIMA = 2
"""Mode of embedding bags that take maxima (torch.nn.functional.embedding_bag)."""


def _apart(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the index factors under names that the table's own (`v`, `w`) cannot be."""
    return tuple(f"{name}'" for name in names)


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._embedding_bag.default": _bag,
    "aten._embedding_bag_backward.default": _bag_backward,
}

LOOKUPS = frozenset(
    {"aten.embedding.default", "aten._embedding_bag.default", "aten.index.Tensor", "aten.index_select.default"}
)
"""Operators that read rows of a table."""
