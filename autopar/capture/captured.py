"""`capture`: the one entry of this package, and what it returns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from autopar._torch import AOTInput, FakeTensorMode, traced_stack
from autopar._torch_tracing import Asked, as_if_not_compiled
from autopar.capture.attributes import check_attributes
from autopar.capture.blanks import make_by_shape
from autopar.capture.blocks import find_blocks
from autopar.capture.call import CallSpec, ResultSpec, read_call
from autopar.capture.changed import leave_changed_parameters
from autopar.capture.errors import no_tensor_inputs, not_a_module, not_capturable, raises_while_traced
from autopar.capture.fake import FakeModel
from autopar.capture.lazy import write_lazy_tensors
from autopar.capture.losses import merge_cross_entropy
from autopar.capture.lower import Names, Placeholder, lower, placeholder, tidy_outputs
from autopar.capture.masks import simplify_masks
from autopar.capture.merge import drop_idle_strides, merge_equal
from autopar.capture.metrics import leave_metrics, of_inputs_alone
from autopar.capture.naming import names_in_order, rename_nodes, renamed_ops, renamed_outputs
from autopar.capture.origin import layer_path, module_path, user_line
from autopar.capture.reads import reads
from autopar.capture.strides import in_plain_order
from autopar.capture.trace import PREFIX, Traced, trace
from autopar.capture.unread import drop_unread
from autopar.errors import AutoparError, CaptureError
from autopar.ir.graph import Graph

_TOLD = 4
"""Who asks whether it is compiled is told so one after another, up to this many; all others together then."""


@dataclass(frozen=True)
class Captured:
    """One program: a model's forward and backward for one form of call."""

    joint: fx.GraphModule
    """Takes `placeholders` in order; returns a flat tuple beside `graph.outputs`, `None` for a missing gradient."""

    graph: Graph
    call: CallSpec
    result: ResultSpec
    placeholders: tuple[Placeholder, ...]
    constants: Mapping[str, torch.Tensor]
    """By name of the op: tensors that the program holds itself (literals, plain tensor attributes of modules).

    One on meta has no value: the model kept it as an attribute while it was on meta.
    """

    training: bool
    with_backward: bool


def capture(model: nn.Module, example_inputs: object, *, training: bool = True, with_backward: bool = True) -> Captured:
    """Return the program of `model` for calls like the example (a tuple of arguments, or a dict of keyword arguments).

    Every differentiable output gets a tangent (where the model returns a scalar loss, scalars alone do), every trained
    parameter a gradient. Modules that differ from the
    model's own mode (frozen BatchNorm) keep theirs if `training` is the mode that the model is in already.

    Raises:
        UsageError: the example inputs are not of a form that the model's forward takes.
        CaptureError: the model is no static graph; the text names the user's line and the way out.
    """
    if not isinstance(model, nn.Module):
        raise not_a_module(type(model).__name__)
    name = type(model).__name__
    call, examples = read_call(model, example_inputs)
    if not examples:
        raise no_tensor_inputs(name)
    try:
        fake, traced, told = _traced(model, call, examples, training=training, with_backward=with_backward)
        call = replace(call, reads=reads(traced.guarded, PREFIX, fake.module, model))
        captured = _assemble(name, fake, call, traced, training=training, with_backward=with_backward)
    except AutoparError:
        raise
    except Exception as error:
        raise _explain(name, error) from error
    if traced.changes_python:
        with as_if_not_compiled([], told):
            writes = any(each.kind == "mutation" for each in captured.graph.outputs)
            check_attributes(model, call, examples, training=training, with_backward=with_backward, writes=writes)
    return captured


def _traced(
    model: nn.Module, call: CallSpec, examples: Sequence[torch.Tensor], *, training: bool, with_backward: bool
) -> tuple[FakeModel, Traced, set[Asked]]:
    """Return the model's trace, of a copy of it, and who was told that it is compiled.

    Where it asks whether it is compiled, it is told that it is not, as on one device. If it cannot be traced so (it
    reads values then, as of a mask), who asked last before it failed is told the truth, and so on.
    """
    name = type(model).__name__

    def once() -> tuple[FakeModel, Traced]:
        fake = FakeModel(model, FakeTensorMode(allow_non_fake_inputs=True))
        if fake.module.training != training:
            fake.module.train(training)
        inputs = [fake.fake(each) for each in examples]
        return fake, trace(fake, call, inputs, with_backward=with_backward, name=name)

    asked: list[Asked] = []
    told: set[Asked] = set()
    first: Exception | None = None
    while True:
        asked.clear()
        try:
            with as_if_not_compiled(asked, told):
                return *once(), told
        except Exception as error:
            untold = [each for each in asked if each not in told]
            if not untold and first is not None and raises_while_traced(str(error)):
                raise first from None  # being told is what it fails by
            if not untold:
                raise
            first = first or error
            told |= {untold[-1]} if len(told) < _TOLD else set(untold)


