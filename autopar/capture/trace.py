"""The model's forward and backward as one ATen graph: Dynamo reads the Python, AOTAutograd differentiates it."""

from __future__ import annotations

import builtins
import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import (
    aot_export_joint_with_descriptors,
    assign_attribute,
    delete_attribute,
    dynamo_capture,
    dynamo_settings,
    pytree,
    recorded_side_effects,
    storage_key,
    without_guards,
    without_progress_thread,
    without_source_text,
)
from autopar._torch_tracing import context_variables, known_numbers
from autopar.capture.bags import open_bags
from autopar.capture.call import CallSpec, ResultSpec, close_records, open_records
from autopar.capture.constants import value_of
from autopar.capture.dtypes import require_dtypes
from autopar.capture.errors import trained_elsewhere, value_dependent
from autopar.capture.fake import FakeModel, named_tensors
from autopar.capture.finite import check_finite, is_marked, taken_to_be_finite
from autopar.capture.flex import flex_attention_in_plain_operators
from autopar.capture.fused_attention import fused_attention
from autopar.capture.library import without_value_checks
from autopar.capture.masked import choose_by_masks, compute_everywhere, counting_write, masks_for_places
from autopar.capture.origin import user_line
from autopar.capture.recurrent import layer_by_layer
from autopar.capture.scans import scans_as_operators
from autopar.capture.strides import look_up_windows

PREFIX = "model"
"""Name of the user's model inside the traced module."""

_GLOBAL = "G["
"""How Dynamo names what it finds in globals: the recorders of transformers, say."""

_CHECKS = frozenset(
    {
        "_assert_scalar",
        "_assert_async",
        "_assert_tensor_metadata",
        "_check",
        "_functional_assert_async",
        "_linalg_check_errors",
    }
)


class _Program(nn.Module):
    """The user's model as a function of the tensor inputs alone: plain values are part of the program.

    A buffer that forward puts another tensor in place of is overwritten with that: Dynamo would forget it, and to
    whoever holds the buffer both are the same.
    """

    def __init__(self, model: nn.Module, call: CallSpec) -> None:
        super().__init__()
        self.model = model
        self._overwritable = [name.split(".") for name, _ in model.named_buffers()]
        self._is_tensor = tuple(each is not None for each in call.inputs)
        self._baked = call.baked
        self._structure = call.structure

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = []
        taken = 0
        for is_tensor, value in zip(self._is_tensor, self._baked, strict=True):
            leaves.append(tensors[taken] if is_tensor else value)
            taken += is_tensor
        args, kwargs = close_records(pytree.tree_unflatten(leaves, self._structure))
        before = [_at(self.model, path) for path in self._overwritable]
        made = self.model(*args, **kwargs)
        for path, held in zip(self._overwritable, before, strict=True):
            assigned = _at(self.model, path)
            if assigned is not held:
                if assigned.shape != held.shape:
                    raise ValueError(f"buffer {path[-1]!r} of shape {list(held.shape)} becomes {list(assigned.shape)}")
                held.copy_(assigned)
        return open_records(made)


def _at(model: nn.Module, path: Sequence[str]) -> Any:
    """Return what is at a path of attributes, reached as forward reaches it, so that Dynamo names modules alike."""
    found: Any = model
    for name in path:
        found = getattr(found, name)
    return found


@dataclass(frozen=True, slots=True)
class Loose:
    """A tensor that is neither parameter nor buffer: the attribute that holds it, and its value."""

    name: str
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Traced:
    """The joint graph as AOTAutograd made it, what the model returns, and tensors that are no state of the model."""

    joint: fx.GraphModule
    result: ResultSpec
    loose: dict[str, Loose]
    """Plain tensor attributes by the name AOTAutograd knows them under."""

    guarded: tuple[str, ...]
    """Names of what Dynamo read while it traced."""

    changes_python: bool
    """Whether forward changes Python objects that outlive it, other than globals: the graph does not."""


