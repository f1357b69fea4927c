"""What the ranks of a data-parallel axis do each on their own samples, where the program would join the batch.

    router -> topk -> [ sort  index  grouped_mm ...  grouped_mm  index ] -> sum

A mixture of experts sorts the tokens of the whole batch by expert. Ranks that each sort their own, multiply and put
them back make the same of every token, and nothing travels. `own_rows` knows which operators can, for micro-batches;
here the same holds for ranks. What is between the sort and the way back is marked as in the order of its rank (see
`ir.placement`), so that nobody takes it for a part of the whole, sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.microbatches import OWN
from autopar.ir.placement import Partial, Placement, Replicate, Shard, is_own, is_valid
from autopar.ir.strategy import Strategy
from autopar.strategies.factories import RULES as BLANK
from autopar.strategies.in_time import Followed, followed
from autopar.strategies.own_rows import RULES
from autopar.strategies.routed import routed
from autopar.strategies.row_facts import Fact

_Value = tuple[str, int]

_BEGINS = frozenset(target for target in RULES if target.startswith(("aten.sort.", "aten.index", "aten._unsafe_index")))
"""Operators of which every such part of a program has one."""


def on_own_samples(
    graph: Graph, size: int, found: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return what representative operators do on an axis of `size` ranks, each on the samples of its rank alone.

    Only operators that `found`, all strategies along the axis, would have wait for other ranks, and those between them;
    a part of the program of which some operator needs the whole batch is left out. What only looks at the shape of such
    rows may be whole, too.
    """
    if not _may_have_own(graph, size):
        return {}
    return _OwnSamples(graph, size, followed(graph, size, found)).strategies()


def on_ranks_of_experts(
    graph: Graph, size: int, found: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return what representative operators do on an axis that splits experts: rows in their rank's order, or sent.

    Products with experts read rows that came to the ranks of these; what treats rows one by one may do so there, too.
    """
    if not _may_have_own(graph, size):
        return {}
    own = _OwnSamples(graph, size, followed(graph, size, found))
    return routed(graph, size, own.strategies(), own.orders)


def _may_have_own(graph: Graph, size: int) -> bool:
    return graph.batch_size % size == 0 and any(op.target in _BEGINS for op in graph.ops)


class _OwnSamples:
    """Marks what is in an order of its rank, and takes the parts of the program in which all agree about it."""

    def __init__(self, graph: Graph, size: int, known: Followed) -> None:
        self._graph, self._size, self._known = graph, size, known
        self._own = {ref for ref, fact in known.facts.items() if self._is_own(ref, fact)}

    @property
    def orders(self) -> dict[Ref, str]:
        """Return, of the values in an order of their rank, what sorted them."""
        return {ref: fact.order for ref, fact in self._known.facts.items() if ref in self._own}

    def strategies(self) -> dict[str, tuple[Strategy, ...]]:
        """Return those of each representative."""
        marked: dict[str, set[Strategy]] = {}
        parts = _Parts()
        for op in self._concerned():
            rep = self._graph.representative(op.name)
            marked.setdefault(rep, set()).add(self._marked(op))
            for ref in op.refs:
                if ref in self._own:
                    parts.join(rep, self._graph.representative(ref.op))
        wrong = {parts.of(rep) for rep in marked if len(marked[rep]) > 1 or not self._agrees(rep, marked)}
        return {rep: self._options(rep, *each) for rep, each in marked.items() if parts.of(rep) not in wrong}

    def _options(self, rep: str, mine: Strategy) -> tuple[Strategy, ...]:
        whole = replace(mine, outputs=tuple(None if each is None else Replicate() for each in mine.outputs))
        return (whole, mine) if self._graph.by_name[rep].target in BLANK else (mine,)

    def _concerned(self) -> list[Op]:
        """Return, in order, the operators that read or make what is in an order of its rank, or count in it."""
        found = {ref.op for ref in self._own}
        found |= {user for ref in self._own for user in self._graph.users[ref.op] if self._reads(user)}
        for rep, strategy in self._known.strategies.items():
            if strategy.lowering == OWN and self._graph.by_name[rep].kind == "call":
                found |= {op.name for op in self._graph.instances[rep]}
        return [self._graph.by_name[name] for name in sorted(found, key=self._graph.position.__getitem__)]

    def _reads(self, name: str) -> bool:
        return any(ref in self._own for ref in self._graph.by_name[name].refs)

    def _is_own(self, ref: Ref, fact: Fact) -> bool:
        """Return whether a value is none of the whole batch, cut: sorted or counted by each rank for itself."""
        counts = fact.tells is not None and fact.tells[0] in {"counts", "ends"}
        return fact.is_own or (counts and self._known.where(ref) == Partial())

    def _strategy(self, op: Op) -> Strategy:
        return self._known.strategies[self._graph.representative(op.name)]

    def _marked(self, op: Op) -> Strategy:
        plain = self._strategy(op)
        inputs = []
        for ref, placement in zip(op.refs, plain.inputs, strict=True):
            made: Placement = placement
            if ref in self._own:
                made = _own(placement)
            elif plain.lowering == OWN and isinstance(placement, Shard) and self._counts(ref):
                made = replace(placement, rows="first")
            inputs.append(made)
        outputs = tuple(
            _own(placement) if placement is not None and Ref(op.name, index) in self._own else placement
            for index, placement in enumerate(plain.outputs)
        )
        return replace(plain, inputs=tuple(inputs), outputs=outputs)

    def _counts(self, ref: Ref) -> bool:
        """Return whether a value that all ranks have whole holds places, which each counts from its first row."""
        meta = self._graph.meta(ref)
        return self._known.where(ref) == Replicate() and not meta.is_continuous

    def _agrees(self, rep: str, marked: Mapping[str, set[Strategy]]) -> bool:
        """Return whether what all instances read in its own order is made so, and all splits are even."""
        for op in self._graph.instances[rep]:
            mine = next(iter(marked[rep]))
            for ref, placement in zip(op.refs, mine.inputs, strict=True):
                makers = marked.get(self._graph.representative(ref.op), set())
                if is_own(placement) and any(each.outputs[ref.index] != placement for each in makers):
                    return False
                if not is_own(placement) and ref in self._own:
                    return False
            metas = (*map(self._graph.meta, op.refs), *op.outputs)
            pairs = zip(metas, (*mine.inputs, *mine.outputs), strict=True)
            if not all(
                meta is None or placement is None or is_valid(meta.shape, (placement,), (self._size,))
                for meta, placement in pairs
            ):
                return False
        return True


def _own(placement: Placement) -> Placement:
    if isinstance(placement, Shard):
        return replace(placement, rows="own")
    return Partial("own") if placement == Partial() else placement


class _Parts:
    """Which operators belong together, as they hand each other what is in their rank's own order."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def of(self, name: str) -> str:
        while (above := self._above.get(name, name)) != name:
            name = above
        return name

    def join(self, one: str, other: str) -> None:
        self._above[self.of(one)] = self.of(other)
