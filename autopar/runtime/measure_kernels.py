"""Seconds of kernels on this rank's device, while as many ranks of the machine run the same as it has cores.

What is timed and in which sizes is said here; what the seconds mean to the cost model is not known here
(`cost_models.calibration_fit`). Operands are made before, results go where they went before, except where new memory
is what is timed. Products take turns with operands and results that no cache holds together: a step reads each weight
once and comes back to it when it has read all others. On one core of an AMD EPYC with 32 MiB of L3, products of 128
rows with weights of 512 x 512 and 512 x 2048 take 3 to 38 % longer so than with operands at hand, median 17 %.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.measure_effort import THOROUGH, Effort

Sample = dict[str, Any]
"""A kernel, its sizes, and `seconds`: one figure a run."""

_WARM_UP = 2

_MIB = 2**20
_UNCACHED_BYTES = 96 * _MIB
"""Of all operands that take turns: thrice the last cache that a rank has on common machines."""

_MOST_BYTES = 2**30
"""Of tensors that take turns in traffic to memory, where a machine's last cache is larger than that of common ones."""

_STREAMED_BYTES = 4 * _MIB
"""Tensors of elementwise operators from this size on take turns: in a step, others have passed since they were made."""

_MATMULS = (
    (1, 16, 512, 512), (8, 64, 64, 64), (1, 128, 512, 64), (1, 256, 256, 256), (1, 64, 1024, 1024),
    (32, 128, 128, 64), (1, 2048, 256, 256), (1, 64, 2048, 2048), (1, 1024, 1024, 256), (1, 512, 4096, 512),
    (1, 1024, 1024, 1024), (1, 512, 8192, 256), (1, 1024, 1536, 1536), (1, 2048, 2048, 2048), (1, 4096, 4096, 4096),
    (1, 8192, 8192, 8192),
)  # fmt: skip
"""Batch, m, n, k: layers narrow and wide, few and many rows, heads of attention; by FLOPs."""

_GPU_MATMULS = (
    (128, 1024, 1024, 64), (1, 16384, 768, 768), (1, 16384, 3072, 768), (1, 4096, 4096, 16384), (1, 16384, 1024, 16384),
    (1, 8192, 14336, 4096), (1, 16384, 50304, 768),
)  # fmt: skip
"""Further ones that make a GPU work for long enough, by FLOPs: layers of language models, and their last."""

_GPU_RUN_S, _MOST_CALLS = 2e-3, 500
"""How long a run on a GPU lasts at least, which the host waits for once, and of how many calls it is at most."""

_CONVOLUTIONS = (
    (8, 96, 96, 14, 3, 1, 96), (4, 64, 64, 14, 3, 1, 1), (8, 32, 32, 32, 3, 1, 1), (8, 256, 64, 28, 1, 1, 1),
    (8, 64, 128, 28, 3, 2, 1), (8, 3, 64, 112, 7, 2, 1), (8, 128, 128, 14, 3, 1, 1), (8, 64, 256, 56, 1, 1, 1),
    (8, 256, 256, 14, 3, 1, 1), (8, 64, 64, 56, 3, 1, 1), (8, 512, 512, 14, 3, 1, 1), (64, 256, 256, 28, 3, 1, 1),
    (256, 64, 64, 56, 3, 1, 1), (256, 512, 512, 14, 3, 1, 1),
)  # fmt: skip
"""Batch, channels in and out, pixels and window a side, stride, groups: layers of residual networks, by FLOPs."""

_CHANNELS = 8
"""Images have fewer, and no gradient."""

_ATTENTIONS = (
    (16, 4, 16, 64),
    (8, 8, 32, 64),
    (8, 4, 64, 64),
    (2, 4, 128, 64),
    (4, 8, 256, 64),
    (4, 16, 1024, 64),
    (4, 16, 4096, 128),
)
"""Batch, heads, positions, width of a head."""

_GPU_ATTENTIONS = ((64, 16, 256, 64), (32, 16, 512, 64), (8, 32, 2048, 64), (4, 32, 2048, 128))
"""Further ones that make a GPU work for long enough."""


def measure_kernels(device: torch.device, effort: Effort = THOROUGH) -> list[Sample]:
    """Return timed kernels: launch, elementwise traffic, new memory, exp, matmuls by dtype, convolutions, attention.

    Matmuls, convolutions and attention that would take longer than `effort` allows, at the rate of those before, are
    left out, and so is new memory of more bytes than the first that does.
    """
    clock = Clock(device, effort)
    found = [_launch(clock), _exp(clock), *_traffic(clock)]
    if device.type == "cpu":
        found += _fresh(clock)
    # The sizes of half rate are fitted to the first type: on GPUs to one that matrix units compute.
    for dtype in (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32):
        found += _matmuls(clock, dtype)
        found += _convolutions(clock, dtype)
        found += _attentions(clock, dtype)
    if device.type == "cuda":
        with _tf32():
            found += [{**each, "dtype": "tf32"} for each in _matmuls(clock, torch.float32)]
    return found


