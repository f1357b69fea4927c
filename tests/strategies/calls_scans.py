"""Representative calls of scans over a sequence, of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autopar.ir.scan import ScanCall
from tests.strategies.make import c, f, p
from tests.strategies.one_op import Case


def scans() -> Iterator[Case]:
    """Yield scans with fewer heads of keys than of values and with as many, one group and several, and gradients."""
    for heads in (2, 4):
        read = {
            "q": f(4, 6, heads, 5),
            "k": f(4, 6, heads, 5),
            "v": f(4, 6, 4, 2),
            "g": -p(4, 6, 4),
            "beta": p(4, 6, 4),
        }
        yield from _scan("gated_delta_rule", "chunk_gated_delta_rule", read, f(4, 6, 4, 2))
    read = {"q": f(4, 6, 4, 5), "k": f(4, 6, 4, 5), "v": f(4, 6, 4, 2), "g": -p(4, 6, 4, 5), "beta": p(4, 6, 4)}
    yield from _scan("kimi_delta_rule", "chunk_kda", read, f(4, 6, 4, 2))
    convolved = {"x": f(4, 4, 6), "weight": f(4, 3), "bias": f(4)}
    yield from _scan("causal_convolution", "causal_conv1d_fn", convolved, f(4, 4, 6), activation="silu")
    flows = {"u": f(4, 4, 6), "delta": f(4, 4, 6), "A": -p(4, 5), "B": f(4, 5, 6), "C": f(4, 5, 6)}
    beside = {"D": f(4), "z": f(4, 4, 6), "delta_bias": f(4)}
    yield from _scan("selective_scan", "selective_scan_fn", flows, f(4, 4, 6))
    yield from _scan("selective_scan", "selective_scan_fn", flows | beside, f(4, 4, 6), delta_softplus=True)
    for groups, skipped in ((1, f(4)), (2, f(4, 2))):
        of_groups = {"B": f(4, 6, groups, 5), "C": f(4, 6, groups, 5)}
        read = {"x": f(4, 6, 4, 2), "dt": p(4, 6, 4), "A": -p(4), **of_groups, "D": skipped, "dt_bias": f(4)}
        yield from _scan("chunk_scan", "mamba_chunk_scan_combined", read, f(4, 6, 4, 2), chunk_size=2)


def _scan(
    kind: str, name: str, read: Mapping[str, torch.Tensor], grad: torch.Tensor, **settings: Any
) -> Iterator[Case]:
    """Yield a call of a scan and its gradient."""
    ranks = tuple(each.dim() for each in read.values())
    call = ScanCall(kind, f"tests.support.scans:{name}", tuple(read), ranks, (), settings, "float64").text
    yield c("autopar_ops.scan.default", list(read.values()), call)
    yield c("autopar_ops.scan_backward.default", grad, list(read.values()), call)
