"""Reductions over samples in two steps, each sample's own first: what is left of a large value is a number a sample.

    logits.std()        →        a mean and a variance for each sample, and the whole batch's of these

So for what a model returns and trains nothing on: its second step is a metric, computed after a step in micro-batches
(`metrics`), which takes small values alone. What inputs alone decide is summed before the first micro-batch, and may be
read by what is trained:

    advantages.std()    →        the root of the mean square of what they differ from their mean
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_HALVES = frozenset({torch.bfloat16, torch.float16})

_COUNTED = {"any": (_ATEN.ne.Scalar, _ATEN.gt.Scalar), "all": (_ATEN.eq.Scalar, _ATEN.eq.Scalar)}
"""What each element is asked, and what the number of those that say yes is: `all` counts zeros, and wants none."""

_SPREADS = {"var": (False, False), "std": (True, False), "var_mean": (False, True), "std_mean": (True, True)}
"""Whether it is the root, and whether the mean comes with it."""

_OF_THEMSELVES = frozenset({"linalg_vector_norm", "logsumexp"})
"""Reductions that are the same reduction of those of parts: norms of every order but 0, logarithms of sums."""


def compose_reductions(
    graph: fx.Graph, of_batch: Collection[fx.Node], needed: Collection[fx.Node], given: Collection[fx.Node], small: int
) -> int:
    """Replace reductions over the first and other dimensions; return how many.

    Only of nodes `of_batch`: those not `needed` for what is trained, of values of more than `small` elements, and those
    needed that only what is `given` decides.
    """
    changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in of_batch or (node in needed and node not in given):
            continue
        made = _composed(graph, node, 0 if node in needed else small, small)
        if made is None:
            continue
        if isinstance(made, tuple):
            for user in list(node.users):
                user.replace_all_uses_with(made[user.args[1]])
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(made)
        graph.erase_node(node)
        changed += 1
    return changed


def _composed(graph: fx.Graph, node: fx.Node, above: int, small: int) -> fx.Node | tuple[fx.Node, ...] | None:
    """Return what takes a node's place; `None` to leave it, as that of no more elements than `above`."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.partition("::")[2]
    if name not in _COUNTED and name not in _SPREADS and name not in _OF_THEMSELVES:
        return None
    given = _arguments(node, target)
    source = given["self"]
    value = source.meta["val"]
    dims = _dims(given.get("dim"), value.dim())
    others = [dim for dim in dims if dim]
    is_reduced = 0 in dims and value.numel() > above
    if not is_reduced or value.is_complex():
        return None
    make = _Maker(graph, node)
    with graph.inserting_before(node):
        if name in _COUNTED:
            return make.counted(name, source, dims, keepdim=given.get("keepdim", False))
        if name in _OF_THEMSELVES and (given.get("dtype") is not None or value.dtype in _HALVES):
            return None
        if not above:
            made = {"linalg_vector_norm": make.root_of_powers, "logsumexp": make.logarithm}.get(name)
            return make.around_mean(name, source, dims, given) if made is None else made(source, dims, given)
        rest = value.numel() // math.prod(value.shape[dim] for dim in others)
        if not others or rest > small:
            return None
        if name == "linalg_vector_norm":
            if given["ord"] == 0:
                return None
            inner = make(_ATEN.linalg_vector_norm.default, source, given["ord"], others, True)
            return make(_ATEN.linalg_vector_norm.default, inner, given["ord"], dims, given["keepdim"])
        if name == "logsumexp":
            return make(
                _ATEN.logsumexp.default, make(_ATEN.logsumexp.default, source, others, True), dims, given["keepdim"]
            )
        return make.spread(name, source, dims, others, given)


