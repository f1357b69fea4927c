"""Python attributes that forward changes: whether the program is another one at every call, and what users miss.

Dynamo reads the Python once, so that a captured program keeps what attributes were then. What a forward keeps for
itself and finds again (a table for a length, a type) is the same at every call; a counter in its arithmetic is not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import FakeTensorMode, pytree, storage_key
from autopar.capture.call import CallSpec
from autopar.capture.errors import attribute_advances, attributes_stay, set_by_first_call
from autopar.capture.fake import FakeModel
from autopar.capture.flex import flex_attention_in_plain_operators
from autopar.capture.origin import user_line
from autopar.capture.trace import quiet, trace_python
from autopar.errors import CaptureError
from autopar.warning import warn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def check_attributes(
    model: nn.Module,
    call: CallSpec,
    examples: Sequence[torch.Tensor],
    *,
    training: bool,
    with_backward: bool,
    writes: bool,
) -> None:
    """Hold a model whose forward changes Python objects against its own second and third call, on fake tensors.

    Warns of attributes that go on changing and are only read elsewhere: the compiled model's do not. Of what is set by
    the first call alone only parameters and buffers are looked at, if the program `writes` any: a table that is kept is
    the same at every call.

    Raises:
        CaptureError: the program depends on an attribute that changes from call to call, or gives parameters or buffers
            values that only its first call gives them.
    """
    forward = _FakeForward(model, call, examples, training=training, with_backward=with_backward)
    name = type(model).__name__
    fresh = _writes(forward.read()[0]) if writes else Counter()
    try:
        first = forward.run()
        if fresh and (lines := fresh - _writes(forward.read()[0])):
            raise set_by_first_call(name, sorted(lines))
        second = forward.run()
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001 - the model's own Python, anything
        return  # it leaves the fake world where Dynamo does not: nothing can be told
    changed = sorted(path for path, value in second.items() if path not in first or not _same(first[path], value))
    if not changed:
        return
    before, tensors = forward.read()
    advancing = [path for path in changed if path in tensors]
    if not advancing:
        forward.run()
        after, _ = forward.read()
        if str(before.graph) != str(after.graph):
            advancing = [path for path in changed if not _holds_tensor(second[path])] or changed
    if advancing:
        raise attribute_advances(name, advancing)
    warn(attributes_stay(name, changed))


class _FakeForward:
    """A model's forward on fake tensors, called again and again; Python's random numbers are equal at every call."""

    def __init__(
        self, model: nn.Module, call: CallSpec, examples: Sequence[torch.Tensor], *, training: bool, with_backward: bool
    ) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake = FakeModel(model, self._mode)
        if self._fake.module.training != training:
            self._fake.module.train(training)
        self._inputs = [self._fake.fake(each) for each in examples]
        self._call = call
        self._with_backward = with_backward
        self._state = random.getstate()

    def run(self) -> dict[str, Any]:
        """Call the module; return the attributes that it then has."""
        call, leaves = self._call, iter(self._inputs)
        given = [value if at is None else next(leaves) for at, value in zip(call.inputs, call.baked, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, call.structure)
        with (
            self._same_numbers(),
            torch.compiler.set_stance("force_eager"),  # compiled kernels need tensors with memory
            flex_attention_in_plain_operators(),
            self._mode,
            torch.set_grad_enabled(self._with_backward),
            quiet(),
        ):
            self._fake.module(*args, **kwargs)
        return dict(_attributes(self._fake.module))

    def read(self) -> tuple[fx.GraphModule, frozenset[str]]:
        """Return what Dynamo makes of the next call."""
        with self._same_numbers(), torch.set_grad_enabled(self._with_backward):
            return trace_python(self._fake, self._call, self._inputs)

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        random.setstate(self._state)
        try:
            yield
        finally:
            random.setstate(self._state)


def _writes(graph: fx.GraphModule) -> Counter[str]:
    """Return the lines that write into parameters or buffers, or views of them, each as often as it does."""
    calls = (each for each in graph.graph.nodes if each.op in {"call_function", "call_method"})
    into = (each for each in calls if _is_in_place(each) and _root(each.args[0]).op in {"get_attr", "placeholder"})
    return Counter(user_line(each.meta.get("stack_trace") or "") for each in into)


def _is_in_place(node: fx.Node) -> bool:
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    into = bool(node.args) and isinstance(node.args[0], fx.Node)
    return into and (called == "setitem" or (called.endswith("_") and not called.endswith("__")))


def _root(node: fx.Node) -> fx.Node:
    """Return what the first argument of a call is a part of, at last: the call itself if it makes memory of its own."""
    while node.op in {"call_function", "call_method"} and node.args and isinstance(node.args[0], fx.Node):
        if _memory(node) != _memory(node.args[0]):
            return node
        node = node.args[0]
    return node


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val", node.meta.get("example_value"))
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain values and tensors that modules hold in attributes of their own, by path, each as a tuple."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH and _told(value):
                yield f"{path}.{name}" if path else name, tuple(pytree.tree_leaves(value))


_OF_TORCH = frozenset(vars(nn.Module()))


def _told(value: Any) -> bool:
    """Return whether a value is one whose change can be seen: plain, a tensor, or a container of such."""
    return all(isinstance(each, (*_PLAIN, torch.Tensor)) for each in pytree.tree_leaves(value))


def _holds_tensor(leaves: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.Tensor) for each in leaves)


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether a container holds what it held: the same tensors, equal values."""
    if len(before) != len(after):
        return False
    return all(
        one is other or (not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other)
        for one, other in zip(before, after, strict=True)
    )
