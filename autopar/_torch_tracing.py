"""What Dynamo does not read by itself, and captures let it: values that are known, and who asks if it is compiled.

Branches on whether values are finite, numbers of tensors that follow from no data, context variables; and operators
that torch writes out in others while it differentiates a graph.

Private names of torch, like those of `_torch.py`; where a torch has others, programs are traced as without this file.
"""

from __future__ import annotations

import dis
import operator
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._C import DispatchKey
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserDefinedObjectVariable, misc
from torch._dynamo.variables import torch as torch_variables
from torch._dynamo.variables.base import VariableTracker
from torch.utils._python_dispatch import _disable_current_modes

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

    def decide(translator: Any, condition: fx.Node) -> bool | None:
        answer = _assumed(condition)
        if answer is None:
            return None
        for each in _asked_about(condition):
            mark(fx.Proxy(each, translator.output.current_tracer), translator.f_code.co_filename, translator.lineno)
        return bool(answer)

    with _branches(decide):
        yield


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
    # Those of torch 2.14 read them themselves, and refuse to set them.
    kind = getattr(misc, "ContextVarVariable", UserDefinedObjectVariable)
    own = kind.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        variable = getattr(self, "cv_obj", getattr(self, "value", None))
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

    with patch.object(kind, "call_method", call_method):
        yield


Asked = tuple[tuple[str, int], ...]
"""Where it was asked whether code is compiled: files and lines of the innermost calls, innermost first."""

_FRAMES = 3
_OF_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


@contextmanager
def as_if_not_compiled(asked: list[Asked], told: Collection[Asked]) -> Iterator[None]:
    """Let users' code that Dynamo reads be told that it is not compiled (`torch.compiler.is_compiling()`).

    On one device it is not. Torch's own files are told that they are, which they have to know to be traced. Who asks
    is added to `asked`; those in `told` are told that they are compiled, like torch.
    """
    find = getattr(torch_variables.TorchInGraphFunctionVariable, "_get_handlers", None)
    handlers: dict[Any, Any] = {} if find is None else find()
    names = ("is_compiling", "is_dynamo_compiling", "is_exporting")
    asks = [getattr(torch.compiler, each, None) for each in names] + [torch._dynamo.external_utils.is_compiling]

    def answering(own: Any) -> Any:
        def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if tx.f_code.co_filename.startswith(_OF_TORCH):
                return own(self, tx, *args, **kwargs)
            where = _innermost(tx)
            asked.append(where)
            return own(self, tx, *args, **kwargs) if where in told else ConstantVariable.create(False)

        return answer

    with patch.dict(handlers, {each: answering(handlers[each]) for each in asks if each in handlers}):
        yield


def _innermost(tx: Any) -> Asked:
    frames: list[tuple[str, int]] = []
    while tx is not None and len(frames) < _FRAMES:
        frames.append((tx.f_code.co_filename, tx.lineno))
        tx = getattr(tx, "parent", None)
    return tuple(frames)


@contextmanager
def known_numbers(value_of: Callable[[fx.Node], torch.Tensor | None]) -> Iterator[None]:
    """Let Dynamo read numbers out of tensors whose value `value_of` tells: `if`, `item()`, `int()` and their like."""
    kind: Any = TensorVariable
    own = kind.call_method

    def known(variable: Any) -> torch.Tensor | None:
        return value_of(variable.as_proxy().node) if type(variable) is TensorVariable else None

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = known(self) if name in {"item", "tolist"} and not args and not kwargs else None
        if found is None or (name == "item" and found.numel() != 1):
            return own(self, tx, name, args, kwargs)
        return VariableTracker.build(tx, getattr(found, name)())

    def number(name: str, become: Callable[[Any], Any]) -> Any:
        of_torch = getattr(kind, name)

        def read(self: Any, tx: Any) -> Any:
            found = known(self)
            if found is None or found.numel() != 1:
                return of_torch(self, tx)
            return ConstantVariable.create(become(found.item()))

        return read

    become: dict[str, Callable[[Any], Any]] = {
        "bool_impl": bool,
        "nb_int_impl": int,
        "nb_index_impl": operator.index,
        "nb_float_impl": float,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(kind, "call_method", call_method))
        for name, function in become.items():
            if hasattr(kind, name):
                stack.enter_context(patch.object(kind, name, number(name, function)))
        stack.enter_context(_branches(lambda tx, condition: _decided_by(value_of, condition)))
        yield


def _decided_by(value_of: Callable[[fx.Node], torch.Tensor | None], condition: fx.Node) -> bool | None:
    found = value_of(condition)
    return bool(found) if found is not None and found.numel() == 1 else None


@contextmanager
def _branches(decide: Callable[[Any, fx.Node], bool | None]) -> Iterator[None]:
    """Let `decide(translator, condition)` say which branch Dynamo takes on a tensor; `None` leaves it to Dynamo."""
    kinds = [symbolic_convert.InstructionTranslatorBase]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    with ExitStack() as stack:
        for kind in kinds:
            table = getattr(kind, "dispatch_table", None)
            if isinstance(table, list):
                asked = [_deciding(read, decide) if _is_branch(code) else read for code, read in enumerate(table)]
                stack.enter_context(patch.object(kind, "dispatch_table", asked))
        yield


def _is_branch(code: int) -> bool:
    name = dis.opname[code]
    return ("JUMP" in name and "IF" in name) or name in {"TO_BOOL", "UNARY_NOT"}


def _deciding(read: Any, decide: Callable[[Any, fx.Node], bool | None]) -> Any:
    """Return the reader of an instruction that first decides a condition on top of the stack."""

    def decided(self: Any, instruction: Any) -> Any:
        condition = self.stack[-1] if self.stack else None
        if isinstance(condition, TensorVariable):
            answer = decide(self, condition.as_proxy().node)
            if answer is not None:
                self.stack[-1] = ConstantVariable.create(answer)
        return read(self, instruction)

    return None if read is None else decided


def seen_by_nobody() -> Any:
    """Return a context in which operators are neither traced nor noted by whatever mode is active."""
    return _disable_current_modes()


@contextmanager
def undecomposed(overload: torch._ops.OpOverload) -> Iterator[None]:
    """Let an operator be differentiated as it is, where torch would write it out in others by a Python function."""
    written_out = overload.py_kernels.pop(DispatchKey.Autograd, None)
    overload._dispatch_cache.clear()
    try:
        yield
    finally:
        if written_out is not None:
            overload.py_kernels[DispatchKey.Autograd] = written_out
        overload._dispatch_cache.clear()
