"""What a stage's programs hold between their runs, read from the programs themselves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.rewrite.staged import Item, StageProgram, Transfer


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one stage on one rank."""

    activations: int
    """Of one micro-batch, between its forward and its (input) gradient: values kept and received."""

    kept: int
    """Of one micro-batch, between its input gradient and its weight gradient; 0 where that is one program."""

    gradients: int
    """The sums over micro-batches, as they are before their reduction."""

    whole: int = 0
    """Parameters that are gathered once a step."""


def held(program: StageProgram, transfers: Iterable[Transfer]) -> Held:
    """Return what a stage holds; memory that several values share counts once, that of parameters and inputs not."""
    sizes = {
        each.value: math.prod(each.shape) * getattr(torch, each.dtype).itemsize
        for each in transfers
        if each.target == program.stage
    }
    memory: dict[str, tuple[str, int]] = {name: (name, size) for name, size in sizes.items()}
    memory |= _made(program.forward, program.takes, program.gives, sizes)
    if program.backward is not None:
        memory |= _made(program.backward, program.backward_takes, program.backward_gives, sizes)
    later = _values(program.weights_takes)
    return Held(
        activations=_sum(memory, _values(program.backward_takes) | later - _values(program.backward_gives)),
        kept=_sum(memory, later),
        gradients=sum(_nbytes(node) for node in _placeholders(program.finish)),
        whole=0 if program.begin is None else sum(_nbytes(node) for node in _results(program.begin)),
    )


def _values(items: Iterable[Item]) -> set[str]:
    return {item.name for item in items if item.kind == "value"}


def _made(
    gm: fx.GraphModule, takes: Sequence[Item], gives: Sequence[Item], sizes: Mapping[str, int]
) -> dict[str, tuple[str, int]]:
    """Return, for each value that a program gives, which memory it is in, and its bytes."""
    (output,) = gm.graph.find_nodes(op="output")
    known: dict[int, tuple[str, int]] = {}
    for item, node in zip(takes, _placeholders(gm), strict=True):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            known[storage_key(value)] = (item.name, sizes.get(item.name, 0))
    found = {}
    for item, node in zip(gives, output.args[0], strict=True):
        if item.kind == "value":
            storage = node.meta["val"].untyped_storage()
            key = storage_key(node.meta["val"])
            found[item.name] = known.setdefault(key, (item.name, int(storage.nbytes())))
    return found


def _sum(memory: Mapping[str, tuple[str, int]], read: Collection[str]) -> int:
    return sum(dict(memory[name] for name in read if name in memory).values())


def _results(gm: fx.GraphModule) -> list[fx.Node]:
    (output,) = gm.graph.find_nodes(op="output")
    return list(output.args[0])


def _placeholders(gm: fx.GraphModule | None) -> list[fx.Node]:
    return [] if gm is None else list(gm.graph.find_nodes(op="placeholder"))


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
