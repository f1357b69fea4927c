"""Passes that let an operator write into a value that nobody reads any more; nothing moves after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.own_operators import CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_BACKWARD_
from autopar.rewrite.level_ops import LEVELS
from autopar.rewrite.marks import C10D, role

_ATEN = torch.ops.aten

_SCORES = 1
"""Place of the log-probabilities among the arguments of cross entropy's backward."""

_COMMUTING = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor})


@dataclass(frozen=True, slots=True)
class ComputeIntoDead:
    """Let an elementwise operator write into an input that nothing reads afterwards.

        c = relu(a)                 a is not read again
    becomes
        c = relu_(a)

    Eager PyTorch takes fresh memory, which on a CPU costs more than many of these operators: the kernel has to clear
    every page of it.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators changed."""
        memory = _Memory.of(gm)
        changed = 0
        for node in gm.graph.nodes:
            for into, target, args, kwargs in _ways_into(node):
                others = [each for each in node.all_input_nodes if each is not into]
                free = memory.is_free_at(into, node) and all(memory.differ(into, each) for each in others)
                if free and _alike(into, node) and _fed_once(node, into):
                    node.target, node.args, node.kwargs = target, args, kwargs
                    memory.merge(into, node)
                    changed += 1
                    break
        return changed


Way = tuple[fx.Node, Any, tuple[Any, ...], dict[str, Any]]


def _ways_into(node: fx.Node) -> Iterator[Way]:
    """Yield, for each input that the operator could write into: that input, the operator that does it, its arguments.

    Kernels exist for the first input (`relu_`), and for any input of a derivative (`threshold_backward.grad_input`);
    other `out=` forms compute into fresh memory and copy.
    """
    target: Any = node.target
    yield from _ways_of_rows(node)
    if getattr(target, "namespace", "") != "aten" or torch.Tag.pointwise not in target.tags:
        return
    args, kwargs = node.args, dict(node.kwargs)
    packet = target._schema.name.split("::")[1]
    within = getattr(getattr(torch.ops.aten, f"{packet}_", None), target._overloadname, None)
    if within is not None and args and isinstance(args[0], fx.Node):
        yield args[0], within, args, kwargs
        if target in _COMMUTING and len(args) == 2 and isinstance(args[1], fx.Node) and not kwargs:
            yield args[1], within, (args[1], args[0]), kwargs
    derivative = getattr(target.overloadpacket, "grad_input", None)
    if derivative is not None:
        for each in args:
            if isinstance(each, fx.Node):
                yield each, derivative, args, {**kwargs, "grad_input": each}


def _ways_of_rows(node: fx.Node) -> Iterator[Way]:
    """Yield those of operators whose numbers depend on others of their row, or are written at places."""
    target: Any = node.target
    into: Any = node.args[_SCORES if target is CROSS_ENTROPY_BACKWARD else 0] if node.args else None
    if target is CROSS_ENTROPY_BACKWARD:
        yield into, CROSS_ENTROPY_BACKWARD_, node.args, dict(node.kwargs)
    if target is _ATEN.scatter_add.default:
        yield into, _ATEN.scatter_add_.default, node.args, dict(node.kwargs)
    if target is _ATEN._log_softmax.default:
        # Kernels read a row to its end before they write it, and then each number where they read it.
        yield into, _ATEN._log_softmax.out, node.args, {**node.kwargs, "out": into}


def _fed_once(node: fx.Node, value: fx.Node) -> bool:
    return sum(each is value for each in node.args) == 1


_OF_SEVERAL: Mapping[Any, Any] = {
    C10D.all_reduce_coalesced.default: C10D.all_reduce_coalesced_.default,
    LEVELS.all_reduce.default: LEVELS.all_reduce_.default,
}


@dataclass(frozen=True, slots=True)
class ReduceIntoDead:
    """Reduce in place what nothing else reads; otherwise the reduction copies it first."""

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators changed."""
        memory = _Memory.of(gm)
        changed = 0
        for node in gm.graph.find_nodes(op="call_function", target=C10D.all_reduce.default):
            value = node.args[0]
            if memory.is_free_at(value, node, issuing=True):
                node.target = C10D.all_reduce_.default
                memory.merge(value, node)
                changed += 1
        for node in gm.graph.nodes:
            within = _OF_SEVERAL.get(node.target) if node.op == "call_function" else None
            values = () if within is None else node.args[0]
            if values and all(memory.is_free_at(value, node, issuing=True) for value in values):
                node.target = within
                for part in node.users:
                    memory.merge(values[part.args[1]], part)
                changed += len(values)
        return changed


@dataclass(frozen=True)
class _Memory:
    """Which nodes share memory, and when each piece of memory is read last."""

    position: Mapping[fx.Node, int]
    key: dict[fx.Node, int]
    last: dict[int, int]
    kept: set[int]
    """Memory that a caller holds."""

    sent: Counter[int]
    """How many collectives read a piece of memory, perhaps until they are waited for."""

    @classmethod
    def of(cls, gm: fx.GraphModule) -> _Memory:
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        key: dict[fx.Node, int] = {}
        last: dict[int, int] = {}
        kept: set[int] = set()
        sent: Counter[int] = Counter()
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                key[node] = storage_key(value)
                if node.op != "call_function":
                    kept.add(key[node])
            for each in node.all_input_nodes:
                if each in key:
                    last[key[each]] = position[node]
                    if node.op == "output":
                        kept.add(key[each])
                    if role(node) == "start":
                        sent[key[each]] += 1
        return cls(position, key, last, kept, sent)

    def is_free_at(self, value: fx.Node, reader: fx.Node, *, issuing: bool = False) -> bool:
        """Return whether `reader` is the last to read the memory of `value`, all of which `value` is."""
        key = self.key.get(value)
        if key is None or key in self.kept or self.sent[key] > int(issuing):
            return False
        tensor = value.meta["val"]
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return whole and self.last[key] == self.position[reader]

    def differ(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two values share no memory."""
        return self.key.get(one) != self.key.get(other)

    def merge(self, value: fx.Node, result: fx.Node) -> None:
        """Note that `result` lives in the memory of `value` from now on."""
        old, new = self.key[value], self.key[result]
        for node, key in self.key.items():
            if key == new:
                self.key[node] = old
        self.last[old] = max(self.last.get(old, 0), self.last.get(new, 0))
        self.sent[old] += self.sent[new]
        if new in self.kept:
            self.kept.add(old)


def _alike(value: fx.Node, result: fx.Node) -> bool:
    a, b = value.meta["val"], result.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride())