@contextmanager
def _tf32() -> Iterator[None]:
    """Let products of float32 round their operands, as users may ask torch for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, effort: Effort = THOROUGH) -> None:
        self.device, self.effort = device, effort

    @property
    def on_gpu(self) -> bool:
        """Return whether the device works while the host goes on."""
        return self.device.type == "cuda"

    def seconds(self, work: Callable[[], object], calls: int = 1, runs: int | None = None) -> list[float]:
        """Return seconds a call in each run of `calls` calls, after warm-up; `runs`: as `effort` has it."""
        for _ in range(_WARM_UP):
            work()
        if self.on_gpu:
            calls = max(calls, min(_MOST_CALLS, math.ceil(_GPU_RUN_S / self._run_s(work, calls))))
        return [self._run_s(work, calls) for _ in range(runs or self.effort.runs)]

    def _run_s(self, work: Callable[[], object], calls: int) -> float:
        """Return the seconds a call of one run."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return (time.perf_counter() - start) / calls

    def wait(self) -> None:
        """Return when the device has done all it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return random numbers on the device."""
        return torch.randn(sizes, device=self.device, dtype=dtype)


def _launch(clock: Clock) -> Sample:
    a = clock.random(16)
    return {"kernel": "launch", "seconds": clock.seconds(lambda: torch.add(a, a), calls=200)}


def _exp(clock: Clock) -> Sample:
    a, out = clock.random(_MIB), clock.random(_MIB)
    return {"kernel": "exp", "elements": _MIB, "seconds": clock.seconds(lambda: torch.exp(a, out=out))}


