"""The strategy of each operator along the axis of micro-batches: plain data parallelism, and each on its own rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, Ref, once_per_graph
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call
from autopar.strategies.extremes import extreme
from autopar.strategies.following import mismatch
from autopar.strategies.own_rows import RULES, is_ascending, linear
from autopar.strategies.row_facts import ANY, SPREADING, Fact, MixedRows, Seen, facts_of, named_in, renamed

_BLANK = frozenset(
    f"aten.{name}"
    for name in (
        "full.default", "zeros.default", "ones.default", "empty.memory_format", "empty_strided.default",
        "full_like.default", "zeros_like.default", "ones_like.default", "empty_like.default", "new_zeros.default",
        "new_ones.default", "new_full.default", "new_empty.default", "new_empty_strided.default", "zero.default",
    )
)  # fmt: skip
"""Operators that make a tensor of equal elements: it can be wherever its readers want it."""


_GIVEN = frozenset({"input", "constant", "buffer"})

_RELAID = frozenset({"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.slice.Tensor"})
"""Operators that may turn any dimension into that of the batch."""


def follow_in_time(graph: Graph, count: int, found: Mapping[str, tuple[Strategy, ...]]) -> dict[str, Strategy]:
    """Return the strategy of each representative operator along an axis of `count` micro-batches.

    That of plain data parallelism, but where micro-batches can do by themselves what it would join the batch for.
    An operator that needs the whole batch has a strategy whose inputs are not where they are made.
    What is given to all samples, as learned queries are, is whole in each micro-batch and cut where it meets their
    rows; where views behind it hide that its rows are alike, each micro-batch gives it to its own samples instead.
    """
    plain = _Follower(graph, count, found)
    follow = plain.run()
    if not plain.cuts_what_was_relaid():
        return follow
    spread = _Follower(graph, count, found, spreads=True)
    apart = spread.run()
    return follow if spread.cuts_what_was_relaid() or spread.crossing() - plain.crossing() else apart


@dataclass(frozen=True)
class Followed:
    """What parts of a batch do with a program, each by itself, and what is known of its values then."""

    strategies: Mapping[str, Strategy]
    """By representative."""

    where: Callable[[Ref], Placement | None]
    facts: Mapping[Ref, Fact]
    """Of values of which nothing is known there is none."""


def followed(graph: Graph, count: int, found: Mapping[str, tuple[Strategy, ...]]) -> Followed:
    """Return what `count` parts of the batch do, as `follow_in_time` where nothing is given to all samples."""
    follower = _Follower(graph, count, found)
    return Followed(follower.run(), follower.where, follower.facts)


class _Follower:
    """Goes through a program once, and notes of every value where it is and what is known of it."""

    def __init__(
        self, graph: Graph, count: int, found: Mapping[str, tuple[Strategy, ...]], *, spreads: bool = False
    ) -> None:
        self._graph, self._count, self._options, self._spreads = graph, count, found, spreads
        self._follow: dict[str, Strategy] = {}
        self._wiring = _wiring(graph)
        self._placements: list[Placement | None] = []
        self._codes: dict[Placement | None, int] = {}
        self._placed: list[int] = [-1] * len(self._wiring.numbers)
        """Of each value by its number: which of the placements it has."""

        self.facts: dict[Ref, Fact] = {}
        """Of values of which nothing is known there is none."""

        self._told: list[Fact | None] = [None] * len(self._wiring.numbers)
        """Of each value by its number: what is known of it, in the names of representatives."""

        self._known: dict[str, dict[object, tuple[list[int], list[Fact | None]]]] = {}
        """By representative, and by where what it reads is and what is known of that: the same of what it makes."""

        self._like: dict[Ref, Placement | None] = {}
        """Where blank values would be if they were where what they are made like is."""

        self._sorts: dict[str, Ref] = {}
        self._blank: set[str] = set()
        self._given = of_inputs_alone(graph)
        self._results = {output.ref for output in graph.outputs if output.ref is not None}
        self._returned: dict[str, tuple[int, ...]] = {}
        """Which of its outputs the program returns, by operator."""

        for ref in sorted(self._results, key=lambda each: each.index):
            self._returned[ref.op] = (*self._returned.get(ref.op, ()), ref.index)

    def run(self) -> dict[str, Strategy]:
        placed, known, told = self._placed, self._known, self._told
        for op, rep, reads, first in self._wiring.ops:
            if op.kind != "call":
                self._begin(op)
                continue
            # Deep programs are equal layers: what the first few of them come to is looked up.
            key: object = tuple([placed[each] for each in reads])
            names: dict[str, str] | None = None
            for each in reads:
                if told[each] is not None:
                    names = self._spoken(op, [ref for ref in op.refs if ref in self.facts])
                    key = None if names is None else self._key(key, reads, names)
                    break
            if op.name in self._returned:
                key = None if key is None else (key, self._returned[op.name])
            made = known[rep].get(key) if rep in known else None
            if made is not None and (not made[1] or self._tell(op, made[1], names, first)):
                placed[first : first + len(made[0])] = made[0]
                continue
            self._call(op)
            if key is not None:
                self._remember(op, rep, key, names, first)
        self._settle_blanks()
        return self._follow

    def _spoken(self, op: Op, told: Sequence[Ref] = ()) -> dict[str, str] | None:
        """Return the operators that are spoken of where one reads, by representative; `None` if two share one."""
        spoken = [op.name, *(ref.op for ref in op.refs)]
        for ref in told:
            spoken += named_in(self.facts[ref])
        spoken += [self._sorts[name].op for name in spoken if name in self._sorts]
        names: dict[str, str] = {}
        for name in spoken:
            if names.setdefault(self._graph.representative(name), name) != name:
                return None
        return names

    def _key(self, placed: object, reads: tuple[int, ...], names: Mapping[str, str]) -> object:
        """Return where what an operator reads is, and what is known of that, in the names of representatives."""
        sorts = {rep: self._sorts[name] for rep, name in names.items() if name in self._sorts}
        by = tuple((rep, self._graph.representative(ref.op), ref.index) for rep, ref in sorts.items())
        return placed, tuple([self._told[each] for each in reads]), by

    def _remember(self, op: Op, rep: str, key: object, names: Mapping[str, str] | None, first: int) -> None:
        """Note what an operator came to, for those of other layers, if it speaks of nothing that these cannot name."""
        if op.name in self._blank or op.name in self._sorts:
            return
        stop = first + len(op.outputs)
        told = self._told[first:stop]
        spoken = {name for fact in told if fact is not None for name in named_in(fact)}
        if not spoken or spoken <= (names or self._spoken(op) or {}).keys():
            self._known.setdefault(rep, {})[key] = self._placed[first:stop], told if any(told) else []

    def _tell(self, op: Op, told: Sequence[Fact | None], names: Mapping[str, str] | None, first: int) -> bool:
        """Note what is known of what an operator makes, in its own layer's names; return whether these are known."""
        names = names or self._spoken(op)
        if names is None:
            return False
        for index, fact in enumerate(told):
            if fact is not None:
                self.facts[Ref(op.name, index)] = renamed(fact, names)
                self._told[first + index] = fact
        return True

    def where(self, ref: Ref) -> Placement | None:
        """Return where a value is, `None` where it is as good anywhere."""
        return self._placements[self._placed[self._wiring.numbers[ref]]]

    def _place(self, ref: Ref, placement: Placement | None) -> None:
        if placement not in self._codes:
            self._codes[placement] = len(self._placements)
            self._placements.append(placement)
        self._placed[self._wiring.numbers[ref]] = self._codes[placement]

    def crossing(self) -> set[tuple[str, Ref]]:
        """Return which operators read what of other micro-batches than their own."""
        return {
            (op.name, ref)
            for op in self._graph.ops
            for ref, wanted in self._read(op)
            if self.where(ref) not in {None, Replicate(), wanted}
        }

    def cuts_what_was_relaid(self) -> bool:
        """Return whether rows are cut out of a whole value of which a view made them: nothing shows they are alike."""
        return any(
            isinstance(self._follow[rep].inputs[slot], Shard) and self.where(ref) == Replicate()
            for rep, slot, ref in _reads_of_relaid(self._graph)
        )

    def _read(self, op: Op) -> Iterator[tuple[Ref, Placement]]:
        if op.kind == "call":
            yield from zip(op.refs, self._follow[self._graph.representative(op.name)].inputs, strict=True)

    def _begin(self, op: Op) -> None:
        rep, batch = self._graph.representative(op.name), self._graph.batch_size
        meta = op.outputs[0] if op.outputs else None
        batched = meta is not None and batch and meta.shape[:1] == (batch,) and batch % self._count == 0
        options = self._options[rep]
        mine = options[0]
        if op.kind == "tangent" and batched:
            mine = next((s for s in options if s.outputs[0] == Shard(0)), mine)
        self._follow.setdefault(rep, mine)
        for index, placement in enumerate(mine.outputs):
            self._place(Ref(op.name, index), Shard(0) if op.kind == "input" and batched else placement)

    def _call(self, op: Op) -> None:
        rep = self._graph.representative(op.name)
        metas = tuple(self._graph.meta(ref) for ref in op.refs)
        now = tuple(self.where(ref) for ref in op.refs)
        call = Call(op, metas, self._count, ())
        seen = Seen(op, call, now, tuple(self.facts.get(ref, Fact()) for ref in op.refs), self._sorts)
        try:
            mine, facts = self._found(seen, rep)
            if self._follow.setdefault(rep, mine) != mine:
                raise MixedRows
            if any(fact.is_own and Ref(op.name, index) in self._results for index, fact in enumerate(facts)):
                raise MixedRows
        except MixedRows:
            # Reads everything whole: what it reads in parts is then found to cross micro-batches.
            mine, facts = call.replicated(), (Fact(),) * len(op.outputs)
            if self._follow.get(rep) != mine:
                self._follow[rep] = mine
                self._known.pop(rep, None)
        blank = self._is_blank(op)
        if op.target.startswith("aten.sort.") and facts[0].tells is not None and is_ascending(op):
            self._sorts[op.name] = facts[0].tells[1]
        if blank:
            self._blank.add(op.name)
            followed = self._nearest(seen, rep, self._beside(seen))
            self._like |= {Ref(op.name, index): placement for index, placement in enumerate(followed.outputs)}
        for index, placement in enumerate(mine.outputs):
            ref = Ref(op.name, index)
            self._place(ref, None if blank else placement)
            fact = Fact(ANY) if blank else facts[index]
            if fact != Fact():
                self.facts[ref] = fact
                spoken = {name: self._graph.representative(name) for name in named_in(fact)}
                self._told[self._wiring.numbers[ref]] = renamed(fact, spoken)

    def _found(self, seen: Seen, rep: str) -> tuple[Strategy, tuple[Fact, ...]]:
        own = RULES[seen.op.target](seen) if seen.op.target in RULES else extreme(seen) or linear(seen)
        if own is not None:
            return own
        mine = self._follow.get(rep) or self._plain(seen, rep)
        return mine, facts_of(seen, mine) if not self._is_blank(seen.op) else (Fact(ANY),) * len(mine.outputs)

    def _plain(self, seen: Seen, rep: str) -> Strategy:
        whole = all(each is None or each == Replicate() for each in seen.now)
        spread = self._to_own_samples(seen.op, rep) if whole and self._spreads else None
        if spread is not None:
            return spread
        # Of a parameter and zeros like a part of the batch comes a part: a recurrent layer's first step.
        return self._nearest(seen, rep, self._beside(seen) if whole else seen.now)

    def _to_own_samples(self, op: Op, rep: str) -> Strategy | None:
        """Return how a micro-batch gives a whole value to its own samples alone; `None` if it goes to none."""
        if op.target not in SPREADING or op.outputs[0] is None:
            return None
        after = op.outputs[0].shape
        before = (1,) * (len(after) - len(self._graph.meta(op.refs[0]).shape)) + self._graph.meta(op.refs[0]).shape
        dims = [
            dim for dim, sizes in enumerate(zip(before, after, strict=True)) if sizes == (1, self._graph.batch_size)
        ]
        wanted = [Strategy((Replicate(),), (Shard(dim),)) for dim in dims[:1]]
        return next((each for each in self._options[rep] if each in wanted), None)

    def _beside(self, seen: Seen) -> tuple[Placement | None, ...]:
        """Return where what an operator reads is, blank values beside what they are made like."""
        return tuple(
            self._like.get(ref) if now is None else now for ref, now in zip(seen.op.refs, seen.now, strict=True)
        )

    def _nearest(self, seen: Seen, rep: str, now: tuple[Placement | None, ...]) -> Strategy:
        options = self._options[rep]
        if all(each is None or each == Replicate() for each in now):
            return options[0]
        metas, outputs = seen.call.metas, seen.op.outputs
        # Terms are joined to what all micro-batches have; no part of it is one's own.
        able = [each for each in options if not any(map(_is_part_of_terms, now, each.inputs))]
        options = tuple(able) or options
        alone = [ref.op in self._given for ref in seen.op.refs]
        counts = seen.op.name in self._given
        terms = [slot for slot, each in enumerate(now) if isinstance(each, Partial)]

        def early(strategy: Strategy) -> tuple[int, int]:
            """Return how many terms it joins that are there when all have run, and how many others it does not join."""
            joined = [strategy.inputs[slot] == Replicate() for slot in terms]
            pairs = [(each, alone[slot]) for slot, each in zip(terms, joined, strict=True)]
            return sum(each and not given for each, given in pairs), sum(
                given and not each and not counts for each, given in pairs
            )

        return min(options, key=lambda s: (*early(s), mismatch(s, now, metas, outputs, self._count)))

    def _is_blank(self, op: Op) -> bool:
        """Return whether a value is as good anywhere: of equal elements, or made of nothing but such."""
        return op.target in _BLANK or (bool(op.refs) and all(ref.op in self._blank for ref in op.refs))

    def _settle_blanks(self) -> None:
        """Make blank values where all their readers want them; whole, to be cut, where these disagree."""
        wanted: defaultdict[str, set[Placement]] = defaultdict(set)
        for ref in self._results & {Ref(name) for name in self._blank}:
            wanted[self._graph.representative(ref.op)].add(Replicate())
        for op, rep, _, _ in reversed(self._wiring.ops):
            if op.name in self._blank:
                self._settle(op, rep, wanted[rep])
            for slot, ref in enumerate(op.refs):
                if ref.op in self._blank:
                    wanted[self._graph.representative(ref.op)].add(self._follow[rep].inputs[slot])

    def _settle(self, op: Op, rep: str, wanted: set[Placement]) -> None:
        metas = tuple(self._graph.meta(ref) for ref in op.refs)
        now = tuple(self.where(ref) for ref in op.refs)
        target = next(iter(wanted)) if len(wanted) == 1 else Replicate()
        for made in (target, Replicate()):
            fits = [each for each in self._options[rep] if all(placed == made for placed in each.outputs)]
            if fits:
                self._follow[rep] = min(fits, key=lambda s: mismatch(s, now, metas, op.outputs, self._count))
                return