def _arguments(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    """Return all arguments by name, defaults among them."""
    found = {each.name: each.default_value for each in target._schema.arguments if each.has_default_value()}
    found |= {each.name: arg for each, arg in zip(target._schema.arguments, node.args, strict=False)}
    return found | dict(node.kwargs)


def _dims(given: Any, rank: int) -> list[int]:
    if given is None or given == []:
        return list(range(rank))
    return sorted({dim % rank for dim in (given if isinstance(given, list | tuple) else [given])})


class _Maker:
    """Makes nodes beside one, with what is known of that."""

    def __init__(self, graph: fx.Graph, beside: fx.Node) -> None:
        self._graph, self._beside = graph, beside

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = self._graph.call_function(target, args, kwargs)
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
        made.meta = {**self._beside.meta, "val": target(*values, **kwargs)}
        return made

    def counted(self, name: str, source: fx.Node, dims: list[int], *, keepdim: bool) -> fx.Node:
        """Return `any` or `all`, from how many elements there are that decide it."""
        ask, decide = _COUNTED[name]
        number = self(_ATEN.sum.dim_IntList, self(ask, source, 0), dims, keepdim, dtype=torch.int64)
        found = self(decide, number, 0)
        wanted = self._beside.meta["val"].dtype
        return found if wanted is torch.bool else self(_ATEN._to_copy.default, found, dtype=wanted)

    def spread(
        self, name: str, source: fx.Node, dims: list[int], others: list[int], given: dict[str, Any]
    ) -> fx.Node | tuple[fx.Node, ...]:
        """Return a variance or standard deviation: within samples, and of the samples' means."""
        keep, wide = given["keepdim"], self._wide(source)
        within = self(_ATEN.var.correction, wide, others, correction=0, keepdim=True)
        means = self(_ATEN.mean.dim, wide, others, True)
        among = self(_ATEN.var.correction, means, dims, correction=0, keepdim=keep)
        whole = self(_ATEN.add.Tensor, self(_ATEN.mean.dim, within, dims, keep), among)
        return self._finished(name, source, dims, given, whole, lambda: self(_ATEN.mean.dim, means, dims, keep))

    def around_mean(
        self, name: str, source: fx.Node, dims: list[int], given: dict[str, Any]
    ) -> fx.Node | tuple[fx.Node, ...]:
        """Return a variance or standard deviation: the mean first, then the squares around it."""
        keep, wide = given["keepdim"], self._wide(source)
        around = self(_ATEN.sub.Tensor, wide, self(_ATEN.mean.dim, wide, dims, True))
        squares = self(_ATEN.mean.dim, self(_ATEN.mul.Tensor, around, around), dims, keep)
        return self._finished(name, source, dims, given, squares, lambda: self(_ATEN.mean.dim, wide, dims, keep))

    def root_of_powers(self, source: fx.Node, dims: list[int], given: dict[str, Any]) -> fx.Node | None:
        """Return a norm, of the sum of what its elements add to it."""
        order, keep, sizes = given["ord"], given["keepdim"], self(_ATEN.abs.default, source)
        if order == 0:
            return None
        if math.isinf(order):
            return self(_ATEN.amax.default if order > 0 else _ATEN.amin.default, sizes, dims, keep)
        powers = sizes if order == 1 else self(_ATEN.pow.Tensor_Scalar, sizes, order)
        total = self(_ATEN.sum.dim_IntList, powers, dims, keep)
        return total if order == 1 else self(_ATEN.pow.Tensor_Scalar, total, 1 / order)

    def logarithm(self, source: fx.Node, dims: list[int], given: dict[str, Any]) -> fx.Node:
        """Return the logarithm of a sum of exponentials, of the sum of those below the largest."""
        largest = self(_ATEN.amax.default, source, dims, True)
        below = self(_ATEN.exp.default, self(_ATEN.sub.Tensor, source, largest))
        total = self(_ATEN.log.default, self(_ATEN.sum.dim_IntList, below, dims, True))
        found = self(_ATEN.add.Tensor, total, largest)
        return found if given["keepdim"] else self(_ATEN.squeeze.dims, found, dims)

    def _wide(self, source: fx.Node) -> fx.Node:
        halves = source.meta["val"].dtype in _HALVES
        return self(_ATEN._to_copy.default, source, dtype=torch.float32) if halves else source

    def _finished(
        self,
        name: str,
        source: fx.Node,
        dims: list[int],
        given: dict[str, Any],
        squares: fx.Node,
        mean: Callable[[], fx.Node],
    ) -> fx.Node | tuple[fx.Node, ...]:
        """Return what the operator makes, from the mean square around the mean."""
        is_root, with_mean = _SPREADS[name]
        value = source.meta["val"]
        correction = 1 if given["correction"] is None else given["correction"]
        count = math.prod(value.shape[dim] for dim in dims)
        # As torch has it, of fewer elements than the correction it is not a number.
        found = self(_ATEN.mul.Tensor, squares, count / (count - correction) if count > correction else math.nan)
        if is_root:
            found = self(_ATEN.sqrt.default, found)
        made: tuple[fx.Node, ...] = (found, mean()) if with_mean else (found,)
        if value.dtype in _HALVES:
            made = tuple(self(_ATEN._to_copy.default, each, dtype=value.dtype) for each in made)
        return made if with_mean else made[0]
