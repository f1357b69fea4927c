"""Representative calls of operators on planes and volumes, on matrices of each sample, of look-ups and quantisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.own_operators import ctc_loss
from tests.strategies.make import c, f, i, p
from tests.strategies.one_op import Case

aten = torch.ops.aten


def grids() -> Iterator[Case]:
    """Yield samplings at places that each sample has of its own."""
    x, grid = f(4, 2, 6, 6), p(4, 3, 3, 2)
    yield c("grid_sampler_2d.default", x, grid, 0, 0, False)
    for mask in ([True, True], [False, True]):
        yield c("grid_sampler_2d_backward.default", f(4, 2, 3, 3), x, grid, 0, 0, False, mask)
    x, grid = f(4, 2, 4, 4, 4), p(4, 2, 3, 3, 3)
    yield c("grid_sampler_3d.default", x, grid, 0, 1, True)
    yield c("grid_sampler_3d_backward.default", f(4, 2, 2, 3, 3), x, grid, 0, 1, True, [True, True])
    yield c("affine_grid_generator.default", f(4, 2, 3), [4, 3, 6, 8], False)
    yield c("affine_grid_generator.default", f(4, 3, 4), [4, 1, 2, 6, 8], True)


def planes() -> Iterator[Case]:
    """Yield rearrangements of channels, and volumes that are padded, pooled and resampled."""
    yield c("channel_shuffle.default", f(4, 8, 6, 2), 2)
    v = f(2, 2, 4, 4, 4)
    for name in ("reflection", "replication"):
        yield c(f"{name}_pad3d.default", v, [1, 1, 0, 0, 2, 1])
        yield c(f"{name}_pad3d_backward.default", f(2, 2, 7, 4, 6), v, [1, 1, 0, 0, 2, 1])
    yield c("adaptive_max_pool3d.default", v, [2, 2, 2])
    out, places = aten.adaptive_max_pool3d(v, [2, 2, 2])
    yield c("adaptive_max_pool3d_backward.default", f(*out.shape), v, places)
    for dims, x in ((2, f(4, 2, 6, 6)), (3, v)):
        window, size = [2] * dims, [2] * dims
        out, places = getattr(aten, f"fractional_max_pool{dims}d")(x, window, size, p(*x.shape[:2], dims))
        yield c(f"fractional_max_pool{dims}d_backward.default", f(*out.shape), x, window, size, places)
    yield c("rot90.default", f(4, 6, 8), 1, [1, 2])
    yield c("_standard_gamma_grad.default", p(4, 6), p(4, 6))
    yield c("_dirichlet_grad.default", p(4, 6), p(4, 6), 2 + p(4, 6))
    yield c("rrelu_with_noise_backward.default", f(4, 6), f(4, 6), p(4, 6), 0.1, 0.3, True, False)
    yield c("_upsample_nearest_exact3d.default", v, [8, 8, 8])
    yield c("_upsample_nearest_exact3d_backward.default", f(2, 2, 8, 8, 8), [8] * 3, [2, 2, 4, 4, 4])


def matrices() -> Iterator[Case]:
    """Yield operators on whole matrices, of which each sample may have its own, and sums of products."""
    for x in (f(4, 4), f(4, 3, 3), f(4, 2, 3, 3)):
        yield c("linalg_inv_ex.default", x)
        yield c("linalg_qr.default", x)
    yield c("linalg_qr.default", f(4, 3, 3), "r")
    for x in (f(4, 3, 3), f(4, 2, 3, 5)):
        yield c("_linalg_svd.default", x)
        yield c("_linalg_svd.default", x, compute_uv=False)
        yield c("diag_embed.default", x)
    yield c("diag_embed.default", f(4, 6), 1, 0, 2)
    for with_vectors in (True, False):
        yield c("_linalg_eigh.default", f(4, 3, 3), "L", with_vectors)
    for left in (True, False):
        triangle = f(4, 4, 4).tril() + 4 * torch.eye(4)
        yield c("linalg_solve_triangular.default", triangle, f(4, 4, 4), upper=False, left=left)
        yield c("linalg_solve_triangular.default", triangle[0], f(2, 4, 4), upper=False, left=left)
        systems = f(4, 4, 4) + 4 * torch.eye(4)
        factors, pivots, _ = torch.linalg.lu_factor_ex(systems)
        for at in (slice(None), 0):
            yield c("linalg_lu_solve.default", factors[at], pivots[at], f(4, 4, 4), left=left)
            yield c("_linalg_solve_ex.default", systems[at], f(4, 4, 4), left=left)
    yield c("linalg_lu_solve.default", factors[0], pivots[0], f(4, 8), adjoint=True)
    yield c("_linalg_solve_ex.default", systems[0], f(4, 8))
    yield c("_linalg_solve_ex.default", systems, f(4, 4))
    yield c("_linalg_solve_ex.default", systems[0], f(4))
    yield c("cholesky_solve.default", f(4, 8), triangle[0])
    yield c("cholesky_solve.default", f(4, 4, 2), triangle, True)
    yield c("addmv.default", f(4), f(4, 8), f(8), beta=0.5)
    yield c("addr.default", f(4, 6), f(4), f(6), alpha=2)
    yield c("addbmm.default", f(6, 8), f(4, 6, 2), f(4, 2, 8), beta=2)


def look_ups() -> Iterator[Case]:
    """Yield values looked up in whole sequences and sets."""
    ordered = torch.arange(8.0, dtype=torch.float64)
    yield c("searchsorted.Tensor", ordered, f(4) * 8)
    yield c("searchsorted.Tensor", ordered, f(4, 6) * 8, right=True)
    yield c("searchsorted.Tensor", f(4, 8).sort(-1).values, f(4, 6))
    rows = f(4, 6)
    yield c("searchsorted.Tensor", rows, f(4, 6), sorter=rows.argsort(-1))
    yield c("bucketize.Tensor", f(4, 6) * 8, ordered)
    yield c("isin.Tensor_Tensor", i(8, 4, 6), i(8, 4))
    yield c("isin.Tensor_Scalar", i(8, 4, 6), 3)
    yield c("zero.default", f(4, 6))


def wholes() -> Iterator[Case]:
    """Yield operators that mix all places of a tensor."""
    x = f(4, 6)
    yield c("_pdist_forward.default", x, 2.0)
    yield c("_pdist_backward.default", f(6), x, 2.0, torch.pdist(x))
    yield c("trace.default", f(4, 4))
    yield c("block_diag.default", [f(4, 6), f(2, 2), f(4)])
    yield c("renorm.default", 4 * f(4, 6, 2), 2, 1, 1.0)
    yield c("renorm.default", 4 * f(4, 6), 1, -2, 1.0)
    yield c("take.default", f(4, 6), i(24, 8, 2))
    yield c("put.default", f(4, 6), torch.randperm(24)[:8].view(4, 2), f(4, 2))
    yield c("put.default", f(4, 6), i(24, 8), f(8), True)
    for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
        yield c(f"{kind}_window.default", 8)
        yield c(f"{kind}_window.periodic", 8, False)


def alignments() -> Iterator[Case]:
    """Yield the loss of alignments, whose targets are padded."""
    scores, lengths = f(8, 4, 6).log_softmax(-1), torch.tensor([1, 2, 1, 2])
    given = (scores, 1 + i(5, 4, 3), torch.tensor([8, 7, 8, 6]), lengths)
    yield c("autopar_ops.ctc_loss.default", *given, 0, False)
    made = ctc_loss(*given, 0, False)
    yield c("autopar_ops.ctc_loss_backward.default", f(4), *given, *made, 0, False)


def quantisation() -> Iterator[Case]:
    """Yield fake quantisation, by scales that are numbers, one for all, or one for each channel."""
    x, scale, zero = f(4, 6, 2, dtype=torch.float32), torch.full((6,), 0.1), torch.zeros(6)
    one = torch.full((1,), 0.1), torch.zeros(1)
    gradient = f(4, 6, 2, dtype=torch.float32)
    yield c("fake_quantize_per_tensor_affine_cachemask.default", x, 0.1, 0, -8, 7)
    yield c(
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
        x, one[0], one[1].int(), torch.ones(1, dtype=torch.long), -8, 7,
    )  # fmt: skip
    yield c("fake_quantize_per_channel_affine_cachemask.default", x, scale, zero.int(), 1, -8, 7)
    name = "_fake_quantize_learnable_per_tensor_affine"
    yield c(f"{name}.default", x, *one, -8, 7)
    yield c(f"{name}_backward.default", gradient, x, *one, -8, 7)
    name = "_fake_quantize_learnable_per_channel_affine"
    yield c(f"{name}.default", x, scale, zero, 1, -8, 7)
    yield c(f"{name}_backward.default", gradient, x, scale, zero, 1, -8, 7)


def complex_numbers() -> Iterator[Case]:
    """Yield linear operators on complex numbers, which pass terms of a sum on."""
    x = torch.complex(f(4, 6), f(4, 6))
    yield c("complex.default", f(4, 6), f(4, 6))
    yield c("new_zeros.default", x, [4, 8])
    yield c("zeros_like.default", x)
    yield c("sum.dim_IntList", x, [1])
    yield c("cumsum.default", x, 1)
    yield c("tril.default", x)
    yield c("slice_scatter.default", torch.complex(f(4, 8), f(4, 8)), x, 1, 0, 6)


def recurrent() -> Iterator[Case]:
    """Yield layers of recurrent networks in both directions, steps or samples first, with and without biases."""
    for kind, gates, biased, batch_first in (("lstm", 4, True, False), ("gru", 3, False, True)):
        x = f(4, 3, 5) if batch_first else f(3, 4, 5)
        states = [f(2, 4, 6) for _ in range(2 if kind == "lstm" else 1)]
        sizes = [(6 * gates, 5), (6 * gates, 6), *[(6 * gates,)] * (2 if biased else 0)] * 2
        weights = [f(*size) for size in sizes]
        name = "lstm" if kind == "lstm" else "rnn"
        how = (kind, biased, batch_first)
        yield c(f"autopar_ops.{name}_layer.default", x, states, weights, *how)
        grads = (f(*x.shape[:2], 12), *(f(2, 4, 6) for _ in states))
        yield c(f"autopar_ops.{name}_layer_backward.default", *grads, x, states, weights, *how)


MORE = (grids, planes, matrices, look_ups, wholes, recurrent, alignments, quantisation, complex_numbers)
