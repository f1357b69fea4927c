"""Branches on whether values are finite: the program takes that of finite ones, and says so where some are not.

    if not torch.isfinite(x).all():         x = finite(x)    # raises where a value is not, by the line
        x = torch.clamp(x, -large, large)   ...

A static graph has one branch. In training it is always the same one: the other raises, or saves a step of half
precision that has overflowed. Every rank looks at its part, and no message is sent for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

import autopar.own_operators  # noqa: F401  the operators below are its
from autopar._torch_tracing import branches_on_finite_values
from autopar.capture.origin import user_line

_OPS: Any = torch.ops.autopar_ops
_ASSERTS = frozenset({"_assert_async", "_functional_assert_async"})


@contextmanager
def taken_to_be_finite() -> Iterator[None]:
    """Let branches that ask only whether values are finite be traced as if all were; `check_finite` adds the checks."""
    with branches_on_finite_values(_mark):
        yield


def _mark(value: Any, file: str, line: int) -> None:
    add = value.tracer.create_proxy
    where = user_line(f'File "{file}", line {line}') or f"{file}:{line}"
    add("call_function", torch._assert_async, (add("call_function", _OPS.is_finite.default, (value,), {}), where), {})


def is_marked(node: fx.Node) -> bool:
    """Return whether a node is such a place, in Dynamo's graph or in the joint one."""
    called = getattr(node.target, "__name__", "").partition(".")[0]
    return called in _ASSERTS and isinstance(node.args[0], fx.Node) and node.args[0].target is _OPS.is_finite.default


def check_finite(joint: fx.GraphModule) -> None:
    """Put the check behind each value that a branch asked about; one that nothing else reads is checked by its inputs.

    Parameters are not checked: of one that is not finite the values behind it tell.
    """
    marks = [node for node in joint.graph.nodes if node.op == "call_function" and is_marked(node)]
    asked: dict[fx.Node, str] = {}
    for mark in marks:
        asked.setdefault(mark.args[0].args[0], str(mark.args[1]))
    for mark in reversed(marks):
        if not mark.users:
            joint.graph.erase_node(mark)
    for node in list(joint.graph.find_nodes(op="call_function", target=_OPS.is_finite.default)):
        if not node.users:
            joint.graph.erase_node(node)
    for value, where in asked.items():
        for each in _read_elsewhere(value):
            _checked(joint, each, where)


def _read_elsewhere(value: fx.Node) -> list[fx.Node]:
    """Return the value, or if nothing reads it, the computed values that it is made of."""
    made = value.meta.get("val")
    if value.op != "call_function" or not isinstance(made, torch.Tensor) or not made.is_floating_point():
        return []
    if value.users:
        return [value]
    return list(dict.fromkeys(found for each in value.all_input_nodes for found in _read_elsewhere(each)))


def _checked(joint: fx.GraphModule, value: fx.Node, where: str) -> None:
    with joint.graph.inserting_after(value):
        checked = joint.graph.call_function(_OPS.finite.default, (value, where))
    checked.meta = {**value.meta}
    value.replace_all_uses_with(checked, delete_user_cb=lambda user: user is not checked)
