"""Writes into a view of a DTensor, or at places of it, of which ranks hold other parts: as on one device.

Torch gathers what a view cuts across, so that `weight[3] = value`, `weight.grad[:4].zero_()` or `index_add_` write
into a copy that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from autopar._torch import dtensor_of, local_of, put_before_operators_of_dtensor, pytree
from autopar.runtime.whole import count_meshes, is_counted, whole

_VIEWS = (
    "slice.Tensor", "select.int", "split.Tensor", "split_with_sizes.default", "unbind.int", "diagonal.default",
    "view.default",
)  # fmt: skip
"""Views that torch makes of a gathered copy where they cut across parts; others keep parts, or compose of these."""

_BY_PLACE = (
    "index_put_.default", "index_copy_.default", "index_add_.default", "index_fill_.int_Scalar",
    "index_fill_.int_Tensor", "scatter_.src", "scatter_.value", "scatter_add_.default", "scatter_reduce_.two",
)  # fmt: skip
"""Writes at places of their first argument, numbered in the whole."""

_Again = Callable[[torch.Tensor], torch.Tensor]


def write_through(meshes: Iterable[Any]) -> None:
    """Let what is written into views of DTensors on these meshes, and at places of them, arrive, from now on.

    The whole tensor is gathered, written on every rank and parted again: all ranks of the mesh must write.
    """
    count_meshes(meshes)
    put_before_operators_of_dtensor(_VIEWS, _viewed)
    put_before_operators_of_dtensor(_BY_PLACE, _written_by_place)
    put_before_operators_of_dtensor(("fill_.Tensor",), _filled)


def _is_parted(tensor: Any) -> bool:
    """Return whether ranks of a compiled model's mesh hold other parts of a tensor."""
    if not is_counted(tensor) or any(each.is_partial() for each in tensor.placements):
        return False
    return not all(each.is_replicate() for each in tensor.placements)


def _viewed(own: Callable[[], Any], operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    made = own()
    source = args[0]
    if not _is_parted(source):
        return made
    for place, each in enumerate(made if isinstance(made, list | tuple) else [made]):
        pairs = zip(source.placements, each.placements, strict=True)
        if any(after.is_replicate() and not before.is_replicate() for before, after in pairs):
            _remember(each, source, _again(operator, args, kwargs, place if made is not each else None))
    return made


def _again(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int | None) -> _Again:
    """Return what makes the same view of another tensor; of several that the operator makes, that at `place`."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        made: Any = operator(tensor, *args[1:], **kwargs)
        found: torch.Tensor = made if place is None else made[place]
        return found

    return view


def _remember(view: Any, source: Any, again: _Again) -> None:
    """Let what is written into a copied view be written into its source, too."""
    view.__class__ = _copied_view()
    view._written_to = source, again


def _written_by_place(own: Callable[[], Any], operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not _is_parted(args[0]):
        return own()
    with torch.no_grad():
        value, others, named = pytree.tree_map_only(torch.Tensor, whole, (args[0], args[1:], dict(kwargs)))
        operator(value, *others, **named)
        args[0].copy_(value)
    return args[0]


def _filled(own: Callable[[], Any], operator: Any, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Any:
    """Fill a DTensor with one number (`weight[3] = 0.5`), which torch has no rule for."""
    tensor, number = args
    if not is_counted(tensor) or any(each.is_partial() for each in tensor.placements):
        return own()
    operator(local_of(tensor), whole(number))
    return tensor


@cache
def _copied_view() -> Any:
    from torch.distributed.tensor import DTensor

    class CopiedView(DTensor):
        """A copy of a DTensor's part where one device has a view of it."""

        _written_to: tuple[Any, _Again]

        @classmethod
        def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            """Run an operator, and write what it changed into the sources."""
            given = (args, kwargs or {})
            plain, named = pytree.tree_map_only(cls, lambda each: dtensor_of(each._local_tensor, each._spec), given)
            made = func(*plain, **named)
            first = pytree.tree_leaves(args[:1])
            if func._schema.is_mutable:
                for each in first:
                    if isinstance(each, cls):
                        _write_back(each)
                return args[0] if made is not None else None
            if isinstance(args[0], cls) and any(each.alias_info is not None for each in func._schema.returns):
                for place, each in enumerate(made if isinstance(made, list | tuple) else [made]):
                    _remember(each, args[0], _again(func, args, named, place if made is not each else None))
            return made

    return CopiedView


@torch.no_grad()
def _write_back(view: Any) -> None:
    source, again = view._written_to
    value = whole(source)
    again(value).copy_(whole(view))
    source.copy_(value)
