"""Time, operations and memory of a scan over a sequence (`ir/scan.py`): products of chunks, steps that wait, passes.

On GPUs a scan is taken to run in the kernels of its library (flash-linear-attention, mamba_ssm), each product of all
chunks at once and the state from chunk to chunk inside of one; on CPUs in transformers' functions, whose passes over
memory, kernels and tensors are counted here. Backward runs forward again (`own_scans.py`), and takes what it takes
twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.graph import Op
from autopar.ir.scan import ScanCall
from autopar.ir.table import Floats
from cost_models import compute
from cost_models.device import DeviceSpec, dtype_bytes

Shape = tuple[int, ...]

_PREFIX = "autopar_ops.scan"
_CPU_DTYPE = "float32"
"""What transformers' functions compute in, whatever they are given."""

_CHUNK = 64
"""Steps of a chunk where a call does not say: the default of both libraries' gated delta rule."""

_AGAIN, _TWICE = 1, 2

_TRITON = 1.8
"""How many times as long as in the vendor's library products of chunks take in flash-linear-attention's kernels.

Forward of its gated delta rule, as others published: 1.6 to 1.7 at six shapes on an H100, 1.85 to 2.0 at five on a B200
(`benchmarks/data/scan_kernels.csv`). Taken for its and mamba_ssm's other kernels of chunks, and for backward.
"""

_EXPONENTIAL = 16.0
"""Operations of float32 that take as long as one exponential: 256 against 16 a clock and multiprocessor (CUDA C++
Programming Guide, throughput of native arithmetic instructions, compute capability 8.0 and 9.0: 64 and 128 fused
multiply-adds, 16 of special functions)."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What one scan computes forward."""

    products: Sequence[tuple[int, tuple[int, int, int, int]]]
    """How often a product (batch, m, n, k) is done one after another where no kernel does them at once."""

    in_kernels: Sequence[tuple[int, int, int, int]]
    """The products of the kernels of its library, each of all chunks at once."""

    operations: float
    """Floating-point operations beside those of products."""

    elements: float
    """Read and written by transformers' function, in passes over memory."""

    slower: float
    """How many times as long these passes take as those over tensors in one order: measured (`benchmarks/scans.py`)."""

    exponentials: float
    """That transformers' function computes."""

    in_kernels_exponentials: float

    kernels: int
    """That transformers' function starts, each of which pays for that."""

    held: float
    """Elements that transformers' function holds at most, beside what it reads and makes."""

    held_backward: float

    inside: float
    """Elements that the kernels of its library make and read again, beside what they read and make."""


