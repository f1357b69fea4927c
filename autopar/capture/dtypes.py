"""Operators that compute with tensors of one dtype only, which no fake tensor is asked for: told where the user is."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.errors import class_numbers, mixed_dtypes
from autopar.capture.origin import user_line

_ALIKE = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_cdist_forward", "grid_sampler_2d", "grid_sampler_3d"), (0, 1)),
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

_CLASSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_HALF = frozenset({torch.bfloat16, torch.float16})


def require_dtypes(joint: fx.GraphModule, name: str) -> None:
    """Refuse products, norms, writes and losses of the model `name` whose tensors have dtypes that do not go together.

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
