"""Collectives in two levels as operators: `autopar_levels::OPERATION(Tensor[] values, ..., inner, outer, stream)`.

Each stands for a whole chain of flat collectives (see `cost_models.two_level`) that is issued as one and waited for as
one, by the same `wait_tensor` as a flat collective. `inner` and `outer` name the process groups of the ranks that share
the fast links and of those that meet across them; `stream` that of the whole axis, whose collectives it is one of.
`values` travel together, each gives one result; `all_reduce_` gives its results in the memory of its arguments.
`exchange` is that of `expert_ops`, whose blocks are of unequal size.

Here is what they are; `autopar.runtime.two_level` says what they do.
"""

from __future__ import annotations

from typing import Any

import torch

_GROUPS = "str inner, str outer, str stream"

_LIBRARY: Any = torch.library.Library("autopar_levels", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"all_reduce(Tensor[] values, str reduce, int chunks, {_GROUPS}) -> Tensor[]")
_LIBRARY.define(f"all_reduce_(Tensor(a!)[] values, str reduce, int chunks, {_GROUPS}) -> Tensor(a!)[]")
_LIBRARY.define(f"all_gather(Tensor[] values, int ranks, {_GROUPS}) -> Tensor[]")
_LIBRARY.define(f"reduce_scatter(Tensor[] values, str reduce, int ranks, {_GROUPS}) -> Tensor[]")
_LIBRARY.define(f"all_to_all(Tensor[] values, {_GROUPS}) -> Tensor[]")
_LIBRARY.define(f"exchange(Tensor[] values, Tensor known, int rank, bool back, {_GROUPS}) -> Tensor[]")


def _as_large(values: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each in values]


def _all_gather(values: list[torch.Tensor], ranks: int, *_: Any) -> list[torch.Tensor]:
    return [each.new_empty((each.shape[0] * ranks, *each.shape[1:])) for each in values]


def _reduce_scatter(values: list[torch.Tensor], reduce: str, ranks: int, *_: Any) -> list[torch.Tensor]:
    return [each.new_empty((each.shape[0] // ranks, *each.shape[1:])) for each in values]


for _name, _shape in {
    "all_reduce": _as_large,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _as_large,
    "exchange": _as_large,
}.items():
    torch.library.register_fake(f"autopar_levels::{_name}", _shape, lib=_LIBRARY)

LEVELS = torch.ops.autopar_levels
