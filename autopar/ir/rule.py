"""A sharding rule as text: which dimensions of an operator's tensors are the same, and what becomes of each.

    mk kn -> mn

Each letter is a *factor*: an index that the operator loops over. Splitting one
factor over the ranks of a mesh axis splits every dimension that bears its
letter; a tensor without the letter is replicated if it is read, and partial if
it is made (the ranks' terms then add up). `_` is a dimension that is never
split, `.` a tensor without dimensions, `-` an output that is no tensor.
`n(gi)` is a tensor of two dimensions whose second one merges the factors `g`
and `i`, `g` being the outer one.

    matrix product         mk kn -> mn
    layer norm             mh h h -> mh m m         whole="h"
    ... and its backward   mh mh m m h h -> mh h h  whole="h"
    grouped convolution    n(gi)__ (go)i__ -> n(go)__
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.strategy import Strategy

Dims = tuple[tuple[str, ...], ...]
"""The factors of each dimension of one tensor, outer factor first; an empty dimension is never split."""

Digit = tuple[str, int]
"""A factor and the number of runs of it that one splits: `(f, 1)` is the contiguous split of factor `f`."""

_DIM = re.compile(r"\(([^()]+)\)|(_)|(\w)")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the dimensions of an operator's inputs and outputs belong together."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]

    whole: frozenset[str] = frozenset()
    """Factors that no axis may split (a softmax's class, a sort's order)."""

    reduce: str | None = "sum"
    """How terms of an output that lacks a split factor combine; `None`: such factors may not be split."""

    added: frozenset[int] = frozenset()
    """Inputs that are added to the result: where terms are made they must be terms too (a bias)."""

    apart: frozenset[tuple[int, str]] = frozenset()
    """(output, factor): this output does not depend on the factor at all, and stays whole when it is split."""

    linear: tuple[frozenset[int], ...] = ()
    """Sets of inputs in which the operator is linear together: given terms of them, it makes terms of every output."""

    lowering: Mapping[str, str] | None = None
    """Factors whose split needs a lowering, and its name."""

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        whole: str = "",
        reduce: str | None = "sum",
        added: Iterable[int] = (),
        linear: bool | Iterable[Iterable[int]] = False,
        lowering: Mapping[str, str] | None = None,
    ) -> Rule:
        """Return the rule that `text` writes; `linear=True` means linear in all inputs together.

        Raises:
            ValueError: the text is no rule.
        """
        before, arrow, after = text.partition("->")
        if not arrow:
            raise ValueError(f"{text!r} is no rule: write inputs -> outputs, as in 'mk kn -> mn'")
        inputs = tuple(_dims(word) for word in before.split())
        sets = (range(len(inputs)),) if linear is True else (linear or ())
        return cls(
            inputs=inputs,
            outputs=tuple(None if word == "-" else _dims(word) for word in after.split()),
            whole=frozenset(whole),
            reduce=reduce,
            added=frozenset(added),
            linear=tuple(frozenset(each) for each in sets),
            lowering=lowering,
        )

    @property
    def factors(self) -> tuple[str, ...]:
        """Return the factors in order of appearance."""
        tensors = (*self.inputs, *(dims for dims in self.outputs if dims is not None))
        return tuple(dict.fromkeys(factor for dims in tensors for dim in dims for factor in dim))

    def strategies(
        self,
        size: int = 1,
        shapes: Sequence[Sequence[int]] = (),
        results: Sequence[Sequence[int] | None] = (),
        hints: Sequence[Iterable[Shard]] = (),
        wanted: Sequence[Iterable[Shard]] = (),
    ) -> Iterator[Strategy]:
        """Yield the strategies on one axis of `size` ranks, the replicated one first.

        `shapes` and `results` are the global shapes of inputs and outputs; they may be left out where no
        dimension is compound and nothing is hinted. `hints` are shards in which the inputs can be had, `wanted`
        shards in which outputs would be welcome: each is offered if the operator can carry it. Whether dimensions
        divide evenly is the caller's to check.
        """
        yield Strategy(
            (Replicate(),) * len(self.inputs), tuple(None if d is None else Replicate() for d in self.outputs)
        )
        sizes = self.sizes(shapes, results)
        digits: dict[Digit, None] = {(factor, 1): None for factor in self.factors}
        tensors = (*zip(self.inputs, hints, strict=False), *zip(self.outputs, wanted, strict=False))
        for dims, shards in tensors:
            for shard in sorted(shards, key=lambda s: (s.dim, s.outer)):
                digit = None if dims is None else _digit(dims, shard, sizes, size)
                if digit is not None:
                    digits[digit] = None
        for digit in digits:
            found = self._split(digit, sizes, size)
            if found is not None:
                yield found
        for together in self.linear:
            yield Strategy(
                tuple(Partial() if i in together else Replicate() for i in range(len(self.inputs))),
                tuple(None if dims is None else Partial() for dims in self.outputs),
            )

    def _split(self, digit: Digit, sizes: Mapping[str, int], ranks: int) -> Strategy | None:
        """Return the strategy that splits one digit; `None` where the rule forbids it."""
        factor, outer = digit
        present = [dims for dims in (*self.inputs, *self.outputs) if dims is not None]
        if factor in self.whole or any(_count(dims, factor) > 1 or not _sized(dims, factor, sizes) for dims in present):
            return None
        # A merged dimension may divide where its factor does not.
        if sizes.get(factor, 0) % (outer * ranks):
            return None
        made = [None if dims is None else _place(dims, digit, sizes) for dims in self.outputs]
        terms = False
        outputs: list[Placement | None] = []
        for index, (dims, placement) in enumerate(zip(self.outputs, made, strict=True)):
            if dims is None or isinstance(placement, Shard) or (index, factor) in self.apart:
                outputs.append(placement)
                continue
            if self.reduce is None:
                return None
            terms = True
            outputs.append(Partial(self.reduce))
        inputs = tuple(
            Partial() if terms and index in self.added else _place(dims, digit, sizes)
            for index, dims in enumerate(self.inputs)
        )
        return Strategy(inputs, tuple(outputs), (self.lowering or {}).get(factor, ""))

    def sizes(self, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int] | None]) -> dict[str, int]:
        """Return the size of each factor that follows from the shapes."""
        known: dict[str, int] = {}
        dims = [
            (dim, size)
            for tensor, shape in itertools.chain(
                zip(self.inputs, shapes, strict=False), zip(self.outputs, results, strict=False)
            )
            if tensor is not None and shape is not None
            for dim, size in zip(tensor, shape, strict=True)
        ]
        for _ in range(2):
            for dim, size in dims:
                unknown = [factor for factor in dim if factor not in known]
                rest = math.prod(known[factor] for factor in dim if factor in known)
                if len(unknown) == 1 and rest and size % rest == 0:
                    known[unknown[0]] = size // rest
        return known


def letters(count: int, start: int = 0) -> tuple[str, ...]:
    """Return `count` distinct factor names, for rules made from shapes."""
    return tuple(_LETTERS[i] if i < len(_LETTERS) else f"f{i}" for i in range(start, start + count))


def plain(names: Iterable[str | None]) -> Dims:
    """Return the dimensions of a tensor from one factor name (or `None`: never split) a dimension."""
    return tuple(() if name is None else (name,) for name in names)


def _dims(word: str) -> Dims:
    if word == ".":
        return ()
    found = [match.groups() for match in _DIM.finditer(word)]
    if "".join(f"({merged})" if merged else blank or letter for merged, blank, letter in found) != word:
        raise ValueError(f"{word!r} is no list of dimensions: write letters, _ and (merged letters)")
    return tuple(tuple(merged) if merged else (() if blank else (letter,)) for merged, blank, letter in found)


def _count(dims: Dims, factor: str) -> int:
    return sum(dim.count(factor) for dim in dims)


def _sized(dims: Dims, factor: str, sizes: Mapping[str, int]) -> bool:
    """Return whether the sizes are known of the factors that lie outside `factor` in its dimension."""
    return all(each in sizes for dim in dims if factor in dim for each in dim[: dim.index(factor)])


def _place(dims: Dims, digit: Digit, sizes: Mapping[str, int]) -> Placement:
    factor, outer = digit
    for index, dim in enumerate(dims):
        if factor in dim:
            before = math.prod(sizes[each] for each in dim[: dim.index(factor)])
            return Shard(index, before * outer)
    return Replicate()


def _digit(dims: Dims, shard: Shard, sizes: Mapping[str, int], ranks: int) -> Digit | None:
    """Return the factor, and the runs within it, whose split is `shard`."""
    if shard.dim >= len(dims):
        return None
    before = 1
    dim = dims[shard.dim]
    for factor in dim:
        size = sizes.get(factor, 0)
        if len(dim) == 1:
            return (factor, shard.outer)
        if size and shard.outer % before == 0 and (before * size) % (shard.outer * ranks) == 0:
            return (factor, shard.outer // before)
        before *= size
    return None