def _traffic(clock: Clock) -> Iterator[Sample]:
    largest = 1024 if clock.on_gpu else 64
    size = 1
    while size <= 16 * largest:  # of each of three tensors, in 1/16 MiB
        first = [clock.random(size * _MIB // 64) for _ in range(3)]
        large = first[0].nbytes >= _STREAMED_BYTES
        turns = itertools.cycle(copies(*first, total=_out_of_cache(clock.device)) if large else [first])

        def add(turns: Iterator[Sequence[Tensor]] = turns) -> None:
            a, b, out = next(turns)
            torch.add(a, b, out=out)

        seconds = clock.seconds(add, max(1, 64 // size))
        yield {"kernel": "elementwise", "bytes": 3 * size * _MIB // 16, "seconds": seconds}
        size *= 4


def _fresh(clock: Clock) -> Iterator[Sample]:
    """Yield the same kernel on new and on old memory: what the system takes for pages, and from which size on."""
    for mebibytes in (4, 8, 16, 24, 32, 48, 64, 128):
        a, out = clock.random(mebibytes * _MIB // 4), clock.random(mebibytes * _MIB // 4)
        old = clock.seconds(lambda a=a, out=out: torch.neg(a, out=out))  # type: ignore[misc]
        new = clock.seconds(lambda a=a: torch.neg(a))  # type: ignore[misc]
        yield {"kernel": "fresh", "bytes": mebibytes * _MIB, "old_s": old, "seconds": new}
        if max(new) > clock.effort.longest_s:
            return


def _matmuls(clock: Clock, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield products as forward and both halves of backward lay them out: a b, a b^T, a^T b."""
    rate = math.inf
    for batch, m, n, k in (*_MATMULS, *(_GPU_MATMULS if clock.on_gpu else ())):
        flops = 2 * batch * m * n * k
        if flops / rate > clock.effort.longest_s:
            return
        slowest = 0.0
        for layout in ("nn", "nt", "tn"):
            a = clock.random(batch, k, m, dtype=dtype).mT if layout == "tn" else clock.random(batch, m, k, dtype=dtype)
            b = clock.random(batch, n, k, dtype=dtype).mT if layout == "nt" else clock.random(batch, k, n, dtype=dtype)
            out = clock.random(batch, m, n, dtype=dtype)
            if batch == 1:
                a, b, out = a[0], b[0], out[0]
            product = torch.mm if batch == 1 else torch.bmm
            turns = itertools.cycle(copies(a, b, out))

            def multiply(turns: Iterator[Sequence[Tensor]] = turns, product: Callable[..., Tensor] = product) -> None:
                a, b, out = next(turns)
                product(a, b, out=out)

            seconds = clock.seconds(multiply, max(1, int(2e8 / flops)), clock.effort.few)
            yield {
                "kernel": "matmul",
                "dtype": str(dtype).removeprefix("torch."),
                "sizes": [batch, m, n, k],
                "layout": layout,
                "seconds": seconds,
            }
            slowest = max(slowest, *seconds)
        rate = flops / slowest


def _convolutions(clock: Clock, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield convolutions and both halves of their backward, each with tensors that no cache holds together."""
    rate = math.inf
    rounds = clock.on_gpu and dtype is torch.float32 and torch.backends.cudnn.allow_tf32
    computed_in = "tf32" if rounds else str(dtype).removeprefix("torch.")
    for batch, inner, outer, side, window, stride, groups in _CONVOLUTIONS:
        settings: Any = ([stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], groups)
        image = clock.random(batch, inner, side, side, dtype=dtype)
        weight = clock.random(outer, inner // groups, window, window, dtype=dtype)
        result = torch.ops.aten.convolution(image, weight, None, *settings)
        pixels = result.numel() // outer
        flops = 2 * pixels * weight.numel()
        if flops / rate > clock.effort.longest_s:
            return
        slowest = 0.0
        turns = itertools.cycle(copies(image, weight, result))

        def convolve(turns: Iterator[Sequence[Tensor]] = turns, settings: Any = settings) -> None:
            image, weight, _ = next(turns)
            torch.ops.aten.convolution(image, weight, None, *settings)

        def differentiate(mask: list[bool], turns: Iterator[Sequence[Tensor]], settings: Any) -> None:
            image, weight, grad = next(turns)
            torch.ops.aten.convolution_backward(grad, image, weight, None, *settings, mask)

        of_input = partial(differentiate, [True, False, False], turns, settings)
        of_weight = partial(differentiate, [False, True, False], turns, settings)
        for of, work in (("result", convolve), ("input", of_input), ("weight", of_weight)):
            if of == "input" and inner < _CHANNELS:
                continue
            seconds = clock.seconds(work, max(1, int(2e8 / flops)), clock.effort.few)
            yield {
                "kernel": "convolution",
                "dtype": computed_in,
                "of": of,
                "pixels": pixels,
                "weight": list(weight.shape),
                "seconds": seconds,
            }
            slowest = max(slowest, *seconds)
        rate = flops / slowest


def _out_of_cache(device: torch.device) -> int:
    """Return how many bytes of tensors the last cache of a device surely does not hold."""
    name = "SC_LEVEL3_CACHE_SIZE"
    cache = os.sysconf(name) if device.type == "cpu" and name in os.sysconf_names else 0
    return min(_MOST_BYTES, max(_UNCACHED_BYTES, 2 * cache))


def copies(*tensors: Tensor, total: int = _UNCACHED_BYTES) -> list[Sequence[Tensor]]:
    """Return the tensors and as many copies of all of them as make up `total` bytes, which caches do not hold."""
    count = -(-total // sum(each.nbytes for each in tensors))
    return [tensors, *([each.clone() for each in tensors] for _ in range(count - 1))]


def _attentions(clock: Clock, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield attention over all positions; on a GPU also its backward, and both under a causal mask."""
    rate = math.inf
    if clock.on_gpu and dtype is torch.float32:
        return
    for sizes in (*_ATTENTIONS, *(_GPU_ATTENTIONS if clock.on_gpu else ())):
        batch, heads, positions, width = sizes
        flops = 4 * batch * heads * positions * positions * width
        if flops / rate > clock.effort.longest_s:
            return
        for causal in (False, True) if clock.on_gpu else (False,):
            for sample in _attention(clock, sizes, dtype, causal):
                yield sample
                rate = sample["flops"] / max(sample["seconds"])


def _attention(clock: Clock, sizes: Sequence[int], dtype: torch.dtype, causal: bool) -> Iterator[Sample]:
    """Yield one attention, on a GPU also its backward, whose kernel computes five products for two of forward."""
    q, k, v = (clock.random(*sizes, dtype=dtype).requires_grad_(clock.on_gpu) for _ in range(3))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=causal)
    works: list[tuple[str, float, Callable[[], object]]] = [("result", 1.0, attend)]
    if clock.on_gpu:
        made = attend()
        back = partial(torch.autograd.grad, made, (q, k, v), torch.ones_like(made), retain_graph=True)
        works.append(("gradients", 2.5, back))
    batch, heads, positions, width = sizes
    for of, passes, work in works:
        seconds = clock.seconds(work, runs=clock.effort.few)
        yield {
            "kernel": "attention",
            "dtype": str(dtype).removeprefix("torch."),
            "of": of,
            "flops": 4 * batch * heads * positions * positions * width * passes * (0.5 if causal else 1.0),
            "bytes": 4 * passes * q.nbytes,
            "positions": positions,
            "seconds": seconds,
        }


def hardware(device: torch.device) -> str:
    """Return what the device calls itself: a GPU's name, or the CPU's with the number of its cores in use."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_cpu_name()}, {cores} cores"


def _cpu_name() -> str:
    import platform
    from pathlib import Path

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "CPU")