@once_per_graph
def of_inputs_alone(graph: Graph) -> frozenset[str]:
    """Return the operators that depend on inputs, constants and buffers only: their terms are joined first."""
    found: set[str] = set()
    for op in graph.ops:
        if op.kind in _GIVEN or (op.kind == "call" and all(ref.op in found for ref in op.refs)):
            found.add(op.name)
    return frozenset(found)


def _is_part_of_terms(now: Placement | None, need: Placement) -> bool:
    return isinstance(now, Partial) and isinstance(need, Shard)


@once_per_graph
def _reads_of_relaid(graph: Graph) -> tuple[tuple[str, int, Ref], ...]:
    """Return who reads such values: the reader's representative, its slot and the value."""
    relaid = _relaid(graph)
    return tuple(
        (graph.representative(op.name), slot, ref)
        for op in graph.ops
        if op.kind == "call"
        for slot, ref in enumerate(op.refs)
        if ref.op in relaid
    )


@dataclass(frozen=True, slots=True)
class _Wiring:
    """A program whose values are numbered: a follower goes through it for every number of micro-batches."""

    ops: tuple[tuple[Op, str, tuple[int, ...], int], ...]
    """Each operator, its representative, the values that it reads and the first of those that it makes."""

    numbers: Mapping[Ref, int]
    """Of every value."""


@once_per_graph
def _wiring(graph: Graph) -> _Wiring:
    numbers: dict[Ref, int] = {}
    ops = []
    for op in graph.ops:
        first = len(numbers)
        numbers |= {Ref(op.name, index): first + index for index in range(len(op.outputs))}
        ops.append((op, graph.representative(op.name), tuple(numbers[ref] for ref in op.refs), first))
    return _Wiring(tuple(ops), numbers)


@once_per_graph
def _relaid(graph: Graph) -> frozenset[str]:
    """Return the operators whose values have rows of the batch that a view made of something else, or of such."""
    batch = graph.batch_size
    found: set[str] = set()
    for op in graph.ops:
        if op.target in _BLANK:
            continue
        if op.target in _RELAID and any(meta is not None and meta.shape[:1] == (batch,) for meta in op.outputs):
            before = (graph.meta(ref).shape[:1] for ref in op.refs)
            made = any(dim not in {(), (1,), (batch,)} for dim in before)
        else:
            made = False
        if made or any(ref.op in found for ref in op.refs):
            found.add(op.name)
    return frozenset(found)
