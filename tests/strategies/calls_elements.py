"""Representative calls of operators that work element by element."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.strategies.make import b, c, f, i, p
from tests.strategies.one_op import Case

aten = torch.ops.aten


def unary() -> Iterator[Case]:
    """Yield operators on the elements of one tensor."""
    any_number = (
        "abs",
        "neg",
        "exp",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "relu",
        "silu",
        "gelu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "elu",
        "celu",
        "softplus",
        "leaky_relu",
        "sgn",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "erf",
        "square",
        "clone",
        "detach",
        "alias",
        "isnan",
        "isinf",
        "nan_to_num",
        "lift_fresh_copy",
        "hardshrink",
        "softshrink",
        "relu6",
        "log_sigmoid_forward",
    )
    positive = ("log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal")
    for name in any_number:
        yield c(f"{name}.default", f(4, 6))
    for name in positive:
        yield c(f"{name}.default", p(4, 6))
    yield c("_to_copy.default", f(4, 6), dtype=torch.float32)
    yield c("_to_copy.default", f(4, 6), dtype=torch.bool)
    yield c("_to_copy.default", i(5, 4, 6), dtype=torch.float64)
    yield c("clone.default", f(4, 6), memory_format=torch.contiguous_format)
    yield c("bitwise_not.default", b(4, 6))
    yield c("logical_not.default", b(4, 6))
    yield c("_conj.default", torch.complex(f(4, 6), f(4, 6)))
    yield c("_conj_physical.default", torch.complex(f(4, 6), f(4, 6)))
    yield c("pow.Tensor_Scalar", f(4, 6), 2)
    yield c("pow.Scalar", 3, f(4, 6))
    yield c("clamp.default", f(4, 6), -0.5, 0.5)
    yield c("clamp_min.default", f(4, 6), 0.1)
    yield c("clamp_max.default", f(4, 6), 0.1)
    yield c("add.Scalar", f(4, 6), 2.0)
    yield c("sub.Scalar", f(4, 6), 2.0)
    yield c("mul.Scalar", f(4, 6), 3.0)
    yield c("div.Scalar", f(4, 6), 3.0)
    yield c("rsub.Scalar", f(4, 6), 1)
    for name in ("add.Scalar", "sub.Scalar", "rsub.Scalar", "add.Tensor", "sub.Tensor"):
        yield c(name, f(), 1)
        yield c(name, f(4, 6), 0)
    yield c("prims.convert_element_type.default", f(4, 6), torch.float32)
    yield c("fill.Scalar", f(4, 6), 2.0)
    yield c("logit_backward.default", f(4, 6), p(4, 6))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield c(f"{name}.Scalar", i(3, 4, 6), 1)


def binary() -> Iterator[Case]:
    """Yield operators on the elements of several tensors, with broadcasting."""
    for name in ("add", "sub", "mul", "div"):
        yield c(f"{name}.Tensor", f(4, 6), p(4, 6))
        yield c(f"{name}.Tensor", f(2, 4, 6), p(4, 1))
        yield c(f"{name}.Tensor", f(4, 6), 2.0)
    yield c("add.Tensor", f(4, 6), f(6), alpha=3)
    yield c("add.Tensor", f(1, 4), f(6, 1))
    yield c("div.Tensor_mode", f(4, 6), p(4, 6), rounding_mode="floor")
    yield c("div.Tensor_mode", f(4, 6), p(4, 6), rounding_mode=None)
    yield c("floor_divide.default", i(9, 4, 6), 2)
    yield c("remainder.Scalar", i(9, 4, 6), 2)
    for name in ("maximum", "minimum", "atan2", "logaddexp"):
        yield c(f"{name}.default", f(4, 6), f(6))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield c(f"{name}.Tensor", i(3, 4, 1), i(3, 1, 6))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield c(f"{name}.Tensor", b(4, 6), b(6))
    for name in ("logical_and", "logical_or", "logical_xor"):
        yield c(f"{name}.default", b(4, 6), b(6))
    yield c("pow.Tensor_Tensor", p(4, 6), p(4, 6))
    yield c("clamp_min.Tensor", f(4, 6), f())
    yield c("clamp_max.Tensor", f(4, 6), f(6))
    yield c("xlogy.Tensor", p(4, 6), p(4, 6))
    yield c("polar.default", p(4, 6), f(4, 6))
    yield c("complex.default", f(4, 6), f(4, 6))
    yield c("copy.default", f(4, 6), f(4, 6))
    yield c("copy.default", f(4, 6), f(6, dtype=torch.float32))
    yield c("fill.Tensor", f(4, 6), f())
    yield c("lerp.Scalar", f(4, 6), f(4, 6), 0.3)
    yield c("lerp.Tensor", f(4, 6), f(4, 6), f(4, 1))
    yield c("addcmul.default", f(4, 6), f(4, 6), f(4, 6), value=2.0)
    yield c("addcdiv.default", f(4, 6), f(4, 6), p(4, 6))
    yield c("where.self", b(4, 1, 6), f(4, 2, 6), f())
    yield c("where.ScalarOther", b(4, 6), f(4, 6), 0.0)
    yield c("where.ScalarSelf", b(4, 6), 0.0, f(4, 6))
    yield c("where.Scalar", b(4, 6), 0.0, 1.0)
    yield c("masked_fill.Scalar", f(2, 4, 6), b(4, 6), 0)
    yield c("masked_fill.Scalar", f(2, 4, 6), b(4, 6), float("-inf"))
    yield c("masked_fill.Tensor", f(4, 6), b(4, 6), f())
    yield c("_prelu_kernel.default", f(4, 6), f(1, 6))
    yield c("prelu.default", f(4, 6), f(6))
    yield c("_prelu_kernel_backward.default", f(4, 6), f(4, 6), f(1, 6).expand(4, 6))


def backward_of_elements() -> Iterator[Case]:
    """Yield gradients of operators on elements."""
    for name in ("tanh", "sigmoid"):
        yield c(f"{name}_backward.default", f(4, 6), p(4, 6))
    for name in ("silu", "gelu", "hardswish", "hardsigmoid", "mish"):
        yield c(f"{name}_backward.default", f(4, 6), f(4, 6))
    yield c("gelu_backward.default", f(4, 6), f(4, 6), approximate="tanh")
    yield c("threshold_backward.default", f(4, 6), f(4, 6), 0)
    yield c("hardtanh_backward.default", f(4, 6), f(4, 6), -1.0, 1.0)
    yield c("leaky_relu_backward.default", f(4, 6), f(4, 6), 0.01, False)
    yield c("softplus_backward.default", f(4, 6), f(4, 6), 1, 20)
    yield c("elu_backward.default", f(4, 6), 1.0, 1, 1, False, f(4, 6))
    yield c("hardshrink_backward.default", f(4, 6), f(4, 6), 0.5)
    yield c("softshrink_backward.default", f(4, 6), f(4, 6), 0.5)
    x = f(4, 6)
    yield c("log_sigmoid_backward.default", f(4, 6), x, aten.log_sigmoid_forward(x)[1])
    yield c("native_dropout_backward.default", f(4, 6), b(4, 6), 1.25)
