"""Random operators that draw from a seed of their own: `autopar::OPERATOR(int salt, ...)`.

Each draws from a generator seeded with the seed of the step mixed with `salt`,
which names the operator and the part of its result that a rank makes. So equal
parts are equal on all ranks whatever each rank drew before, a part computed
again in the backward pass is the same again, and nothing depends on order.

What all micro-batches of a step share is drawn from the seed of the step (`OF_STEP`), all else from the micro-batch's.

Who runs a program says the seed of the step around it:

    with step_seed(next_seed()):
        run(...)

`next_seed` takes it from torch's default CPU generator, so that
`torch.manual_seed` decides it; ranks must agree about that generator's state
(equal seeds everywhere, or rank 0's number broadcast).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

_SEED: ContextVar[tuple[int, int, int] | None] = ContextVar("autopar_step_seed", default=None)
_MASK = (1 << 64) - 1

OF_SECOND = 1 << 39
"""Added to the salt of what a program of two micro-batches draws for the second one: salts are smaller."""

OF_STEP = 1 << 40
"""Added to the salt of what is drawn once for all micro-batches of a step."""


def next_seed() -> int:
    """Return a seed for one step from torch's default CPU generator, which it advances by one number."""
    return int(torch.randint(1 << 62, (), dtype=torch.int64))


@contextmanager
def step_seed(seed: int, of_step: int | None = None, of_second: int | None = None) -> Iterator[None]:
    """Let the operators of one step draw from `seed`; the backward pass of the step must run with the same.

    Of a step in micro-batches, `seed` is that of one of them, `of_second` that of another one that the same program
    runs, and `of_step` that of what all of them share.
    """
    token = _SEED.set((seed, seed if of_step is None else of_step, seed if of_second is None else of_second))
    try:
        yield
    finally:
        _SEED.reset(token)


def mixed(seed: int, salt: int) -> int:
    """Return the seed of one operator's draw: any two salts give unrelated ones (splitmix64)."""
    z = (seed + (salt + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


@lru_cache(maxsize=256)
def seeded(target: str) -> Any:
    """Return the operator that draws as `target` (`aten.rand.default`) does, with a salt before its arguments.

    Raises:
        ValueError: torch has no such operator, or it changes its arguments.
    """
    space, packet, overload = target.split(".")
    original: Any = getattr(getattr(getattr(torch.ops, space, None), packet, None), overload, None)
    if original is None or original._schema.is_mutable:
        raise ValueError(
            f"{target} cannot be drawn from a seed: it is no operator of torch that leaves its inputs alone"
        )
    name = f"{packet}_{overload}"
    schema = re.sub(r"^[^(]*\(\s*", "", str(original._schema))
    library: Any = _LIBRARY
    library.define(f"{name}(int salt, {schema}" if not schema.startswith(")") else f"{name}(int salt{schema}")

    def draw(salt: int, *args: Any, **kwargs: Any) -> Any:
        return _drawn(original, salt, args, kwargs)

    def describe(salt: int, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    library.impl(name, draw, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", describe, lib=_LIBRARY)
    made = getattr(torch.ops.autopar, name).default
    _SEEDED.add(made)
    return made


def draws(target: Any) -> bool:
    """Return whether an operator makes random numbers, from a seed of its own or from torch's generator."""
    return target in _SEEDED or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


_SEEDED: set[Any] = set()
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def _drawn(original: Any, salt: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the operator draws; the generator of its device is as it was afterwards."""
    seeds = _SEED.get()
    if seeds is None:
        raise RuntimeError(f"{original} was run outside of `step_seed`: the runtime says the seed of each step")
    seed = seeds[1] if salt >= OF_STEP else seeds[2] if salt >= OF_SECOND else seeds[0]
    salt -= OF_SECOND if OF_SECOND <= salt < OF_STEP else 0
    device = next((each.device for each in args if isinstance(each, torch.Tensor)), kwargs.get("device"))
    device = torch.device(device if device is not None else "cpu")
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        if devices:
            getattr(torch, device.type).default_generators[device.index or 0].manual_seed(mixed(seed, salt))
        else:
            torch.default_generator.manual_seed(mixed(seed, salt))
        return original(*args, **kwargs)
