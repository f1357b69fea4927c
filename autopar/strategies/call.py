"""One call of an operator as rules see it: arguments by name, and shapes beside the tensors they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from autopar.ir.graph import Arg, Op, Ref
from autopar.ir.placement import Placement, Replicate, Shard
from autopar.ir.rule import Dims, Rule
from autopar.ir.strategy import Inner, Strategy
from autopar.ir.tensor import TensorMeta


@lru_cache(maxsize=4096)
def overload(target: str) -> Any:
    """Return torch's operator of that name (`aten.mm.default`), or `None` where nothing registered it."""
    space, _, rest = target.partition(".")
    packet, _, name = rest.rpartition(".")
    found: Any = getattr(getattr(torch.ops, space, None), packet, None) if packet else None
    return getattr(found, name, None)


@lru_cache(maxsize=4096)
def signature(target: str) -> tuple[tuple[str, Any], ...]:
    """Return name and default of each argument of an operator; empty where it is not registered."""
    op = overload(target)
    if op is None:
        return ()
    return tuple((arg.name, arg.default_value if arg.has_default_value() else None) for arg in op._schema.arguments)


@dataclass(frozen=True)
class Call:
    """An operator on global tensors, and the size of the mesh axis to split it along."""

    op: Op
    metas: tuple[TensorMeta, ...]
    """Of the tensors read, in `Op.refs` order."""

    size: int
    """Ranks of the axis."""

    hints: tuple[frozenset[Shard], ...]
    wanted: tuple[frozenset[Shard], ...] = ()

    @cached_property
    def arguments(self) -> dict[str, Arg]:
        """Return every argument by its name in torch's schema, defaults filled in."""
        given = dict(self.op.kwargs)
        found: dict[str, Arg] = {}
        for position, (name, default) in enumerate(signature(self.op.target)):
            value = self.op.args[position] if position < len(self.op.args) else given.get(name, default)
            found[name] = tuple(value) if isinstance(value, list) else value
        return found

    @cached_property
    def _index(self) -> dict[str, tuple[int, ...]]:
        counter = iter(range(len(self.metas)))
        by_name: dict[str, tuple[int, ...]] = {}
        names = [name for name, _ in signature(self.op.target)]
        named = [*zip(names, self.op.args, strict=False), *self.op.kwargs]
        for name, value in named:
            by_name[name] = tuple(next(counter) for _ in _tensors(value))
        return by_name

    def arg(self, name: str) -> Any:
        """Return the value of an argument; `Ref`s for tensors."""
        return self.arguments.get(name)

    def index(self, name: str) -> int | None:
        """Return the place in `metas` of the tensor given for an argument; `None` where none is given."""
        found = self._index.get(name, ())
        return found[0] if found else None

    @property
    def gradients(self) -> list[int]:
        """Return the places in `metas` of the gradients that an operator of backward is linear in; others have none."""
        if "_backward" not in self.op.target:
            return []
        return [index for name, found in self._index.items() if name.startswith("grad") for index in found]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of the tensor given for an argument; empty where none is given."""
        index = self.index(name)
        return () if index is None else self.metas[index].shape

    def dim(self, name: str, rank: int) -> int:
        """Return a dimension argument counted from the front."""
        return int(self.arg(name)) % max(rank, 1)

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """Return a list of dimensions counted from the front; all of them where none is given."""
        value = self.arg(name)
        if isinstance(value, int):
            return (value % max(rank, 1),)
        return tuple(int(each) % max(rank, 1) for each in value) if value else tuple(range(rank))

    def result(self, index: int = 0) -> tuple[int, ...]:
        """Return the global shape of an output; empty where it is no tensor."""
        meta = self.op.outputs[index]
        return () if meta is None else meta.shape

    def by(self, rule: Rule) -> Iterator[Strategy]:
        """Yield the strategies of a rule for this call; hints and shapes filled in."""
        return rule.strategies(
            self.size,
            [meta.shape for meta in self.metas],
            [None if meta is None else meta.shape for meta in self.op.outputs],
            self.hints,
            self.wanted,
        )

    def named(
        self,
        inputs: dict[str, Dims],
        outputs: Iterable[Dims | None],
        *,
        added: Iterable[str] = (),
        linear: Iterable[Iterable[str]] = (),
        **options: Any,
    ) -> Iterator[Strategy]:
        """Yield the strategies of a rule whose inputs are told by argument name; absent ones are left out.

        An argument that is a list of tensors has the same dimensions in each. Outputs that are no tensors stay `None`.
        """
        dims: list[Dims] = [((),) * len(meta.shape) for meta in self.metas]
        for name, each in inputs.items():
            for index in self._index.get(name, ()):
                dims[index] = each
        made = tuple(each if meta is not None else None for each, meta in zip(outputs, self.op.outputs, strict=True))
        places = {name: self._index.get(name, ()) for name in (*added, *(n for group in linear for n in group))}
        rule = Rule(
            inputs=tuple(dims),
            outputs=made,
            added=frozenset(i for name in added for i in places[name]),
            linear=tuple(frozenset(i for name in group for i in places[name]) for group in linear),
            **options,
        )
        return self.by(rule)

    def replicated(self) -> Strategy:
        """Return the strategy in which every rank does the whole."""
        return Strategy(
            (Replicate(),) * len(self.metas), tuple(None if m is None else Replicate() for m in self.op.outputs)
        )

    def strategy(
        self,
        inputs: dict[int | None, Placement],
        outputs: dict[int, Placement],
        lowering: str = "",
        inner: tuple[Inner, ...] = (),
    ) -> Strategy:
        """Return a strategy from the placements that are not `Replicate`, by index of input and output."""
        return Strategy(
            tuple(inputs.get(i, Replicate()) for i in range(len(self.metas))),
            tuple(None if meta is None else outputs.get(i, Replicate()) for i, meta in enumerate(self.op.outputs)),
            lowering,
            inner,
        )

    def digits(self, input: int, dim: int) -> tuple[int, ...]:
        """Return the `outer`s to offer when dimension `dim` of an input is split: 1, and those hinted."""
        hinted = sorted(s.outer for s in self.hints[input] if s.dim == dim) if input < len(self.hints) else []
        return tuple(dict.fromkeys((1, *hinted)))


def is_term_friendly(meta: TensorMeta | None) -> bool:
    """Return whether a tensor can be held as terms of a sum."""
    return meta is None or meta.is_floating or meta.dtype.startswith(("complex", "int"))


def _tensors(value: Arg) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