def _assemble(
    name: str, fake: FakeModel, call: CallSpec, traced: Traced, *, training: bool, with_backward: bool
) -> Captured:
    joint = traced.joint
    modules = frozenset(path for path, _ in fake.module.named_modules(remove_duplicate=False))
    _tidy(joint, name, modules)
    names = Names(
        model=name,
        prefix=PREFIX,
        modules=modules,
        inputs=[each.path for each in call.tensors],
        outputs=traced.result.names(),
        loose={aot: each.name for aot, each in traced.loose.items()},
        trained=frozenset(path for path, each in fake.module.named_parameters() if each.requires_grad),
        graded_inputs=frozenset(i for i, each in enumerate(call.tensors) if each.requires_grad),
    )
    nodes = joint.graph.find_nodes(op="placeholder")
    placeholders = tuple(placeholder(node, names) for node in nodes)
    given: dict[AOTInput, Placeholder] = {
        node.meta["desc"]: each for node, each in zip(nodes, placeholders, strict=True)
    }
    outputs = tidy_outputs(joint, names, given, with_backward=with_backward)
    result, batch = traced.result, batch_size(each.meta.shape for each in call.tensors)
    if with_backward:
        trained = {each.target for each in placeholders if each.kind == "tangent"}
        outputs, result = leave_metrics(joint, outputs, result, trained, batch)
    ops = lower(joint, names, placeholders, outputs)
    called = names_in_order(ops)
    rename_nodes(joint, called)
    ops, outputs = renamed_ops(ops, called), renamed_outputs(outputs, called)
    placeholders = tuple(replace(each, name=called[each.name]) for each in placeholders)
    joint.graph.lint()
    joint.recompile()
    aliases = {known[0]: known for known in fake.names.values() if len(known) > 1}
    graph = Graph(tuple(ops), tuple(outputs), aliases, batch_size=batch)
    return Captured(
        joint=joint,
        graph=replace(graph, fold=find_blocks(graph)),
        call=call,
        result=result,
        placeholders=placeholders,
        constants=_constants(traced, placeholders),
        training=training,
        with_backward=with_backward,
    )


def _tidy(joint: fx.GraphModule, name: str, modules: Collection[str]) -> None:
    """Write what was traced as the project's rules know it, each value once, and nothing that nobody reads."""
    leave_changed_parameters(joint)
    simplify_masks(joint)
    write_lazy_tensors(joint)
    drop_idle_strides(joint)
    in_plain_order(joint, name)
    merge_equal(joint, lambda node: layer_path(module_path(node.meta, modules, PREFIX) or ""))
    merge_cross_entropy(joint)
    make_by_shape(joint, of_inputs_alone(joint.graph))
    drop_unread(joint)


def _constants(traced: Traced, placeholders: Sequence[Placeholder]) -> dict[str, torch.Tensor]:
    """Return the tensors that the program holds itself, by name of their op."""
    joint = traced.joint
    found = {
        each.name: traced.loose[node.meta["desc"].target].value.detach()
        for each, node in zip(placeholders, joint.graph.find_nodes(op="placeholder"), strict=True)
        if each.kind == "constant"
    }
    return found | {node.name: getattr(joint, str(node.target)) for node in joint.graph.find_nodes(op="get_attr")}


def batch_size(shapes: Iterable[Sequence[int]]) -> int:
    """Return the size of dimension 0 that the tensor inputs share; if they differ, that of most of them, 0 if none."""
    sizes = [shape[0] for shape in shapes if shape]
    return max(dict.fromkeys(sizes), key=sizes.count) if sizes else 0


def _explain(name: str, error: Exception) -> CaptureError:
    """Return the error for what torch raised while it traced the model."""
    text = str(error)
    where = user_line(traced_stack(error)) or user_line(text)
    reason = _sentence(text)
    is_name = not reason or re.fullmatch(r"[\w.]+", reason)  # of an operator, where fake tensors refuse to run it
    return not_capturable(name, f"{type(error).__name__} {reason}".strip() if is_name else reason, where)


def _sentence(text: str) -> str:
    """Return torch's reason as one line: its headline, and what it explains of the case."""
    lines = [line.strip() for line in text.splitlines()]
    headline = next((line for line in lines if line), "")
    explained = next(
        (line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), ""
    )
    raised = re.search(r"raised exception (.+)|got (\w+\(.+\))", text)
    detail = next(filter(None, raised.groups()), "") if raised else explained
    return f"{headline}: {detail}" if detail and detail != headline else headline
