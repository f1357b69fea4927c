"""Representative calls of every operator that has a rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from autopar.own_attention import BLOCK_ATTENTION
from tests.strategies.calls_elements import backward_of_elements, binary, unary
from tests.strategies.calls_planes import MORE
from tests.strategies.calls_scans import scans
from tests.strategies.make import b, c, f, i, p
from tests.strategies.one_op import Case

aten = torch.ops.aten


def matmul() -> Iterator[Case]:
    """Yield matrix products."""
    yield c("mm.default", f(4, 8), f(8, 6))
    yield c("bmm.default", f(4, 2, 6), f(4, 6, 8))
    yield c("mv.default", f(4, 8), f(8))
    yield c("dot.default", f(8), f(8))
    yield c("vdot.default", f(8), f(8))
    yield c("_euclidean_dist.default", f(4, 6), f(8, 6))
    yield c("_cdist_forward.default", f(2, 4, 6), f(2, 8, 6), 2.0, None)
    yield c("_cdist_forward.default", f(2, 4, 6), f(1, 8, 6).expand(2, 8, 6), 1.0, 2)
    first, second = f(2, 4, 6), f(2, 8, 6)
    yield c("_cdist_backward.default", f(2, 4, 8), first, second, 2.0, torch.cdist(first, second))
    yield c("_trilinear.default", f(4, 6), f(8, 6, 2), f(4, 2), [1, 3], [0], [1, 2], [2, 3])
    yield c("_trilinear.default", f(4, 6), f(1, 6, 2), f(4, 2), [1, 3], [0], [1, 2], [-1], 0)
    yield c("addmm.default", f(6), f(4, 8), f(8, 6))
    yield c("addmm.default", f(4, 6), f(4, 8), f(8, 6), beta=2, alpha=3)
    yield c("baddbmm.default", f(4, 1, 8), f(4, 2, 6), f(4, 6, 8), alpha=0.5)


def views() -> Iterator[Case]:
    """Yield rearrangements."""
    for name in ("view", "_unsafe_view", "reshape", "view_copy"):
        yield c(f"{name}.default", f(4, 8, 6), [32, 6])
    yield c("view.default", f(32, 6), [4, 8, 6])
    yield c("view.default", f(4, 2, 12), [4, -1, 2, 6])
    yield c("view.default", f(4, 8, 2, 6), [4, 8, 12])
    yield c("view.default", f(4, 6), [6, 4])
    yield c("view.default", f(1), [])
    yield c("view.default", f(4, 2, 2, 4, 6), [16, 4, 6])
    yield c("_reshape_copy.default", f(4, 6), [24])
    yield c("_reshape_alias.default", f(4, 6), [24], [1])
    yield c("unsqueeze.default", f(4, 6), 1)
    yield c("unsqueeze.default", f(4, 6), -1)
    yield c("unsqueeze_copy.default", f(4, 6), 0)
    yield c("squeeze.default", f(4, 1, 2))
    yield c("squeeze.dim", f(4, 1, 2), 1)
    yield c("squeeze.dim", f(4, 2), 1)
    yield c("squeeze.dims", f(4, 1, 2, 1), [1, 3])
    yield c("squeeze_copy.dim", f(4, 1, 2), 1)
    for name in ("permute", "permute_copy"):
        yield c(f"{name}.default", f(4, 2, 6), [2, 0, -2])
    for name in ("transpose", "transpose_copy"):
        yield c(f"{name}.int", f(4, 2, 6), 1, -1)
    yield c("t.default", f(4, 6))
    yield c("t.default", f(4))
    yield c("t_copy.default", f(4, 6))
    for name in ("expand", "expand_copy"):
        yield c(f"{name}.default", f(4, 1, 6), [2, 4, 8, -1])
    yield c("expand.default", i(9, 1, 6), [4, -1])
    yield c("expand.default", f(), [4, 2])
    yield c("repeat.default", f(1, 6), [4, 1])
    yield c("repeat.default", f(4, 6), [2, 4, 3])
    for name in ("", "_copy"):
        yield c(f"view_as_complex{name}.default", f(4, 6, 2))
        yield c(f"view_as_real{name}.default", torch.complex(f(4, 6), f(4, 6)))
        yield c(f"diagonal{name}.default", f(4, 6, 6), 0, 1, 2)
        yield c(f"unfold{name}.default", f(4, 2, 8), 2, 4, 2)
    yield c("diagonal_backward.default", f(4, 6), [4, 6, 6], 0, 1, 2)
    yield c("unfold_backward.default", f(4, 2, 3, 4), [4, 2, 8], 2, 4, 2)
    yield c("pixel_shuffle.default", f(2, 8, 2, 4), 2)
    yield c("pixel_unshuffle.default", f(2, 2, 4, 8), 2)
    for name in ("", "_copy"):
        yield c(f"as_strided{name}.default", f(24), [4, 6], [6, 1], 0)
    yield c("as_strided_scatter.default", f(24), f(4, 6), [4, 6], [6, 1], 0)


def slices() -> Iterator[Case]:
    """Yield what takes tensors apart or puts them together."""
    for name in ("slice", "slice_copy"):
        yield c(f"{name}.Tensor", f(4, 12), 1, 0, 4)
        yield c(f"{name}.Tensor", f(4, 12), 1, 8, 1 << 62)
    yield c("slice.Tensor", f(4, 12), 1, -4)
    yield c("slice.Tensor", f(4, 12), 1, 0, 12)
    yield c("slice.Tensor", f(4, 12), 1, 0, 100)
    yield c("slice.Tensor", f(4, 12), -1, 1, 11)
    yield c("slice.Tensor", f(4, 12), 1, 0, 12, 2)
    yield c("slice.Tensor", f(4, 12), 1, 2, 12, 3)
    yield c("slice.Tensor", f(4, 12), 0)
    yield c("slice_backward.default", f(4, 4), [4, 12], 1, 4, 8, 1)
    yield c("slice_backward.default", f(4, 12), [4, 12], 1, 0, 1 << 62, 1)
    yield c("slice_backward.default", f(4, 4), [4, 12], 1, 2, 12, 3)
    yield c("slice_backward.default", f(4, 6), [4, 12], 1, 0, 12, 2)
    yield c("slice_backward.default", f(4, 10), [4, 12], 1, 1, 11, 1)
    yield c("slice_scatter.default", f(4, 12), f(4, 4), 1, 8, 1 << 62)
    yield c("slice_scatter.default", f(4, 12), f(4, 11), 1, 1, 1 << 62)
    for name in ("select", "select_copy"):
        yield c(f"{name}.int", f(4, 2, 6), 1, 0)
        yield c(f"{name}.int", f(4, 2, 6), -1, -1)
    yield c("select_backward.default", f(4, 6), [4, 3, 6], 1, 2)
    yield c("select_scatter.default", f(4, 3, 6), f(4, 6), 1, 2)
    for name in ("split", "split_copy", "unsafe_split"):
        yield c(f"{name}.Tensor", f(4, 12), 4, 1)
        yield c(f"{name}.Tensor", f(4, 12), 5, -1)
    for name in ("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes"):
        yield c(f"{name}.default", f(4, 16), [8, 4, 4], -1)
        yield c(f"{name}.default", f(4, 18), [2, 8, 8], -1)
    for name in ("unbind", "unbind_copy"):
        yield c(f"{name}.int", f(4, 3, 6), 1)
    yield c("cat.default", [f(4, 8), f(4, 4)], -1)
    yield c("cat.default", [f(4, 6), f(2, 6), f(2, 6)])
    yield c("cat.default", [i(5, 4, 1), i(5, 4, 6)], 1)
    yield c("cat.default", [f(0), f(4, 6)], 0)
    yield c("stack.default", [f(4, 6), f(4, 6)], 1)
    yield c("constant_pad_nd.default", f(4, 2, 6), [0, 0, 1, 2], 0.0)
    yield c("constant_pad_nd.default", f(4, 2, 6), [-1, 0], 0.0)
    yield c("constant_pad_nd.default", i(5, 4, 6), [0, 1], -100.0)
    for kind in ("reflection", "replication"):
        yield c(f"{kind}_pad1d.default", f(4, 2, 6), [1, 2])
        yield c(f"{kind}_pad2d.default", f(4, 2, 6, 6), [1, 2, 0, 0])
        yield c(f"{kind}_pad1d_backward.default", f(4, 2, 9), f(4, 2, 6), [1, 2])
        yield c(f"{kind}_pad2d_backward.default", f(4, 2, 6, 9), f(4, 2, 6, 6), [1, 2, 0, 0])


def factories() -> Iterator[Case]:
    """Yield what is made out of nothing."""
    kinds: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu"), "pin_memory": False}
    yield c("full.default", [4, 6], 0.25, **kinds)
    yield c("full.default", [], 0.25, **kinds)
    yield c("zeros.default", [4, 6], **kinds)
    yield c("ones.default", [4, 6], dtype=torch.bool)
    yield c("empty.memory_format", [4, 6], **kinds, shapes_only=True)
    yield c("empty_strided.default", [4, 6], [1, 4], **kinds, shapes_only=True)
    yield c("scalar_tensor.default", 2.5, dtype=torch.float64)
    yield c("full_like.default", f(4, 6), float("-inf"), pin_memory=False)
    yield c("zeros_like.default", f(4, 6), memory_format=torch.contiguous_format)
    yield c("ones_like.default", f(4, 6))
    yield c("empty_like.default", f(4, 6), shapes_only=True)
    yield c("new_zeros.default", f(4, 6), [8, 6], dtype=torch.float64, layout=torch.strided)
    yield c("new_zeros.default", f(4, 6), [4, 6])
    yield c("new_ones.default", i(5, 4, 6), [], dtype=torch.bool)
    yield c("new_full.default", f(4, 6), [4], 2.0)
    yield c("new_empty.default", f(4, 6), [4], shapes_only=True)
    yield c("new_empty_strided.default", f(4, 6), [4, 6], [1, 4], shapes_only=True)
    yield c("arange.default", 12, dtype=torch.int64)
    yield c("arange.start", 1, 9, dtype=torch.int32)
    yield c("arange.start_step", 16, -16, -4, dtype=torch.float64)
    yield c("prims.iota.default", 12, start=3, step=2, dtype=torch.int64, device="cpu", requires_grad=False)
    yield c("eye.default", 6, **kinds)
    yield c("eye.m", 4, 6, **kinds)
    yield c("linspace.default", 0.0, 1.0, 8, **kinds)
    yield c("tril_indices.default", 4, 4)
    yield c("triu_indices.default", 4, 4)


def reductions() -> Iterator[Case]:
    """Yield reductions, scans and orderings."""
    for name in ("sum", "mean", "amax", "amin", "max", "min", "prod", "median"):
        yield c(f"{name}.default", f(4, 6))
    for name in ("any", "all"):
        yield c(f"{name}.default", b(4, 6))
        yield c(f"{name}.dim", b(4, 6), 1)
        yield c(f"{name}.dims", b(4, 2, 6), [0, 2], True)
    yield c("sum.dim_IntList", f(4, 2, 6), [0, 1], True)
    yield c("sum.dim_IntList", f(4, 2, 6), [-1])
    yield c("sum.dim_IntList", f(4, 6), None)
    yield c("sum.dim_IntList", i(5, 4, 6), [1])
    yield c("mean.dim", f(4, 2, 6), [-1], True)
    yield c("mean.dim", f(4, 2, 6), [-1, -2])
    yield c("amax.default", f(4, 2, 6), [1], True)
    yield c("amin.default", f(4, 2, 6), [-1])
    yield c("max.dim", f(4, 6), -1, True)
    yield c("min.dim", f(4, 6), 0)
    yield c("argmax.default", f(4, 6), -1)
    yield c("argmin.default", f(4, 6), 0, True)
    yield c("prod.dim_int", f(4, 6), -1)
    for name in ("var", "std", "var_mean", "std_mean"):
        yield c(f"{name}.correction", f(4, 6), [1], correction=1, keepdim=True)
    yield c("var.correction", f(4, 6))
    yield c("logsumexp.default", f(4, 6), [-1])
    yield c("linalg_vector_norm.default", f(4, 2, 6), 2.0, [-1], True)
    yield c("linalg_vector_norm.default", f(4, 6))
    yield c("norm.ScalarOpt_dim", f(4, 6), 2, [1])
    yield c("count_nonzero.default", i(2, 4, 6))
    yield c("count_nonzero.dim_IntList", i(2, 4, 6), [0])
    yield c("median.dim", f(4, 7), 1)
    yield c("kthvalue.default", f(4, 6), 2, 1)
    yield c("mode.default", i(3, 4, 6), 1)
    yield c("cumsum.default", f(4, 6), -1)
    yield c("cumsum.default", b(4, 6), 1)
    yield c("cumprod.default", f(4, 2, 6), 2)
    yield c("cummax.default", f(4, 6), 1)
    yield c("cummin.default", f(4, 6), 1)
    yield c("logcumsumexp.default", f(4, 6), 1)
    yield c("sort.default", f(4, 6))
    yield c("sort.stable", i(4, 4, 6), stable=True, dim=1)
    yield c("argsort.default", f(4, 6), 0)
    yield c("topk.default", f(4, 2, 6), 2, -1, True, False)
    yield c("flip.default", f(4, 2, 6), [-2])
    yield c("roll.default", f(4, 8, 6), [-2], [1])
    yield c("roll.default", f(4, 6), [1])
    yield c("glu.default", f(4, 8))
    yield c("glu_backward.default", f(4, 4), f(4, 8), -1)
    yield c("_fft_c2c.default", torch.complex(f(4, 6), f(4, 6)), [1], 0, True)
    yield c("_fft_r2c.default", f(4, 6), [1], 0, True)
    yield c("_fft_c2r.default", torch.complex(f(4, 4), f(4, 4)), [1], 0, 6)
    yield c("tril.default", f(4, 2, 6, 6), -1)
    yield c("triu.default", b(4, 6, 6))
    yield c("histc.default", p(4, 8), 4, 0, 1)
    yield c("histc.default", p(8), 4)
    yield c("bincount.default", i(4, 8))
    yield c("unique_consecutive.default", torch.arange(8))


def embedding() -> Iterator[Case]:
    """Yield look-ups and their gradients."""
    yield c("embedding.default", f(12, 6), i(12, 4, 2))
    yield c("embedding.default", f(12, 6), i(12, 4, 2), 3)
    for padding, by_frequency in ((-1, False), (3, False), (-1, True)):
        places = i(12, 4, 8)
        yield c("embedding_dense_backward.default", f(4, 8, 6), places, 12, padding, by_frequency)
    table, places, begin = f(12, 6), i(12, 10), torch.tensor([0, 2, 5, 7])
    for mode in range(3):
        yield c("_embedding_bag.default", table, places, begin, False, mode)
        found = torch.ops.aten._embedding_bag(table, places, begin, False, mode)
        yield c("_embedding_bag_backward.default", f(4, 6), places, begin, *found[1:], 12, False, mode, False, None)


def softmax() -> Iterator[Case]:
    """Yield softmax and its gradients."""
    for name in ("_softmax", "_log_softmax"):
        yield c(f"{name}.default", f(4, 2, 6), -1, False)
        yield c(f"{name}.default", f(4, 8), 0, False)
        x = f(4, 2, 6, dtype=torch.float32)
        yield c(f"{name}.default", f(4, 2, 6), 1, False)
        out = torch.softmax(x.double(), -1) if name == "_softmax" else torch.log_softmax(x.double(), -1)
        yield c(f"{name}_backward_data.default", f(4, 2, 6), out, -1, torch.float64)
    scores = f(4, 2, 6)
    scores[1, 1] = float("-inf")
    yield c("_safe_softmax.default", scores, -1)


def losses() -> Iterator[Case]:
    """Yield losses and their gradients."""
    for weight, reduction, shape in itertools.product((None, p(12)), (0, 1, 2), ((8, 12), (4, 12, 2, 6))):
        scores = torch.log_softmax(f(*shape), 1)
        target = i(12, shape[0], *shape[2:])
        target.view(-1)[::3] = -100
        kind = "nll_loss2d" if len(shape) == 4 else "nll_loss"
        args = (scores, target, weight, reduction, -100)
        loss, total = getattr(aten, f"{kind}_forward")(*args)
        grad = f(*loss.shape)
        yield c(f"{kind}_forward.default", *args)
        yield c(f"{kind}_backward.default", grad, *args, total)
        yield c("autopar_ops.cross_entropy_backward.default", grad, *args, total)
    scores, target = torch.log_softmax(f(8, 12), 1), i(4, 8)
    yield c("nll_loss_forward.default", scores, target, None, 1, 2)
    yield c("nll_loss_backward.default", f(), scores, target, None, 1, 2, torch.tensor(5.0, dtype=torch.float64))
    for reduction in (0, 1, 2):
        yield c("mse_loss.default", f(4, 6), f(4, 6), reduction)
        yield c("smooth_l1_loss.default", f(4, 6), f(4, 6), reduction, 1.0)
        yield c("huber_loss.default", f(4, 6), f(4, 6), reduction, 1.0)
        yield c("binary_cross_entropy.default", p(4, 6), p(4, 6), None, reduction)
        yield c("binary_cross_entropy_with_logits.default", f(4, 6), p(4, 6), None, p(6), reduction)
        yield c("soft_margin_loss.default", f(4, 6), f(4, 6).sign(), reduction)
        grad = f(4, 6) if reduction == 0 else f()
        yield c("soft_margin_loss_backward.default", grad, f(4, 6), f(4, 6).sign(), reduction)
        yield c("mse_loss_backward.default", grad, f(4, 6), f(4, 6), reduction)
        yield c("smooth_l1_loss_backward.default", grad, f(4, 6), f(4, 6), reduction, 1.0)
        yield c("huber_loss_backward.default", grad, f(4, 6), f(4, 6), reduction, 1.0)
        yield c("binary_cross_entropy_backward.default", grad, p(4, 6), p(4, 6), p(4, 6), reduction)
    for reduction, weight in itertools.product((0, 1, 2), (None, p(6))):
        args = (f(4, 6), i(6, 4), 1, 1.0, weight, reduction)
        yield c("multi_margin_loss.default", *args)
        yield c("multi_margin_loss_backward.default", f(4) if reduction == 0 else f(), *args)
        labels = torch.tensor([[1, 3, -1, 0, 0, 0], [0, -1, 2, 2, 2, 2], [5, 4, 3, -1, 0, 0], [2, -1, 0, 0, 0, 0]])
        found, chosen = aten.multilabel_margin_loss_forward(args[0], labels, reduction)
        yield c("multilabel_margin_loss_forward.default", args[0], labels, reduction)
        yield c("multilabel_margin_loss_backward.default", f(*found.shape), args[0], labels, reduction, chosen)
    yield c("multi_margin_loss.default", f(6), torch.tensor(2))
    yield c("multi_margin_loss_backward.default", f(), f(6), torch.tensor([2]), 1, 1.0)


def attention() -> Iterator[Case]:
    """Yield fused attention on CPU and its gradients."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for causal, mask in ((False, None), (True, None), (False, f(4, 1, 6, 8)), (False, f(1, 4, 6, 8)), (False, f(6, 8))):
        q, k, v = f(4, 4, 6, 8), f(4, 4, 8, 8), f(4, 4, 8, 8)
        out, sums = forward(q, k, v, 0.0, causal, attn_mask=mask)
        options = {"attn_mask": mask} if mask is not None else {"scale": 0.5}
        if mask is None:
            out, sums = forward(q, k, v, 0.0, causal, scale=0.5)
        yield c(f"{name}.default", q, k, v, 0.0, causal, **options)
        yield c(f"{name}_backward.default", f(4, 4, 6, 8), q, k, v, out, sums, 0.0, causal, **options)
    grouped, k, v = f(4, 8, 6, 8), f(4, 2, 6, 8), f(4, 2, 6, 8)
    out, sums = forward(grouped, k, v, 0.0, True)
    yield c(f"{name}.default", grouped, k, v, 0.0, True)
    yield c(f"{name}_backward.default", f(4, 8, 6, 8), grouped, k, v, out, sums, 0.0, True)
    in_blocks = "autopar_ops._scaled_dot_product_block_attention"
    for heads, causal, mask in (
        (4, False, f(6, 6)),
        (4, False, f(4, 1, 6, 6)),
        (2, False, f(4, 6, 6)),
        (2, True, None),
    ):
        q, k, v = f(4, 4, 6, 8), f(4, heads, 6, 8), f(4, heads, 6, 8)
        made = BLOCK_ATTENTION(q, k, v, 0.0, causal, mask)
        yield c(f"{in_blocks}.default", q, k, v, 0.0, causal, mask)
        trains = int(mask is not None)
        yield c(f"{in_blocks}_backward.default", f(4, 4, 6, 8), q, k, v, *made, 0.0, causal, mask, trains)
    yield c("_scaled_dot_product_attention_math.default", f(4, 2, 6, 8), f(4, 2, 6, 8), f(4, 2, 6, 8))


