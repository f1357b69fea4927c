"""Messages about models and inputs that cannot be captured; each function returns the exception."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.errors import CaptureError, UsageError

_ONE_DTYPE = "give inputs of the dtype of the model's parameters, or cast in forward (x.float(), x.to(weight.dtype))"

_RAISES = r"RuntimeError when making fake tensor call|Observed exception|InternalTorchDynamoError"
_WAYS_OUT: tuple[tuple[str, str, str], ...] = (
    (
        r"data-dependent expression FloatTrueDiv\(1\.0, ToFloat\(",
        "a Python number, one over a count that is a tensor, depends on tensor values",
        (
            "of BatchNorm(momentum=None), which averages over all batches by their number, make momentum a number "
            "(its default is 0.1); elsewhere keep the number a tensor (no float(tensor))"
        ),
    ),
    (
        r"[Dd]ata-dependent branching|dynamic control flow|Could not guard on data-dependent",
        "its control flow depends on tensor values",
        (
            "compute both branches and choose with torch.where, or decide by shapes and Python values (an expert of a "
            "mixture is computed for all tokens, with weight 0 where it is not chosen, instead of if it is chosen)"
        ),
    ),
    (
        r"the result of (where|nonzero|argwhere|masked_select|getitem)\(\) is data-dependent",
        "how many rows a mask selects depends on tensor values",
        (
            "compute all rows and let the mask weigh them: for expert e of a mixture, in place of rows = torch.where("
            "index == e), out = out + expert(x) * (weight * (index == e)).sum(-1, keepdim=True), where index and "
            "weight are of shape [tokens, experts of a token] (give those of one expert a token that dimension by "
            "unsqueeze(-1)); or give each a fixed number of rows (topk of its weights, index_add back)"
        ),
    ),
    (
        r"Backend compiler exception|data-dependent|DataDependent|unbacked|\.item\(\)|tolist\(\)|DynamicOutputShape",
        "a shape or Python number depends on tensor values",
        (
            "keep the value a tensor (no .item(), .tolist(), int(tensor)) and use a fixed size, for example a mask "
            "instead of nonzero() or boolean indexing; loop over all experts of a mixture instead of those chosen: "
            "out = out + expert(x) * (weight * (index == e)).sum(-1, keepdim=True)"
        ),
    ),
    (
        r"Autograd not support dtype",
        "it computes whole numbers out of trained parameters: a layer of floats gets tensors of whole numbers, say",
        _ONE_DTYPE,
    ),
    (
        r"Expected dtype int32/int64 for index, but got",
        "it looks up by numbers of another dtype than int64, as classes of a loss that are uint8 are",
        "give classes and indices as int64: y.long()",
    ),
    (
        r"buffer '.*' of shape .* becomes",
        "its forward puts a buffer of another shape in the place of one",
        (
            "if it does so at its first call alone (a table that is made for the inputs), run the model once on these "
            "inputs before it is compiled; else compute that tensor in forward, or make the buffer as large at once"
        ),
    ),
    (
        _RAISES,
        "its forward raises on inputs of these shapes and types",
        (
            "run the model once on these example inputs without autopar; if that works, it does otherwise while traced "
            "(torch.compiler.is_compiling): give it what it makes by itself else, such as an attention mask, or move "
            "the line out of forward"
        ),
    ),
    (
        r"unrecognized type .* at output",
        "it returns something that is neither a tensor nor a container that torch.utils._pytree knows",
        (
            "return tensors in tuples, lists or dicts; a model of transformers returns its cache where "
            "a call has use_cache=True: leave that out, which changes no training (generate needs use_cache=False)"
        ),
    ),
    (
        r"requires_grad_\(\)|Tensor\.requires_grad",
        "its forward turns on the gradient of a tensor",
        (
            "give forward that tensor as an input that requires a gradient, and call torch.autograd.grad on it; "
            "or take the derivative by torch.func.grad, vjp or jvp; where a setting "
            "of the model turns it on, turn that off (freeze_feature_encoder() of transformers' speech models)"
        ),
    ),
    (
        (
            r"graph_break|Graph break|Skip calling|skipped function|disable|not supported|[Uu]nsupported"
            r"|does not know how to trace|Attempted to call function marked as skipped"
        ),
        "it calls something that leaves the graph",
        (
            "move that call out of forward (to __init__, the data loader or the training loop), or wrap it as a "
            "torch.library.custom_op"
        ),
    ),
)
_SHOWN = 3
_OTHERWISE = ("torch cannot trace it", "rewrite the line with plain tensor operations, or move it out of forward")


def not_capturable(model: str, reason: str, where: str) -> CaptureError:
    """Return the error for a model that torch cannot trace; `where` is the user's line, `reason` torch's words."""
    kind, way_out = _OTHERWISE
    for pattern, this_kind, this_way in _WAYS_OUT:
        if re.search(pattern, reason):
            kind, way_out = this_kind, this_way
            break
    place = f"\n  at {where}" if where else ""
    return CaptureError(f"{model} cannot be captured as one static graph: {kind}{place}\n  torch: {reason}\n{way_out}")


def raises_while_traced(reason: str) -> bool:
    """Return whether torch says that forward itself raised."""
    return re.search(_RAISES, reason) is not None


def value_dependent(model: str, operator: str, where: str) -> CaptureError:
    """Return the error for an operator whose result's shape or Python value depends on data."""
    return not_capturable(model, f"the result of {operator} is data-dependent", where)