def trace(fake: FakeModel, call: CallSpec, inputs: Sequence[torch.Tensor], *, with_backward: bool, name: str) -> Traced:
    """Return the joint graph of the fake model on fake inputs (the forward graph alone without `with_backward`)."""
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(without_progress_thread())
        stack.enter_context(without_source_text())
        stack.enter_context(_ambient(with_backward))
        stack.enter_context(without_value_checks())
        stack.enter_context(scans_as_operators(fake.module))
        program = _Program(fake.module, call)
        with without_guards() as guarded, recorded_side_effects() as changed:
            graph = dynamo_capture(program)(*inputs)
        masks_for_places(graph)
        compute_everywhere(graph)
        _require_static(graph, name)
        open_bags(graph)
        look_up_windows(graph)
        choose_by_masks(graph)
        counting = counting_write(graph) if with_backward else None
        if counting is not None:
            raise value_dependent(name, "indexing by a mask", user_line(counting.meta.get("stack_trace", "")))
        loose = _restore_names(graph, program, fake)
        result = _plain_outputs(graph)
        stack.enter_context(fused_attention(graph))
        stack.enter_context(layer_by_layer(graph))
        joint = aot_export_joint_with_descriptors(stack, graph, tuple(inputs)).graph_module
        require_dtypes(joint, name)
        check_finite(joint)
        _drop_checks(joint)
        _make_numbers(joint)
    outlives = not all(each.startswith(_GLOBAL) for each in changed)
    return Traced(joint, result, loose, tuple(guarded), changes_python=outlives)


def trace_python(
    fake: FakeModel, call: CallSpec, inputs: Sequence[torch.Tensor]
) -> tuple[fx.GraphModule, frozenset[str]]:
    """Return the graph of forward as Dynamo reads it now, and the plain tensor attributes that it reads."""
    ambient = _ambient(torch.is_grad_enabled())
    scans = scans_as_operators(fake.module)
    with quiet(), without_progress_thread(), ambient, without_value_checks(), without_guards(), scans:
        graph = dynamo_capture(_Program(fake.module, call))(*inputs)
    read = (fake.attribute(each) for _, each in named_tensors(graph) if id(each) not in fake.names)
    return graph, frozenset(each for each in read if each is not None)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and log lines of torch and transformers, which speak of their own insides.

    Handlers go as well: where its trace has one, torch renders what it would write there.
    """
    names = [each for each in logging.root.manager.loggerDict if each.partition(".")[0] in {"torch", "transformers"}]
    loggers = [logging.getLogger(each) for each in {"torch", "transformers", *names}]
    before = [(each.disabled, each.handlers) for each in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in loggers:
            each.disabled, each.handlers = True, []
        try:
            yield
        finally:
            for each, (disabled, handlers) in zip(loggers, before, strict=True):
                each.disabled, each.handlers = disabled, handlers


@contextmanager
def _ambient(with_backward: bool) -> Iterator[None]:
    """Set the modes of the surrounding program: gradients as asked, and an autocast for CUDA stands for the CPU's."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(with_backward))
        # Recurrent layers of oneDNN are one operator that no rule splits, and one whose backward lacks what it saves.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda")))
        # What these calls print is for people; the program's values do not depend on it.
        said = {builtins.print, warnings.warn, logging.Logger.info, logging.Logger.warning, logging.Logger.debug}
        # A derivative that forward takes itself (forces, penalties of gradients) is operators like any other.
        stack.enter_context(dynamo_settings(ignore_logging_functions=said, allow_rnn=True, trace_autograd_ops=True))
        stack.enter_context(flex_attention_in_plain_operators())
        stack.enter_context(taken_to_be_finite())
        stack.enter_context(context_variables())
        stack.enter_context(known_numbers(value_of))
        yield


def _drop_checks(joint: fx.GraphModule) -> None:
    """Drop run-time checks of values that operators bring along (`one_hot`), and what only they read."""
    idle = [node for node in joint.graph.nodes if _called(node) in _CHECKS]
    while idle:
        node = idle.pop()
        if not node.users and node.op == "call_function":
            read = node.all_input_nodes
            joint.graph.erase_node(node)
            idle += read


def _make_numbers(joint: fx.GraphModule) -> None:
    """Let a number that is cast (by `vmap`, for a number beside a tensor) be made as what it becomes."""
    aten = torch.ops.aten
    for node in joint.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if not isinstance(node.args[0], fx.Node):
            made = node.meta["val"]
            node.target, node.kwargs = aten.scalar_tensor.default, {"dtype": made.dtype, "device": made.device}


def _called(node: fx.Node) -> str:
    """Return the name of what a node calls, without its overload; empty for nodes of other kinds."""
    return getattr(node.target, "__name__", "").partition(".")[0] if node.op == "call_function" else ""


