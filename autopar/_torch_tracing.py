"""What Dynamo does not read by itself, and captures let it: branches on finite values, context variables.

Private names of torch, like those of `_torch.py`; where a torch has others, programs are traced as without this file.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserDefinedObjectVariable
from torch._dynamo.variables import torch as torch_variables
from torch._dynamo.variables.base import VariableTracker

_ASSUMED = {"isfinite": True, "isnan": False, "isinf": False}
_SAME = frozenset({"any", "all", "bool"})
_NOT = frozenset({"logical_not", "bitwise_not", "invert"})
_TWO: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("logical_or", "bitwise_or", "or_"), operator.or_),
    **dict.fromkeys(("logical_and", "bitwise_and", "and_"), operator.and_),
    **{name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
}


@contextmanager
def branches_on_finite_values(mark: Callable[[Any, str, int], Any]) -> Iterator[None]:
    """Let Dynamo take the branch of finite values where a condition asks for nothing but whether values are finite.

    `if not torch.isfinite(x).all()`, `if x.isnan().any() or x.isinf().any()`: what healthy training never enters.
    `mark(tracer, file, line)` is called for each tensor asked about, as a proxy, before the branch is taken.
    """
    kinds = [symbolic_convert.InstructionTranslatorBase]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    with ExitStack() as stack:
        for kind in kinds:
            table = getattr(kind, "dispatch_table", None)
            if isinstance(table, list):
                asked = [_asking(read, mark) if _is_branch(code) else read for code, read in enumerate(table)]
                stack.enter_context(patch.object(kind, "dispatch_table", asked))
        yield


def _is_branch(code: int) -> bool:
    name = dis.opname[code]
    return ("JUMP" in name and "IF" in name) or name in {"TO_BOOL", "UNARY_NOT"}


def _asking(read: Any, mark: Callable[[Any, str, int], Any]) -> Any:
    """Return the reader of an instruction that first decides a condition on top of the stack that is assumed."""

    def decided(self: Any, instruction: Any) -> Any:
        condition = self.stack[-1] if self.stack else None
        if isinstance(condition, TensorVariable):
            node = condition.as_proxy().node
            answer = _assumed(node)
            if answer is not None:
                for each in _asked_about(node):
                    mark(fx.Proxy(each, self.output.current_tracer), self.f_code.co_filename, self.lineno)
                self.stack[-1] = ConstantVariable.create(bool(answer))
        return read(self, instruction)

    return None if read is None else decided


def _assumed(node: object) -> Any:
    """Return what a value is where all values are finite; `None` where that does not follow."""
    if not isinstance(node, fx.Node):
        return node if isinstance(node, int | float) else None
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if called in _ASSUMED and node.op in {"call_function", "call_method"}:
        return _ASSUMED[called]
    given = _assumed(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if given is None:
        return None
    if called in _SAME:
        return given
    if called in _NOT and isinstance(given, bool):
        return not given
    if called in {"sum", "count_nonzero"}:
        return 0 if not given else None
    other = _assumed(node.args[1]) if called in _TWO and len(node.args) > 1 else None
    return None if other is None else _TWO[called](given, other)


def _asked_about(node: fx.Node) -> list[fx.Node]:
    """Return the tensors whose values a condition asks about."""
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if called in _ASSUMED:
        return [node.all_input_nodes[0]]
    return [found for each in node.all_input_nodes for found in _asked_about(each)]


@contextmanager
def context_variables() -> Iterator[None]:
    """Let Dynamo read context variables: as they are now, and as the traced function sets them until it resets them."""
    held: dict[int, list[Any]] = {}
    own = UserDefinedObjectVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        variable = getattr(self, "value", None)
        if type(variable) is not ContextVar or kwargs or name not in {"get", "set", "reset"}:
            return own(self, tx, name, args, kwargs)
        values = held.setdefault(id(variable), [])
        if name == "set":
            values.append(args[0])
        elif name == "reset" and values:
            values.pop()
        elif name == "get":
            if values:
                return values[-1]
            try:
                found = variable.get()
            except LookupError:
                return args[0] if args else own(self, tx, name, args, kwargs)
            if found is None or isinstance(found, bool | int | float | str):
                return VariableTracker.build(tx, found)
            return own(self, tx, name, args, kwargs)
        return ConstantVariable.create(None)

    with patch.object(UserDefinedObjectVariable, "call_method", call_method):
        yield


@contextmanager
def as_if_not_compiled() -> Iterator[None]:
    """Let what Dynamo reads be told that it is not compiled (`torch.compiler.is_compiling()`), as on one device."""
    find = getattr(torch_variables, "tracing_state_functions", None)
    asked: dict[Any, bool] = {} if find is None else find()
    told = {each: False for each in asked if each in {torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling}}
    with patch.dict(asked, told):
        yield
