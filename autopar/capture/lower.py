"""From the joint fx graph to `ir.Graph`: the same operators under the same names, without torch."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from autopar.capture.errors import higher_order, parameter_changed, sparse_value, value_dependent
from autopar.capture.origin import is_accumulation, module_path, phases, user_line
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Const, Op, OpKind, Output, Phase, Ref
from autopar.ir.tensor import TensorMeta

_LITERALS = (
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What one placeholder of the joint graph stands for."""

    name: str
    kind: OpKind
    target: str
    """Qualified name of a parameter, buffer or tensor attribute; path of an input, or of the output of a tangent."""

    index: int
    """For an input: its number among the call's tensors. For a tangent: that of the output. Else -1."""


@dataclass(frozen=True, slots=True)
class Names:
    """What names mean in the traced program."""

    model: str
    prefix: str
    modules: Collection[str]
    inputs: Sequence[str]
    """Paths of the tensor inputs."""

    outputs: Sequence[str]
    """Paths of the user outputs."""

    loose: Mapping[str, str]
    """Attribute paths of tensors that are no state of the model, by AOTAutograd's names for them."""

    trained: Collection[str]
    """Parameters that require a gradient."""

    graded_inputs: Collection[int]
    """Numbers of the tensor inputs that require a gradient."""

    def own(self, name: str) -> str:
        """Return the user's name for a parameter or buffer."""
        return name.removeprefix(f"{self.prefix}.")


def placeholder(node: fx.Node, names: Names) -> Placeholder:
    """Return what a placeholder stands for, from AOTAutograd's descriptor of it."""
    desc: AOTInput = node.meta["desc"]
    match desc:
        case ParamAOTInput(target) | BufferAOTInput(target) if target in names.loose:
            return Placeholder(node.name, "constant", names.loose[target], -1)
        case ParamAOTInput(target):
            return Placeholder(node.name, "parameter", names.own(target), -1)
        case BufferAOTInput(target):
            return Placeholder(node.name, "buffer", names.own(target), -1)
        case PlainAOTInput(idx):
            return Placeholder(node.name, "input", names.inputs[idx], idx)
        case TangentAOTInput(PlainAOTOutput(idx)):
            return Placeholder(node.name, "tangent", names.outputs[idx], idx)
        case TangentAOTInput(InputMutationAOTOutput(ParamAOTInput(target))):
            raise parameter_changed(names.model, names.own(target), _where_changed(node.graph, target))
    raise CaptureError(
        f"{names.model} cannot be captured: its inputs alias or change in a way not handled ({desc.expr()})"
    )


def _where_changed(joint: fx.Graph, target: str) -> str:
    """Return the user's line that makes the new value of a parameter; empty where it is not known."""
    node = next(iter(joint.find_nodes(op="output")))
    for value, desc in zip(node.args[0], node.meta["desc"], strict=True):
        match desc:
            case InputMutationAOTOutput(ParamAOTInput(changed)) if changed == target:
                return user_line(value.meta.get("stack_trace") or "")
    return ""


def wants_gradient(given: Placeholder, names: Names) -> bool:
    """Return whether the program is to give a gradient for a placeholder."""
    if given.kind == "parameter":
        return given.target in names.trained
    return given.kind == "input" and given.index in names.graded_inputs


def tidy_outputs(
    joint: fx.GraphModule, names: Names, given: Mapping[AOTInput, Placeholder], *, with_backward: bool
) -> list[Output]:
    """Leave in the joint graph's outputs what the program is for; return one `Output` for each of them, in order.

    Kept are new values of buffers and inputs, user outputs, and one gradient (or `None`) for every trained parameter
    and every input that requires one.
    """
    node = next(iter(joint.graph.find_nodes(op="output")))
    outputs: list[Output] = []
    kept: list[fx.Node | None] = []
    results: list[fx.Node | None] = list(node.args[0])
    described: list[AOTOutput | None] = list(node.meta["desc"])
    graded: set[str] = set()
    for value, desc in zip(results, described, strict=True):
        ref = None if value is None else reference(value)
        match desc:
            case PlainAOTOutput(idx):
                outputs.append(Output("output", names.outputs[idx], ref))
            case InputMutationAOTOutput(source):
                outputs.append(Output("mutation", given[source].name, ref))
            case GradAOTOutput(source):
                if not wants_gradient(given[source], names):
                    continue
                graded.add(given[source].name)
                outputs.append(Output("gradient", given[source].name, ref))
            case None if value is None:
                continue
            case _:
                raise CaptureError(
                    f"{names.model} cannot be captured: an output or input changes in a way not handled "
                    f"({desc.expr() if desc is not None else value})"
                )
        kept.append(value)
    for each in given.values():
        if with_backward and each.name not in graded and wants_gradient(each, names):
            outputs.append(Output("gradient", each.name, None))
            kept.append(None)
    node.args = (tuple(kept),)
    return outputs


