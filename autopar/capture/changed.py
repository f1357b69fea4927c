"""Parameters that forward itself changes, as Gemma 3n clamps some: no gradient comes of the value that it leaves."""

from __future__ import annotations

import torch
from torch import fx

from autopar._torch import InputMutationAOTOutput, ParamAOTInput, TangentAOTInput

_ADDED = torch.ops.aten.add.Tensor
_AS_IT_IS = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
"""What AOTAutograd, and `.data`, begin with."""


def leave_changed_parameters(joint: fx.GraphModule) -> None:
    """Drop the gradients that AOTAutograd expects for new values of parameters: nobody can give one.

    Autograd allows such changes only behind its back (`.data`, `no_grad`), so that the parameter's gradient is that of
    the values that forward read; AOTAutograd adds that of the new value, which is zero. So are the copy and the
    detached name of the parameter dropped that it begins with, outside of any layer: a program makes new values, and
    writes them when all of forward has run.

    Left as it is, and refused later, is what forward has read before it is changed: backward on one device then meets
    the changed values where it saved the old ones.
    """
    results = next(iter(joint.graph.find_nodes(op="output")))
    made = dict(zip(results.meta["desc"], results.args[0], strict=True))
    placeholders = joint.graph.find_nodes(op="placeholder")
    parameters = {each.meta["desc"]: each for each in placeholders}
    for tangent in placeholders:
        match tangent.meta["desc"]:
            case TangentAOTInput(InputMutationAOTOutput(ParamAOTInput() as changed) as result):
                parameter = parameters[changed]
                if _reads_only_for(parameter, made[result]) and _is_only_added(tangent):
                    _drop(joint.graph, tangent)
                    _read_itself(joint.graph, parameter)


def _reads_only_for(parameter: fx.Node, new: fx.Node) -> bool:
    """Return whether what is read of a parameter, and of what is made of it, is there for its new value alone."""
    before, todo = {new}, [new]
    while todo:
        more = [each for each in todo.pop().all_input_nodes if each not in before]
        before.update(more)
        todo += more
    old, todo = {parameter}, [parameter]
    while todo:
        more = [each for each in todo.pop().users if each is not new and each not in old]
        old.update(more)
        todo += more
    return old <= before


def _is_only_added(tangent: fx.Node) -> bool:
    return all(each.target is _ADDED and not each.kwargs and _other(each, tangent) for each in tangent.users)


def _other(added: fx.Node, tangent: fx.Node) -> fx.Node | None:
    """Return what a gradient is added to; `None` if that is itself."""
    rest = [each for each in added.args if each is not tangent]
    return rest[0] if len(rest) == 1 and isinstance(rest[0], fx.Node) else None


def _drop(graph: fx.Graph, tangent: fx.Node) -> None:
    for each in list(tangent.users):
        if (rest := _other(each, tangent)) is not None:
            each.replace_all_uses_with(rest)
            graph.erase_node(each)
    graph.erase_node(tangent)


def _read_itself(graph: fx.Graph, parameter: fx.Node) -> None:
    while len(parameter.users) == 1:
        only = next(iter(parameter.users))
        if only.target not in _AS_IT_IS or only.kwargs:
            return
        only.replace_all_uses_with(parameter)
        graph.erase_node(only)
