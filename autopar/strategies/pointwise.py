"""Sharding rules of operators that work element by element, operands broadcasting to the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import torch

from autopar.ir.graph import Const, Ref
from autopar.ir.placement import Partial
from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import FLOATING
from autopar.strategies.call import Call, overload
from autopar.strategies.matmul import aligned

Groups = tuple[tuple[str, ...], ...]
"""Sets of argument names in which an operator is linear together."""


@lru_cache(maxsize=4096)
def is_pointwise(target: str) -> bool:
    """Return whether an operator makes each element of those in its place, and draws none."""
    op = overload(target)
    tags = () if op is None else op.tags
    seeded = torch.Tag.nondeterministic_seeded in tags
    return target in RULES or (torch.Tag.pointwise in tags and not seeded)


def pointwise(call: Call) -> Iterator[Strategy]:
    """Yield the strategies of an operator on elements: every dimension splits, in all operands that have it."""
    yield from _pointwise(call, _linear_in(call))


def _pointwise(call: Call, linear: Groups) -> Iterator[Strategy]:
    shape = next((meta.shape for meta in call.op.outputs if meta is not None), ())
    out: Dims = plain(letters(len(shape)))
    groups = [frozenset(i for name in group if (i := call.index(name)) is not None) for group in linear]
    return call.by(
        Rule(
            inputs=tuple(aligned(meta.shape, out) for meta in call.metas),
            outputs=tuple(None if meta is None else out for meta in call.op.outputs),
            linear=tuple(dict.fromkeys(group for group in groups if group)),
        )
    )


def _shifted(call: Call) -> Iterator[Strategy]:
    """Yield those of a sum with a plain number: terms of a loss share it among them (`1 - similarity.mean()`)."""
    yield from pointwise(call)
    single = not call.result() and call.metas[0].is_floating
    if single and not _linear_in(call) and not _is_tensor(call, "other"):
        yield call.strategy({0: Partial()}, {0: Partial()}, "share")


def _is_tensor(call: Call, name: str) -> bool:
    return isinstance(call.arg(name), Ref)


def _sum(call: Call) -> Groups:
    if not _is_tensor(call, "other"):
        return (("self",),) if call.arg("other") == 0 else ()  # what Python's sum() begins with
    return (("self", "other"),) if _is_tensor(call, "self") else ()


def _product(call: Call) -> Groups:
    return (("self",), ("other",))


def _self(call: Call) -> Groups:
    return (("self",),)


def _source(call: Call) -> Groups:
    return (("src",),)


def _gradient(call: Call) -> Groups:
    return (("grad_output",),)


def _cast(call: Call) -> Groups:
    dtype = call.arg("dtype")
    before = call.metas[0].dtype
    after = dtype.value if isinstance(dtype, Const) else before
    return (("self",),) if before in FLOATING and after in FLOATING else ()


def _filled(call: Call) -> Groups:
    return (("self",),) if call.arg("value") == 0 and not _is_tensor(call, "value") else ()


def _whole_quotient(call: Call) -> Groups:
    return (("self",),) if call.arg("rounding_mode") is None else ()


LINEAR: Mapping[str, Callable[[Call], Groups]] = {
    "aten.add.Tensor": _sum,
    "aten.sub.Tensor": _sum,
    "aten.mul.Tensor": _product,
    "aten.mul.Scalar": _self,
    "aten.div.Tensor": _self,
    "aten.div.Scalar": _self,
    "aten.div.Tensor_mode": _whole_quotient,
    "aten.neg.default": _self,
    "aten.clone.default": _self,
    "aten.detach.default": _self,
    "aten.alias.default": _self,
    "aten.lift_fresh_copy.default": _self,
    "aten._to_copy.default": _cast,
    "aten.copy.default": _source,
    "aten.where.self": _sum,
    "aten.lerp.Scalar": lambda call: (("self", "end"),),
    "aten.lerp.Tensor": lambda call: (("self", "end"),),
    "aten.masked_fill.Scalar": _filled,
    "aten.native_dropout_backward.default": _gradient,
    "aten._conj.default": _self,
    "aten._conj_physical.default": _self,
    "aten.complex.default": lambda call: (("real", "imag"),),
    "prims.convert_element_type.default": lambda call: (("a",),) if call.metas[0].dtype in FLOATING else (),
}
"""Operators that make terms of terms, and in which operands."""


def _linear_in(call: Call) -> Groups:
    found = LINEAR.get(call.op.target)
    return found(call) if found is not None else ()


def _quantised(call: Call) -> Iterator[Strategy]:
    """Yield those of fake quantisation, by scales for all or for each place along a dimension, and of its gradients."""
    shape = call.op.outputs[0].shape if call.op.outputs[0] is not None else ()
    names = plain(letters(len(shape)))
    along = call.arg("axis")

    def of(each: tuple[int, ...]) -> Dims:
        if each == shape:
            return names
        return (names[int(along)],) if along is not None and each == (shape[int(along)],) else ((),) * len(each)

    return call.by(
        Rule(
            inputs=tuple(of(meta.shape) for meta in call.metas),
            outputs=tuple(None if meta is None else of(meta.shape) for meta in call.op.outputs),
        )
    )


_QUANTISED = (
    "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_tensor_affine_backward", "_fake_quantize_learnable_per_channel_affine",
    "_fake_quantize_learnable_per_channel_affine_backward",
)  # fmt: skip


def _member(call: Call) -> Iterator[Strategy]:
    """Yield those of whether each element is one of a set, which stays whole."""
    names = plain(letters(len(call.result())))
    inputs = [names] + [((),) * len(meta.shape) for meta in call.metas[1:]]
    return call.by(Rule(inputs=tuple(inputs), outputs=(names,)))


_UNTAGGED = (
    "aten.alias.default",
    "aten.celu.default",
    "aten.clamp_max.Tensor",
    "aten.clamp_min.Tensor",
    "aten._conj.default",
    "aten._conj_physical.default",
    "aten.copy.default",
    "aten.detach.default",
    "aten.elu_backward.default",
    "aten.fill.Scalar",
    "aten.fill.Tensor",
    "aten.floor_divide.default",
    "aten.gelu_backward.default",
    "aten.hardshrink_backward.default",
    "aten.hardsigmoid_backward.default",
    "aten.hardswish.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    "aten.isinf.default",
    "aten.isnan.default",
    "aten.leaky_relu_backward.default",
    "aten.lift_fresh_copy.default",
    "aten.log_sigmoid_forward.default",
    "aten.log_sigmoid_backward.default",
    "aten.logit_backward.default",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
    "aten.mish_backward.default",
    "aten.native_dropout_backward.default",
    "aten.nan_to_num.default",
    "aten.polar.default",
    "aten.complex.default",
    "aten.prelu.default",
    "aten._prelu_kernel.default",
    "aten._prelu_kernel_backward.default",
    "aten.relu6.default",
    "aten.rrelu_with_noise_backward.default",
    "aten._standard_gamma_grad.default",
    "aten._dirichlet_grad.default",
    "aten.sigmoid_backward.default",
    "aten.silu_backward.default",
    "aten.softplus_backward.default",
    "aten.softshrink_backward.default",
    "aten.tanh_backward.default",
    "aten.threshold_backward.default",
    "aten.where.self",
    "aten.where.Scalar",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.xlogy.Tensor",
    "aten._to_copy.default",
    "prims.convert_element_type.default",
)
"""Operators on elements that torch does not tag as pointwise in every version."""

RULES: Mapping[str, Callable[[Call], Iterator[Strategy]]] = {
    **dict.fromkeys((*LINEAR, *_UNTAGGED), pointwise),
    **{f"aten.{name}.default": _quantised for name in _QUANTISED},
    "aten.isin.Tensor_Tensor": _member,
    "aten.isin.Tensor_Scalar": _member,
    **{f"aten.{name}": _shifted for name in ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar")},
}
