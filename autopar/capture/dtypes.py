"""Operators that compute with tensors of one dtype only, which no fake tensor is asked for: told where the user is."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.errors import class_numbers, mixed_dtypes, whole_numbers
from autopar.capture.origin import user_line

_ALIKE = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_cdist_forward", "grid_sampler_2d", "grid_sampler_3d"), (0, 1)),
    "binary_cross_entropy": (0, 1),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "convolution"), (0, 1, 2)),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), (0, 2)),
    **dict.fromkeys(("index_add", "index_copy"), (0, 3)),
}
"""By operator: the positions of its arguments whose dtype must be one.

The kernels of torch 2.13 on the CPU refuse anything else when they run, and shape functions do not.
"""

_NORMS = {
    "native_layer_norm": (0, 2, 3),
    **dict.fromkeys(("native_group_norm", "native_batch_norm", "_native_batch_norm_legit_functional"), (0, 1, 2)),
}
"""As above; values of 16 bits are also normalised with weights of float32."""

_FLOATS = frozenset(
    {"gelu", "silu", "mish", "softplus", "glu", "hardswish", "hardsigmoid", "hardshrink", "log_sigmoid_forward",
     "_softmax", "_log_softmax", "logcumsumexp", "var", "std", "var_mean", "std_mean"}
)  # fmt: skip
"""Operators that compute with floats only, which shape functions do not ask for either."""

_CLASSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_HALF = frozenset({torch.bfloat16, torch.float16})


def require_dtypes(joint: fx.GraphModule, name: str) -> None:
    """Refuse operators of the model `name` whose tensors have dtypes that do not go together, or are no floats.

    Raises:
        CaptureError: some have; the text names operator, dtypes, shapes and the user's line.
    """
    for node in joint.graph.nodes:
        operator = getattr(node.target, "__name__", "").partition(".")[0]
        where = node.meta.get("stack_trace", "")
        if operator in _CLASSES:
            target = _tensor(node, 1)
            if target is not None and target.dtype not in {torch.int64, torch.uint8}:
                raise class_numbers(name, _shown(target), user_line(where))
        first = _tensor(node, 0) if operator in _FLOATS else None
        if first is not None and not first.dtype.is_floating_point and not first.dtype.is_complex:
            raise whole_numbers(name, operator.strip("_"), _shown(first), user_line(where))
        tensors = [_tensor(node, i) for i in _ALIKE.get(operator, _NORMS.get(operator, ()))]
        present = [each for each in tensors if each is not None]
        if len({each.dtype for each in present}) > 1 and not (operator in _NORMS and _half_with_float(present)):
            raise mixed_dtypes(name, operator.strip("_"), [_shown(each) for each in present], user_line(where))


def _half_with_float(tensors: list[torch.Tensor]) -> bool:
    values, *weights = tensors
    return values.dtype in _HALF and {each.dtype for each in weights} == {torch.float32}


def _tensor(node: fx.Node, position: int) -> torch.Tensor | None:
    given = node.args[position] if position < len(node.args) else None
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
