"""Captured programs as bytes, for other processes of the same run: reading one takes a tenth of capturing it.

What they are in memory is written as it is: nodes by their place, operators by their names, fake tensors by their
shape and the memory that they share. What cannot be written so is captured by each process for itself.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.capture import Captured

UNWRITABLE = (AttributeError, TypeError, pickle.PicklingError, RuntimeError, NotImplementedError)
"""What pickling raises of things it cannot write: classes in functions, tensors without values of their own."""

_META = ("val", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "partitioner_tag", "desc")
"""What later stages read of a captured node; tracing leaves more, of which much cannot be written."""


def written(captured: Captured) -> bytes | None:
    """Return a program as bytes; none if it holds tensors or modules itself, or something that cannot be written."""
    nodes = list(captured.joint.graph.nodes)
    if captured.constants or type(captured.joint.graph._codegen) is not fx.graph.CodeGen:
        return None
    if any(node.op == "get_attr" for node in nodes):
        return None
    rest = {each.name: getattr(captured, each.name) for each in fields(Captured) if each.name != "joint"}
    rows = [
        (
            node.op, node.target, node.args, node.kwargs, node.name, node.type,
            {key: node.meta[key] for key in _META if key in node.meta},
        )
        for node in nodes
    ]  # fmt: skip
    to = io.BytesIO()
    try:
        _Writer(to, nodes).dump((captured.joint.code, rows, rest))
    except UNWRITABLE:
        return None
    return to.getvalue()


def read(data: bytes) -> Captured | None:
    """Return the program that was written; none if it is not the same here."""
    reader = _Reader(io.BytesIO(data))
    with reader.mode, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of reading the forms of nested arguments
        code, rows, rest = reader.load()
    graph = fx.Graph()
    places = []
    for op, target, args, kwargs, name, kind, meta in rows:
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda each: _node(each, places))
        made = graph.create_node(op, target, args, kwargs, name, kind)
        made.meta = meta
        places.append(made)
    joint = fx.GraphModule(nn.Module(), graph)
    return Captured(joint=joint, **rest) if joint.code == code else None


class _Place(int):
    """A node's place in the graph, where an argument reads it."""


def _node(value: Any, places: list[fx.Node]) -> Any:
    return places[value] if type(value) is _Place else value


class _Writer(pickle.Pickler):
    """Writes nodes as their places, and names of operators and forms of fake tensors for what they are."""

    def __init__(self, to: io.BytesIO, nodes: list[fx.Node]) -> None:
        super().__init__(to)
        self._places = {node: place for place, node in enumerate(nodes)}
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def persistent_id(self, found: Any) -> Any:
        """Return what to write in place of a value; none if it can be written itself."""
        if isinstance(found, fx.Node):
            return "node", self._places[found]
        if isinstance(found, torch._ops.OpOverload):
            return "operator", found.namespace, found._schema.name.split("::")[1], found._overloadname
        if isinstance(found, FakeTensor):
            number = self._tensors.setdefault(id(found), len(self._tensors))
            storage = found.untyped_storage()
            shared = self._storages.setdefault(storage._cdata, len(self._storages))
            form = found.dtype, tuple(found.shape), found.stride(), found.storage_offset(), found.requires_grad
            return "fake", number, shared, storage.nbytes(), isinstance(found, nn.Parameter), *form
        if isinstance(found, torch.Tensor | torch.SymInt | torch._ops.HigherOrderOperator | nn.Module):
            raise pickle.PicklingError(f"a {type(found).__name__}")
        return None


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` wrote; fake tensors are of one new mode."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, told: Any) -> Any:
        """Return what was written in a value's place."""
        kind, *rest = told
        if kind == "node":
            return _Place(rest[0])
        if kind == "operator":
            namespace, name, overload = rest
            return getattr(getattr(getattr(torch.ops, namespace), name), overload)
        number, shared, size, parameter, dtype, shape, stride, offset, graded = rest
        if number not in self._tensors:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            if shared in self._storages or made.untyped_storage().nbytes() != size or offset:
                if shared not in self._storages:
                    whole = torch.empty(size, dtype=torch.uint8, device="cpu")
                    self._storages[shared] = whole.untyped_storage()
                made = torch.empty(0, dtype=dtype, device="cpu")
                made.set_(self._storages[shared], offset, shape, stride)
            else:
                self._storages[shared] = made.untyped_storage()
            made.requires_grad_(graded)
            self._tensors[number] = nn.Parameter(made, requires_grad=graded) if parameter else made
        return self._tensors[number]