def higher_order(model: str, operator: str, where: str) -> CaptureError:
    """Return the error for an operator that takes functions."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: it calls the higher-order operator {operator}, which has no rules{place}\n"
        f"{_PLAIN_FORMS.get(operator, 'use the plain form of that computation')}"
    )


_PLAIN_FORMS = {
    "cond": "compute both branches and choose with torch.where, or decide by shapes and Python values",
    **dict.fromkeys(("scan", "map_impl"), "write it as a Python loop over the steps, whose number is a size"),
    "while_loop": "repeat a fixed number of times in a Python loop, and keep what is done with torch.where",
}


def parameter_changed(model: str, parameter: str, where: str) -> CaptureError:
    """Return the error for a trained parameter that forward writes to once it has read it."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: its forward changes the trained parameter {parameter}, which it has read before, "
        f"or computes nothing with{place}\n"
        "change it before forward reads it, or outside of forward (under torch.no_grad(), after optimizer.step()), or "
        "use a changed copy: weight = self.weight.clamp(...)"
    )


def memory_with_gaps(model: str, shape: Sequence[int], stride: Sequence[int], where: str) -> CaptureError:
    """Return the error for a view by strides of a tensor that is itself a part of a larger one."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: as_strided reads the memory of a tensor of shape {list(shape)} and strides "
        f"{list(stride)}, which has gaps, so that it shows elements of other tensors{place}\n"
        "take the view of the whole tensor, of x.contiguous(), or use unfold, narrow or flip"
    )


def attribute_advances(model: str, paths: Sequence[str]) -> CaptureError:
    """Return the error for attributes that forward changes at every call, and computes with."""
    return CaptureError(
        f"{model} cannot be captured: its forward computes with {_some(paths)}, and changes it at every call; the "
        "captured program would keep the value of one call\n"
        "make it a buffer (self.register_buffer) that forward changes in place, or an argument of forward that the "
        "training loop counts up"
    )


def set_by_first_call(model: str, lines: Sequence[str]) -> CaptureError:
    """Return the error for parameters or buffers that forward gives values at its first call alone."""
    places = "".join(f"\n  at {each}" for each in lines if each)
    return CaptureError(
        f"{model} cannot be captured: its forward sets parameters or buffers at its first call alone; the captured "
        f"program would do so at every call{places}\n"
        "call the model once on a batch, the same on all ranks, before it is compiled"
    )


def attributes_stay(model: str, paths: Sequence[str]) -> str:
    """Return the warning about attributes that forward sets for others to read."""
    return (
        f"forward of {model} changes {_some(paths)} at every call, and the captured program does not: of a compiled "
        "model it keeps the value from before; return it from forward where it is read, or make it a buffer"
    )


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return f"the attribute{'' if len(paths) == 1 else 's'} {', '.join(paths[:_SHOWN])}{more}"


def mixed_dtypes(model: str, operator: str, tensors: Sequence[str], where: str) -> CaptureError:
    """Return the error for an operator whose tensors must be of one dtype; `tensors` say what each is."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: {operator} takes tensors of one dtype, and gets {', '.join(tensors)}{place}\n"
        f"torch refuses that without autopar too: {_ONE_DTYPE}"
    )