def convolutions() -> Iterator[Case]:
    """Yield convolutions of one and two dimensions, grouped, depthwise and transposed, with and without bias."""
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    strided = ([2], [1], [1], False, [0], 2)
    depthwise = ([1], [3], [1], False, [0], 8)
    transposed = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    grouped_transposed = ([2, 2], [0, 0], [1, 1], True, [0, 0], 2)
    calls = (
        (f(4, 6, 4, 4), f(8, 6, 3, 3), f(8), plain),
        (f(4, 6, 4, 4), f(8, 6, 3, 3), None, plain),
        (f(4, 8, 8), f(12, 4, 3), f(12), strided),
        (f(4, 8, 8), f(8, 1, 4), f(8), depthwise),
        (f(4, 6, 4, 4), f(6, 8, 2, 2), f(8), transposed),
        (f(4, 8, 4, 4), f(8, 4, 2, 2), f(8), grouped_transposed),
    )
    for data, weight, bias, options in calls:
        out = aten.convolution(data, weight, bias, *options)
        yield c("convolution.default", data, weight, bias, *options)
        sizes = None if bias is None else list(bias.shape)
        for mask in ([True, True, bias is not None], [False, True, bias is not None]):
            yield c("convolution_backward.default", f(*out.shape), data, weight, sizes, *options, mask)


