"""Scans over a sequence written step by step, under the names and arguments that libraries give their kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float = 1.0
) -> tuple[Tensor, None]:
    """Return what a state that forgets and corrects itself answers to each query, and no last state."""
    times = v.shape[2] // k.shape[2]
    q, k = (each.repeat_interleave(times, dim=2) for each in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    out = []
    for i in range(v.shape[1]):
        state = state * g[:, i].exp()[..., None, None]
        missing = v[:, i] - torch.einsum("bhd,bhde->bhe", k[:, i], state)
        state = state + torch.einsum("bhd,bhe->bhde", k[:, i], missing * beta[:, i][..., None])
        out.append(torch.einsum("bhd,bhde->bhe", q[:, i] * scale, state))
    return torch.stack(out, dim=1), None


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
    """Return the same of a state that forgets each feature of the keys at a pace of its own."""
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    out = []
    for i in range(v.shape[1]):
        state = state * g[:, i].exp()[..., None]
        missing = v[:, i] - torch.einsum("bhd,bhde->bhe", k[:, i], state)
        state = state + torch.einsum("bhd,bhe->bhde", k[:, i], missing * beta[:, i][..., None])
        out.append(torch.einsum("bhd,bhde->bhe", q[:, i] * scale, state))
    return torch.stack(out, dim=1), None


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Return a convolution over the last steps of each feature."""
    steps = x.shape[2]
    made = functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[:, :, :steps]
    return functional.silu(made) if activation else made


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,  # noqa: N803  as mamba_ssm names it
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what states of every feature, each with its own pace, add up to at every step."""
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = functional.softplus(delta)
    state = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    out = []
    for i in range(u.shape[2]):
        fed = (delta[:, :, i] * u[:, :, i])[..., None] * B[:, None, :, i]
        state = state * (delta[:, :, i, None] * A).exp() + fed
        out.append((state * C[:, None, :, i]).sum(2))
    made = torch.stack(out, dim=2)
    if D is not None:
        made = made + u * D[:, None]
    if z is not None:
        made = made * functional.silu(z)
    return (made, state) if return_last_state else made


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Return what states of every head add up to at every step; `chunk_size` is for kernels."""
    if not isinstance(dt_limit, tuple):
        raise TypeError("a kernel compares its limits with a tuple")
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    times = x.shape[2] // B.shape[2]
    B, C = (each.repeat_interleave(times, dim=2) for each in (B, C))  # noqa: N806
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    out = []
    for i in range(x.shape[1]):
        fed = torch.einsum("bhp,bhn->bhpn", x[:, i] * dt[:, i][..., None], B[:, i])
        state = state * (dt[:, i] * A).exp()[..., None, None] + fed
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
    made = torch.stack(out, dim=1)
    return made if D is None else made + x * (D if D.dim() > 1 else D[:, None])