def whole_numbers(model: str, operator: str, tensor: str, where: str) -> CaptureError:
    """Return the error for an operator of floats that is given whole numbers."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: {operator} takes floats, and gets {tensor}{place}\n"
        "torch refuses that without autopar too: give x.float()"
    )


def class_numbers(model: str, target: str, where: str) -> CaptureError:
    """Return the error for a loss whose target holds classes of a dtype that torch does not look up."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: its loss takes classes of int64, and gets {target}{place}\n"
        "torch refuses that without autopar too: give y.long()"
    )


def trained_elsewhere(model: str, name: str, shape: tuple[int, ...]) -> CaptureError:
    """Return the error for a tensor that is to be trained and is none of the model's parameters."""
    return CaptureError(
        f"{model} reads {name!r} of shape {list(shape)}, which requires a gradient and is none of its parameters\n"
        "register it as torch.nn.Parameter, and read it through self; a plain list or dict registers nothing: make it "
        "a torch.nn.ParameterList, ModuleList, ParameterDict or ModuleDict; a function that replaces forward and holds "
        "another model's parameters is to be a method (types.MethodType); if it is constant, detach() it"
    )


def sparse_value(model: str, operator: str, where: str) -> CaptureError:
    """Return the error for an operator that makes a sparse tensor: a gradient, say."""
    place = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{model} cannot be captured: {operator} makes a sparse tensor, and only dense ones can be planned{place}\n"
        "use dense ones: nn.Embedding(sparse=False), tensor.to_dense()"
    )


def parameter_kind(name: str, kind: str) -> CaptureError:
    """Return the error for a parameter or buffer that is no plain dense tensor."""
    if kind.startswith("Uninitialized"):
        return CaptureError(f"{name} has no shape yet (a lazy module)\nrun the model once on an example batch first")
    return CaptureError(
        f"{name} is of type {kind}, and only plain dense tensors can be planned\n"
        "give the single-device model: autopar does the sharding itself"
    )


def not_a_module(kind: str) -> UsageError:
    """Return the error for a model that is none."""
    return UsageError(f"the model is of type {kind}, and must be a torch.nn.Module")


def examples_kind(kind: str) -> UsageError:
    """Return the error for example inputs that are no tuple and no dict."""
    return UsageError(
        f"example_inputs are of type {kind}, and must be a tuple of positional arguments or a dict of keyword arguments"
        " of the model's forward"
    )


def examples_signature(model: str, reason: str, signature: str) -> UsageError:
    """Return the error for example inputs that the model's forward does not take."""
    return UsageError(f"example_inputs do not fit {model}.forward{signature}: {reason}")


_INSTEAD = {
    "BlockMask": "make it in forward, by create_block_mask of what its function reads",
    "Cache": "call without a cache (use_cache=False, of generate() too)",
}
"""By type of a value that no input can be: what to do."""


def example_value(path: str, kind: str) -> UsageError:
    """Return the error for an input that is neither a tensor nor a plain value."""
    way_out = _INSTEAD.get(kind.removeprefix("Static").removeprefix("Dynamic"), "pass what it holds instead")
    return UsageError(
        f"example input {path} is of type {kind}; inputs are tensors, numbers, strings, booleans and None, in tuples,"
        f" lists, dicts and dataclasses: {way_out}"
    )


def no_tensor_inputs(model: str) -> UsageError:
    """Return the error for example inputs without a tensor."""
    return UsageError(f"example_inputs of {model} hold no tensor; give one batch as the training loop does")