def pooling() -> Iterator[Case]:
    """Yield pooling and resampling."""
    x, d = f(4, 2, 8, 8), f(4, 2, 8)
    yield c("max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1])
    out, places = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    args = ([3, 3], [2, 2], [1, 1], [1, 1], False, places)
    yield c("max_pool2d_with_indices_backward.default", f(*out.shape), x, *args)
    yield c("avg_pool2d.default", x, [2, 2], [2, 2])
    yield c("avg_pool2d_backward.default", f(4, 2, 4, 4), x, [2, 2], [2, 2], [0, 0], False, True, None)
    yield c("_adaptive_avg_pool2d.default", x, [3, 3])
    yield c("_adaptive_avg_pool2d_backward.default", f(4, 2, 3, 3), x)
    yield c("adaptive_max_pool2d.default", x, [2, 2])
    out, places = aten.adaptive_max_pool2d(x, [2, 2])
    yield c("adaptive_max_pool2d_backward.default", f(*out.shape), x, places)
    yield c("adaptive_avg_pool1d.default", d, [2])
    yield c("avg_pool1d.default", d, [2])
    yield c("max_pool1d.default", d, [2])
    for name in ("upsample_nearest1d", "_upsample_nearest_exact1d"):
        yield c(f"{name}.default", d, [16])
        yield c(f"{name}_backward.default", f(4, 2, 16), [16], [4, 2, 8])
    yield c("upsample_linear1d.default", d, [16], False)
    yield c("upsample_linear1d_backward.default", f(4, 2, 16), [16], [4, 2, 8], False)
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        yield c(f"{name}.default", x, [16, 16])
        yield c(f"{name}_backward.default", f(4, 2, 16, 16), [16, 16], [4, 2, 8, 8])
    for name in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        yield c(f"{name}.default", x, [16, 16], False)
        yield c(f"{name}_backward.default", f(4, 2, 16, 16), [16, 16], [4, 2, 8, 8], False)
    yield c("im2col.default", f(4, 2, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2])
    yield c("col2im.default", f(4, 8, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2])
    v = f(2, 2, 4, 4, 4)
    yield c("avg_pool3d.default", v, [2, 2, 2], [2, 2, 2])
    yield c("avg_pool3d_backward.default", f(2, 2, 2, 2, 2), v, [2] * 3, [2] * 3, [0] * 3, False, True, None)
    yield c("_adaptive_avg_pool3d.default", v, [2, 2, 2])
    yield c("_adaptive_avg_pool3d_backward.default", f(2, 2, 2, 2, 2), v)
    yield c("max_pool3d_with_indices.default", v, [2] * 3, [2] * 3)
    out, places = aten.max_pool3d_with_indices(v, [2] * 3, [2] * 3)
    yield c(
        "max_pool3d_with_indices_backward.default", f(*out.shape), v, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, places
    )
    yield c("upsample_nearest3d.default", v, [8, 8, 8])
    yield c("upsample_nearest3d_backward.default", f(2, 2, 8, 8, 8), [8] * 3, [2, 2, 4, 4, 4])
    yield c("upsample_trilinear3d.default", v, [8, 8, 8], False)
    yield c("upsample_trilinear3d_backward.default", f(2, 2, 8, 8, 8), [8] * 3, [2, 2, 4, 4, 4], False)


def norms() -> Iterator[Case]:
    """Yield normalisation and its gradients."""
    x, w, bias = f(4, 2, 6), f(6), f(6)
    yield c("native_layer_norm.default", x, [6], w, bias, 1e-5)
    yield c("native_layer_norm.default", x, [2, 6], None, None, 1e-5)
    _, mean, rstd = aten.native_layer_norm(x, [6], w, bias, 1e-5)
    yield c("native_layer_norm_backward.default", f(4, 2, 6), x, [6], mean, rstd, w, bias, [True, True, True])
    yield c("native_layer_norm_backward.default", f(4, 2, 6), x, [6], mean, rstd, w, None, [True, True, False])
    yield c("_fused_rms_norm.default", x, [6], w, 1e-5)
    x, w, bias = f(4, 8, 2, 2), f(8), f(8)
    yield c("native_group_norm.default", x, w, bias, 4, 8, 4, 4, 1e-5)
    _, mean, rstd = aten.native_group_norm(x, w, bias, 4, 8, 4, 4, 1e-5)
    yield c("native_group_norm_backward.default", f(4, 8, 2, 2), x, mean, rstd, w, 4, 8, 4, 4, [True, True, True])
    for training in (True, False):
        yield c("_native_batch_norm_legit_functional.default", x, w, bias, f(8), p(8), training, 0.1, 1e-5)
    yield c("_native_batch_norm_legit_no_training.default", x, w, bias, f(8), p(8), 0.1, 1e-5)
    yield c("_native_batch_norm_legit.no_stats", x, w, None, True, 0.1, 1e-5)
    running = f(8), p(8)
    stats = aten._native_batch_norm_legit_functional(x, w, bias, *running, True, 0.1, 1e-5)[1:3]
    for mask in ([True, True, True], [False, True, True]):
        yield c("native_batch_norm_backward.default", f(4, 8, 2, 2), x, w, *running, *stats, True, 1e-5, mask)
    yield c("native_batch_norm_backward.default", f(4, 8, 2, 2), x, None, None, None, *stats, True, 1e-5, [True] * 3)
    empty = torch.empty(0, dtype=torch.float64)
    args = (w, *running, empty, empty, False, 1e-5, [True] * 3)
    yield c("native_batch_norm_backward.default", f(4, 8, 2, 2), x, *args)


def weight_norms() -> Iterator[Case]:
    """Yield weights as direction and length."""
    for dim, shape in ((0, (8, 1, 1)), (2, (1, 1, 4))):
        v, g = f(8, 6, 4), p(*shape)
        yield c("_weight_norm_interface.default", v, g, dim)
        _, norms = aten._weight_norm_interface(v, g, dim)
        yield c("_weight_norm_interface_backward.default", f(8, 6, 4), v, g, norms, dim)


def indexing() -> Iterator[Case]:
    """Yield reads and writes at places."""
    for name in ("index", "_unsafe_index"):
        yield c(f"{name}.Tensor", f(12, 6), [i(12, 8)])
        yield c(f"{name}.Tensor", f(12, 6), [i(12, 4, 2) - 12])
        yield c(f"{name}.Tensor", f(4, 6, 8), [None, i(6, 4), None])
        yield c(f"{name}.Tensor", f(4, 2, 8, 8), [None, None, i(8, 4, 1), i(8, 4)])
        yield c(f"{name}.Tensor", f(4, 6, 8), [i(4, 2), None, i(8, 2)])
        yield c(f"{name}.Tensor", i(9, 4, 8), [i(4, 4, 1), i(8, 1, 8)])
    for name in ("index_put", "_unsafe_index_put"):
        yield c(f"{name}.default", f(12, 6), [i(12, 8)], f(8, 6), True)
        yield c(f"{name}.default", f(12, 6), [torch.randperm(12)[:8]], f(8, 6))
        yield c(f"{name}.default", i(9, 12), [torch.randperm(12)], torch.arange(12))
        yield c(f"{name}.default", f(4, 2, 8, 8), [None, None, i(8, 4, 1), i(8, 4)], f(4, 2, 4, 4), True)
        yield c(f"{name}.default", f(4, 6, 8), [i(4, 4), i(6, 4)], f(4, 8), True)
        yield c(f"{name}.default", f(4, 6, 8), [i(4, 2), None, i(8, 2)], f(2, 6), True)
    yield c("gather.default", f(4, 8), 1, i(8, 4, 2))
    yield c("gather.default", f(4, 8, 2), -2, i(8, 2, 4, 2))
    yield c("gather.default", i(9, 1, 8), 1, i(8, 1, 4))
    places = torch.stack([torch.randperm(8)[:4] for _ in range(4)])
    yield c("scatter.src", f(4, 8), 1, places, f(4, 4))
    yield c("scatter.src", f(4, 8), 1, places, f(6, 6))
    yield c("scatter.value", f(4, 8), -1, places, 1)
    yield c("scatter_add.default", f(4, 8), 1, i(8, 4, 4), f(4, 4))
    yield c("scatter_add.default", f(8, 6), 0, i(8, 4, 6), f(4, 6))
    yield c("scatter_reduce.two", f(4, 8), 1, i(8, 4, 4), f(4, 4), "amax")
    yield c("index_select.default", f(4, 8, 2), 1, i(8, 6))
    yield c("index_add.default", f(4, 8, 2), 1, i(8, 6), f(4, 6, 2), alpha=2)
    yield c("index_copy.default", f(4, 8), 1, torch.randperm(8)[:4], f(4, 4))
    yield c("masked_scatter.default", f(4, 6), b(4, 6), f(24))


def experts() -> Iterator[Case]:
    """Yield products of sorted tokens with their experts' weights."""
    import transformers.integrations.moe  # noqa: F401 - registers its operators

    for ends in ([3, 5, 9, 16], [0, 0, 16, 16], [4, 8, 12, 16]):
        offs = torch.tensor(ends, dtype=torch.int32)
        x, w = f(16, 6), f(4, 6, 8)
        yield c("transformers.grouped_mm_fallback.default", x, w, offs)
        yield c("transformers.grouped_mm_fallback_backward.default", x, w, offs, f(16, 8))
        x, w = f(16, 16, dtype=torch.float32), f(4, 16, 16, dtype=torch.float32)
        yield c("_grouped_mm.default", x, w, offs)
        yield c("_grouped_mm.default", x.t().contiguous(), f(16, 16, dtype=torch.float32), offs)
    yield c("_grouped_mm.default", f(4, 8, 16, dtype=torch.float32), f(4, 16, 8, dtype=torch.float32))


def registry() -> Iterator[Case]:
    """Yield operators that DTensor's registry alone has rules for."""
    yield c("_linalg_det.default", f(4, 3, 3))
    yield c("linalg_matrix_exp.default", f(4, 3, 3))
    yield c("linalg_cross.default", f(4, 3), f(4, 3))
    yield c("nansum.default", f(4, 6), [1])
    yield c("index_fill.int_Scalar", f(4, 6), 1, i(6, 2), 2.0)
    yield c("adaptive_max_pool1d.default", f(4, 2, 8), [2])


FAMILIES = (
    unary, binary, backward_of_elements, matmul, views, slices, factories, reductions, embedding, softmax, losses,
    attention, convolutions, pooling, norms, weight_norms, indexing, experts, registry, scans, *MORE,
)  # fmt: skip


def all_calls() -> list[Case]:
    """Return every call, the same ones each time."""
    torch.manual_seed(0)
    return [case for family in FAMILIES for case in family()]