def _require_static(graph: fx.GraphModule, name: str) -> None:
    """Drop run-time checks and numbers that only they read, then refuse shapes and values that depend on data."""
    for node in reversed(list(graph.graph.nodes)):
        called = _called(node)
        idle = not node.users and node.op != "output" and not is_marked(node)
        if idle and (called in _CHECKS or _is_symbolic(node)):
            graph.graph.erase_node(node)
        elif called == "_enter_autocast":
            # The capture runs on fake CPU tensors, whatever device the model names.
            node.args = ("cpu", *node.args[1:])
    graph.recompile()
    for node in graph.graph.nodes:
        if _is_symbolic(node):
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            raise value_dependent(name, f"{target}()", user_line(node.meta.get("stack_trace", "")))


def _is_symbolic(node: fx.Node) -> bool:
    """Return whether the node makes a shape or number that is not known before it runs."""
    return any(map(_has_symbol, pytree.tree_leaves(node.meta.get("example_value", node.meta.get("val")))))


def _has_symbol(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _restore_names(graph: fx.GraphModule, program: nn.Module, fake: FakeModel) -> dict[str, Loose]:
    """Give parameters and buffers their own names, add those that forward does not use; return the other tensors.

    A tied tensor gets the first of its names; all of them are in `FakeModel.names`.

    Raises:
        CaptureError: a tensor requires a gradient and is none of the model's parameters.
    """
    renamed: dict[str, str] = {}
    loose: dict[str, Loose] = {}
    present: set[int] = set()
    for name, tensor in list(named_tensors(graph)):
        known = fake.names.get(id(tensor))
        if known is None:
            original = fake.original(tensor)
            found = Loose(fake.attribute(tensor) or name, tensor if original is None else original)
            if found.value.requires_grad:
                raise trained_elsewhere(type(fake.module).__name__, found.name, tuple(found.value.shape))
            loose[name] = found
        else:
            renamed[name] = f"{PREFIX}.{known[0]}"
            present.add(id(tensor))
            delete_attribute(graph, name)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target in renamed:
            node.target = renamed[node.target]
    for _, tensor in named_tensors(fake.module):
        assign_attribute(tensor, graph, f"{PREFIX}.{fake.names[id(tensor)][0]}")
    graph.recompile()
    return loose


def _plain_outputs(graph: fx.GraphModule) -> ResultSpec:
    """Make the graph return each tensor of the result once, none sharing memory with another or with an input.

    AOTAutograd would hand aliases back as a base and instructions to view it; separate results keep the graph a plain
    function of its inputs.
    """
    codegen: Any = graph.graph._codegen
    structure = codegen.pytree_info.out_spec
    output = next(iter(graph.graph.find_nodes(op="output")))
    nodes: dict[fx.Node, int] = {}
    places: list[int | None] = []
    baked: list[Any] = []
    for leaf in output.args[0]:
        is_tensor = isinstance(leaf, fx.Node)
        places.append(nodes.setdefault(leaf, len(nodes)) if is_tensor else None)
        baked.append(None if is_tensor else leaf)
    tensors = dict(named_tensors(graph))
    sources = [node for node in graph.graph.nodes if node.op == "placeholder" or node.target in tensors]
    with graph.graph.inserting_before(output):
        separate = graph.graph.call_function(_separate, (list(nodes), sources))
        output.args = (tuple(graph.graph.call_function(operator.getitem, (separate, i)) for i in range(len(nodes))),)
    graph.graph._codegen = fx.graph.CodeGen()
    graph.recompile()
    return ResultSpec(structure, tuple(places), tuple(baked))


def _separate(results: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results, copied where memory is shared with a source that takes part in autograd, or another result.

    Where the model returns a loss (differentiable scalars), other results are for reading: a gradient into
    the logits of a language model would cost as much memory again, and be zero.
    """
    losses = [each for each in results if each.requires_grad and not each.ndim]
    results = [each if not losses or not each.ndim else each.detach() for each in results]
    trained = {storage_key(each) for each in sources if each.requires_grad}
    untrained = {storage_key(each) for each in sources} - trained
    seen = set(trained)
    separate = []
    for result in results:
        key = storage_key(result)
        separate.append(result.clone() if key in seen or (key in untrained and result.requires_grad) else result)
        seen.add(key)
    return separate