def _gated_delta_rule(sizes: Mapping[str, int], chunk: int) -> _Work:
    samples, steps, keys, values = sizes["b"], sizes["s"], sizes["d"], sizes["e"]
    heads = samples * sizes["g"] * sizes["r"]
    chunks = -(-steps // chunk)
    tokens, blocks = heads * chunks * chunk, heads * chunks
    pairs, states = blocks * chunk * chunk, blocks * keys * values
    products = [
        (1, (blocks, chunk, chunk, keys)),  # keys with keys, queries with keys
        (1, (blocks, chunk, chunk, keys)),
        (1, (blocks, chunk, values + keys, chunk // 2)),  # the triangular system, half of a product
        (chunks, (heads, chunk, values, keys)),  # what the state holds of keys, and of queries
        (chunks, (heads, chunk, values, keys)),
        (chunks, (heads, chunk, values, chunk)),
        (chunks, (heads, keys, values, chunk)),
    ]
    # Queries and keys: repeated, copied in another order, normalised, scaled, decayed; values: copied, corrected.
    elements = 28.0 * tokens * keys + 14.0 * tokens * values + 11.0 * pairs + 5.0 * states
    return _Work(
        products=products,
        in_kernels=_at_once(products),
        operations=0.0,
        elements=elements,
        slower=3.7,
        exponentials=float(pairs),
        in_kernels_exponentials=float(pairs),
        kernels=45 + 9 * chunks,
        held=5.0 * tokens * keys + (4.0 + 4.0 / chunks) * tokens * values + 3.0 * pairs,
        held_backward=11.0 * tokens * keys + (8.0 + 3.0 / chunks) * tokens * values + 6.0 * pairs,
        inside=float(tokens * (keys + 2 * values) + pairs + states),
    )


def _kimi_delta_rule(sizes: Mapping[str, int], chunk: int) -> _Work:
    """Return the same with a decay for each feature: transformers' function makes every pair's products one by one."""
    plain = _gated_delta_rule({**sizes, "r": 1}, chunk)
    pairs = plain.exponentials * sizes["d"]
    chunks = -(-sizes["s"] // chunk)
    return replace(
        plain,
        products=plain.products[2:],  # kernels have the first two, of keys with keys and queries with keys
        elements=plain.elements + 16.0 * pairs,
        exponentials=pairs,
        kernels=plain.kernels + 5 * chunk,
        held=plain.held + 3.0 * pairs,
        held_backward=plain.held_backward + (4.4 + 1.6 / chunks) * pairs + 12.0 * plain.exponentials,
        inside=plain.inside + plain.exponentials,  # products of queries with keys are kept, too
    )


def _selective_scan(sizes: Mapping[str, int], chunk: int) -> _Work:
    samples, steps, features, width = sizes["b"], sizes["s"], sizes["d"], sizes["n"]
    rows = samples * steps * features
    return _Work(
        products=[],
        in_kernels=[],
        operations=9.0 * rows * width,  # as Gu and Dao count a scan, with the product by C
        elements=13.0 * rows * width + 10.0 * rows,
        slower=6.0,
        exponentials=float(rows * width),
        in_kernels_exponentials=float(rows * width),
        kernels=20 + 4 * steps,
        held=3.0 * rows * width + 4.0 * rows,
        held_backward=7.0 * rows * width + 4.0 * rows,
        inside=0.0,  # states are made again from those of every chunk of 2048 steps
    )


def _chunk_scan(sizes: Mapping[str, int], chunk: int) -> _Work:
    samples, steps, width, features = sizes["b"], sizes["s"], sizes["n"], sizes["p"]
    heads = samples * sizes["g"] * sizes["r"]
    chunks = -(-steps // chunk)
    tokens, blocks = heads * chunks * chunk, heads * chunks
    pairs, states = blocks * chunk * chunk, blocks * features * width
    products = [
        (1, (blocks, chunk, chunk, width)),
        (1, (blocks, chunk, features, chunk)),
        (1, (blocks, width, features, chunk)),
        (1, (heads, chunks + 1, features * width, chunks + 1)),
        (1, (blocks, chunk, features, width)),
    ]
    # Scores are of groups, and half of their products with values is left out: they are causal.
    of_groups = samples * sizes["g"] * chunks
    in_kernels = [(of_groups, chunk, chunk, width), (blocks, chunk, features, chunk // 2), *_at_once(products[2:])]
    return _Work(
        products=products,
        in_kernels=in_kernels,
        operations=0.0,
        elements=22.0 * tokens * features + 20.0 * tokens * width + 16.0 * pairs + 6.0 * states,
        slower=3.0,
        exponentials=float(pairs),
        in_kernels_exponentials=float(pairs),
        kernels=60,
        held=5.0 * tokens * features + 3.0 * tokens * width + 3.0 * pairs + 2.0 * states,
        held_backward=7.0 * tokens * features + 6.0 * tokens * width + 4.0 * pairs + 5.0 * states,
        inside=float(pairs + 2 * states),
    )


def _causal_convolution(sizes: Mapping[str, int], chunk: int) -> _Work:
    rows = float(sizes["b"] * sizes["s"] * sizes["d"])
    return _Work(
        products=[],
        in_kernels=[],
        operations=2.0 * rows * sizes["k"],
        elements=7.0 * rows,
        slower=4.0,
        exponentials=rows,
        in_kernels_exponentials=rows,
        kernels=6,
        held=rows,
        held_backward=3.0 * rows,
        inside=0.0,
    )


def _at_once(products: Sequence[tuple[int, tuple[int, int, int, int]]]) -> list[tuple[int, int, int, int]]:
    """Return products that are done one after another as products of all chunks."""
    return [(count * batch, m, n, k) for count, (batch, m, n, k) in products]


_WORK: Mapping[str, Callable[[Mapping[str, int], int], _Work]] = {
    "gated_delta_rule": _gated_delta_rule,
    "kimi_delta_rule": _kimi_delta_rule,
    "selective_scan": _selective_scan,
    "chunk_scan": _chunk_scan,
    "causal_convolution": _causal_convolution,
}


def is_scan(op: Op) -> bool:
    """Return whether an operator is a scan, forward or backward."""
    return op.target.startswith(_PREFIX)


def scan_seconds(op: Op, ins: Sequence[Sequence[Shape]], dtype: str, device: DeviceSpec) -> Floats:
    """Return the seconds of a scan for the local shapes that each strategy reads."""
    return np.array([_seconds(op, each, dtype, device) for each in ins], dtype=np.float64)


def scan_flops(op: Op, ins: Sequence[Shape]) -> float:
    """Return the floating-point operations of a scan in kernels, without what backward repeats of forward.

    Transformers' functions do more; bounds on a program's time need what is done at least.
    """
    work = _work(op, ins)
    forward = work.operations + sum(2.0 * math.prod(product) for product in work.in_kernels)
    return forward * (_TWICE if _is_backward(op) else 1)


def scan_bytes(op: Op, ins: Sequence[Sequence[Shape]], dtype: str, device: DeviceSpec) -> Floats:
    """Return the bytes that a scan holds while it runs, beside what it reads and makes.

    Of transformers' functions on CPUs held against torch 2.13's allocator at fifteen shapes (`benchmarks/scans.py`).
    What kernels of libraries hold on GPUs is counted from what they pass to one another, and was not measured.
    """
    works = [_work(op, each) for each in ins]
    if device.kind == "cpu":
        held = [each.held_backward if _is_backward(op) else each.held for each in works]
        return np.array(held) * dtype_bytes(_CPU_DTYPE)
    times = _AGAIN + _TWICE if _is_backward(op) else 1
    return np.array([times * each.inside for each in works]) * dtype_bytes(dtype)


def _seconds(op: Op, ins: Sequence[Shape], dtype: str, device: DeviceSpec) -> float:
    work = _work(op, ins)
    on_cpu = device.kind == "cpu"
    dtype = _CPU_DTYPE if on_cpu else dtype
    if on_cpu:
        total = sum(count * float(compute.matmul_s(*product, dtype, device)) for count, product in work.products)
        moved = work.slower * work.elements * dtype_bytes(dtype)
        total += float(compute.memory_bound_s(moved, device, work.exponentials)) + work.kernels * device.kernel_launch_s
    else:
        total = _TRITON * sum(float(compute.matmul_s(*product, dtype, device)) for product in work.in_kernels)
        moved = sum(math.prod(each) for each in ins) * dtype_bytes(dtype)
        arithmetic = (work.operations + _EXPONENTIAL * work.in_kernels_exponentials) / device.flops_for("float32")
        total += max(float(compute.memory_bound_s(moved, device)), arithmetic)
    return total * (_AGAIN + _TWICE if _is_backward(op) else 1)


def _work(op: Op, ins: Sequence[Shape]) -> _Work:
    call = ScanCall.read(str(op.args[-1]))
    first = len(ins) - len(call.given)
    chunk = call.settings.get("chunk_size")
    return _WORK[call.kind](call.sizes(ins[first:]), chunk if isinstance(chunk, int) else _CHUNK)


def _is_backward(op: Op) -> bool:
    return op.target.startswith(f"{_PREFIX}_backward")
