"""What a run really does: the collectives of each process group in the order of their issue, and the bytes it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch import group_named
from autopar.ir.tasks import issuing
from autopar.runtime.executable import Compiled, compile_graph, with_groups

Order = dict[tuple[int, ...], list[str]]
"""By the ranks of a process group, the collectives issued on it: their operations and plan names."""


class Witness:
    """A backend for `compile` that notes each collective when it is issued."""

    def __init__(self) -> None:
        self.order: Order = {}

    def __call__(self, gm: fx.GraphModule, groups: Mapping[str, str], **how: Any) -> Compiled:
        """Return the program as a function, as `compile_graph` does."""
        issued: dict[str, tuple[str, list[tuple[int, ...]]]] = {}
        for node in gm.graph.nodes:
            if "collective" not in node.meta or "wait" in str(node.target):
                continue
            given = dict.fromkeys(each for each in with_groups(node, groups) if each in groups.values())
            on = [tuple(sorted(dist.get_process_group_ranks(group_named(str(each))))) for each in given]
            if on:
                issued[issuing(node.meta["collective"])] = (str(node.target).split(".")[1], on)
        return compile_graph(gm, groups, ranges=functools.partial(self._note, issued), **how)

    def _note(self, issued: Mapping[str, tuple[str, list[tuple[int, ...]]]], name: str) -> AbstractContextManager[None]:
        if name in issued:
            operation, on = issued[name]
            for members in on:
                self.order.setdefault(members, []).append(f"{operation} of {name.removeprefix(issuing(''))}")
        return nullcontext()


def first_difference(orders: Sequence[Order]) -> str | None:
    """Return where ranks issued other collectives, or the same in another order, on a group; `None`: nowhere.

    `orders` are those of all ranks, by rank.
    """
    for members in sorted({members for order in orders for members in order}):
        first = orders[members[0]].get(members, [])
        for rank in members[1:]:
            own = orders[rank].get(members, [])
            if own == first:
                continue
            at = next((at for at, (a, b) in enumerate(zip(first, own, strict=False)) if a != b), None)
            at = min(len(first), len(own)) if at is None else at
            ours, theirs = (each[at] if at < len(each) else "nothing" for each in (first, own))
            group = ", ".join(map(str, members))
            return (
                f"on the group of ranks {group}, collective {at + 1} is {ours!r} on rank {members[0]}, "
                f"{theirs!r} on rank {rank}"
            )
    return None


def storage_bytes(values: Sequence[Any]) -> int:
    """Return the bytes of the memory behind tensors and local parts of DTensors, each counted once."""
    local = [getattr(each, "_local_tensor", each) for each in values if isinstance(each, torch.Tensor)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Return the most bytes that torch's CPU allocator held beyond those before, and what is left at the end."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        work()
    recorded: Any = profile.profiler
    events = recorded.kineto_results.events()
    moves = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    held = peak = 0
    for _, change in moves:
        held += change
        peak = max(peak, held)
    return peak, held
