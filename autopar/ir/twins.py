"""Frozen branches built like a trained one: teachers, target networks, reference models.

A loop that makes a teacher the running mean of a student pairs their parameters by order
(`zip(student.parameters(), teacher.parameters())`), which asks that each pair is on the same pipeline rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, once_per_graph
from autopar.ir.tensor import TensorMeta


@dataclass(frozen=True, slots=True)
class Twin:
    """Two modules whose parameters have the same names and shapes below them."""

    frozen: str
    """Path of the one without gradients."""

    trained: str


def twins(graph: Graph, blocks: Iterable[str], computed: Collection[str]) -> tuple[Twin, ...]:
    """Return the frozen modules that hold blocks, each with the trained module that it is like.

    `blocks` are module paths, `computed` the operators that run on one stage only. The outermost module counts
    where several fit, and nothing where the frozen one reads what the other made: it can only run behind it then.
    """
    own = {root: _parameters(graph, root) for root in dict.fromkeys(root for path in blocks for root in _roots(path))}
    trained = _trained(graph)
    found: list[Twin] = []
    for root in sorted(own, key=lambda path: path.count(".")):
        if not own[root] or any(lies_in(root, twin.frozen) for twin in found):
            continue
        if any(name in trained for name in _names(root, own[root])):
            continue
        alike = (
            other
            for other in own
            if own[other] == own[root]
            and not lies_in(other, root)
            and not lies_in(root, other)
            and any(name in trained for name in _names(other, own[other]))
            and not _reads(graph, root, other, computed)
        )
        partner = max(alike, key=lambda other: _shared(root, other), default=None)
        if partner is not None:
            found.append(Twin(root, partner))
    return tuple(found)


def branch(graph: Graph, root: str, computed: Collection[str]) -> frozenset[str]:
    """Return the operators of a module, and those outside of it that are made of nothing else that is computed."""
    found: set[str] = set()
    for op in graph.ops:
        if op.name in computed:
            reads = [ref.op in found for ref in op.refs if ref.op in computed]
            if lies_in(op.module, root) or (reads and all(reads)):
                found.add(op.name)
    return frozenset(found)


def lies_in(path: str, root: str) -> bool:
    """Return whether a module is another one or below it."""
    return not root or path == root or path.startswith(f"{root}.")


def _roots(path: str) -> Iterator[str]:
    """Yield the modules around a block that have a name of their own, outer ones first."""
    words = path.split(".")
    for count, word in enumerate(words[:-1], 1):
        if not word.isdigit():
            yield ".".join(words[:count])


def _parameters(graph: Graph, root: str) -> Mapping[str, TensorMeta | None]:
    """Return what the parameters below a module are like, by their names from there."""
    return {
        name[len(root) + 1 :]: op.outputs[0]
        for op in graph.ops
        if op.kind == "parameter"
        for name in graph.aliases.get(op.target, (op.target,))
        if lies_in(name, root)
    }


def _names(root: str, parameters: Iterable[str]) -> Iterator[str]:
    return (f"{root}.{name}" for name in parameters)


@once_per_graph
def _trained(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that have a gradient, tied ones under each of theirs."""
    given = [graph.by_name[each.name].target for each in graph.outputs if each.kind == "gradient" and each.ref]
    return frozenset(name for target in given for name in graph.aliases.get(target, (target,)))


def _reads(graph: Graph, root: str, other: str, computed: Collection[str]) -> bool:
    """Return whether a module's forward depends on what another one computed."""
    reached: set[str] = set()
    for op in graph.ops:
        if op.name in computed and (lies_in(op.module, other) or any(ref.op in reached for ref in op.refs)):
            if lies_in(op.module, root):
                return True
            reached.add(op.name)
    return False


def _shared(one: str, other: str) -> int:
    """Return how many words two paths begin with alike."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((at for at, (mine, its) in enumerate(pairs) if mine != its), 0)