def reference(node: fx.Node) -> Ref:
    """Return the value that an fx node makes, `getitem` resolved."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        return Ref(source.name, index)  # type: ignore[union-attr,arg-type]
    return Ref(node.name)


def argument(value: Any) -> Arg:
    """Return an fx argument as the IR's."""
    if isinstance(value, fx.Node):
        return reference(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(argument(each) for each in value)
    for kind, name in _LITERALS:
        if isinstance(value, kind):
            return Const(name, str(value).removeprefix("torch."))
    return Const(type(value).__name__, str(value))


def tensor_meta(value: torch.Tensor) -> TensorMeta:
    """Return shape and dtype of a tensor."""
    return TensorMeta(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))


def lower(joint: fx.GraphModule, names: Names, given: Sequence[Placeholder], outputs: Sequence[Output]) -> list[Op]:
    """Return the operators of the joint graph; forward ones are moved before backward ones in it."""
    by_name = {each.name: each for each in given}
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    tangents = {node for node in nodes if node.name in by_name and by_name[node.name].kind == "tangent"}
    found = {node.name: node for node in nodes}
    results = [found[each.ref.op] for each in outputs if each.ref is not None and each.kind != "gradient"]
    phase = phases(nodes, tangents, results)
    _forward_first(nodes, phase)
    ops: list[Op] = []
    origins: dict[str, _Origin] = {}
    for node in [node for node in joint.graph.nodes if node.op != "output"]:
        if node.op == "call_function" and node.target is operator.getitem:
            continue
        origin = origins[node.name] = _origin(node, names, origins)
        source = origin.source
        if node.op == "placeholder":
            each = by_name[node.name]
            trained = each.kind == "parameter" and each.target in names.trained
            ops.append(
                Op(
                    name=node.name,
                    kind=each.kind,
                    target=each.target,
                    outputs=(tensor_meta(node.meta["val"]),),
                    phase=phase[node],
                    requires_grad=trained,
                )
            )
            continue
        constant = node.op == "get_attr"
        if constant and "val" not in node.meta:  # a graph of its own: a branch, a loop's body
            reader = next(iter(node.users))
            raise higher_order(names.model, str(reader.target), user_line(reader.meta.get("stack_trace") or ""))
        if not constant and not isinstance(node.target, torch._ops.OpOverload):
            raise higher_order(names.model, str(node.target), source)
        ops.append(
            Op(
                name=node.name,
                kind="constant" if constant else "call",
                target=str(node.target),
                args=() if constant else tuple(map(argument, node.args)),
                kwargs=() if constant else tuple((name, argument(value)) for name, value in node.kwargs.items()),
                outputs=_outputs(node, names.model, source),
                phase=phase[node],
                module=origin.module,
                source=source,
            )
        )
    return ops


def _outputs(node: fx.Node, model: str, source: str) -> tuple[TensorMeta | None, ...]:
    value = node.meta["val"]
    metas: list[TensorMeta | None] = []
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, torch.Tensor):
            if each.layout is not torch.strided:
                raise sparse_value(model, str(node.target), source)
            metas.append(tensor_meta(each))
        elif each is None or isinstance(each, bool | int | float):
            metas.append(None)
        else:
            raise value_dependent(model, str(node.target), source)
    return tuple(metas)


def _forward_first(nodes: Sequence[fx.Node], phase: Mapping[fx.Node, Phase]) -> None:
    first = next((node for node in nodes if phase[node] == "backward" and node.op != "placeholder"), None)
    if first is None:
        return
    late = False
    for node in nodes:
        late = late or node is first
        if late and phase[node] == "forward":
            first.prepend(node)


@dataclass(frozen=True, slots=True)
class _Origin:
    position: int
    module: str
    source: str


def _origin(node: fx.Node, names: Names, before: Mapping[str, _Origin]) -> _Origin:
    """Return module path and source line; an addition of gradients belongs where its last gradient came from."""
    if node.op == "placeholder":
        return _Origin(len(before), "", "")
    module = module_path(node.meta, names.modules, names.prefix)
    source = user_line(node.meta.get("stack_trace") or "")
    if module is None or is_accumulation(node.meta):
        reads = [before[reference(each).op] for each in node.all_input_nodes]
        latest = max((each for each in reads if each.source), key=lambda each: each.position, default=None)
        if latest is not None:
            module, source = latest.module, latest.source
    return _Origin(len(before), module or "", source)
