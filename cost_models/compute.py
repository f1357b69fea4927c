"""Time of kernels on one device: roofline with size-dependent efficiency.

Symbols, used by every formula here:
    b m n k   batch and sizes of a matrix product, [b, m, k] @ [b, k, n]
    P         dense peak of the data type, FLOP/s
    e         fraction of peak that large matmuls reach
    hm hn hk  sizes at which the rate is half of that (prologue, epilogue, edges)
    Tm Tn s   tile of one multiprocessor and the ways k is split
    t         rate of that tile over the best tile's
    S         multiprocessors
    W         memory bandwidth that is reached, byte/s

A GPU gives whole tiles to multiprocessors in waves, so a matmul costs what its
last, partly filled wave costs too; libraries choose the tile and the split, and
so does the model (the fastest of a few). This alone explains the odd best
shapes of validation/matmul_achievable.csv: each fills its waves to 96 % and more.

A GPU's kernel takes at least the time between two launches; a CPU's launch adds
to its work. Not modelled: caches that hold operands between kernels, clocks that
fall with power beyond what `e` contains.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.device import DeviceSpec, canonical_dtype, dtype_bytes
from cost_models.formula import Formula, registry
from cost_models.memory import DtypeOf, optimizer_traffic_bytes

FloatArray = npt.NDArray[np.float64]
Size = float | npt.NDArray[Any]

_PEAK = (
    ("P", "dense peak, FLOP/s"),
    ("e", "fraction of peak that large matmuls reach"),
)
_SIZES = (("b", "batch"), ("m", "rows"), ("n", "columns"), ("k", "inner size"))

FORMULAS: Mapping[str, Formula] = registry(
    Formula(
        "matmul_waves",
        "ceiling(b*s*ceiling(m/Tm)*ceiling(n/Tn)/S)",
        (
            *_SIZES[:3],
            ("Tm", "rows of a tile"),
            ("Tn", "columns of a tile"),
            ("s", "ways k is split"),
            ("S", "multiprocessors"),
        ),
        "NVIDIA, 'Matrix Multiplication Background User's Guide', tile and wave quantisation",
    ),
    Formula(
        "matmul_tiled",
        "waves*2*Tm*Tn*(k/s + hk)*S/(P*e*t) + 8*(s - 1)*b*m*n/W",
        (
            ("waves", "rounds of tiles"),
            *_SIZES,
            ("Tm", "rows of a tile"),
            ("Tn", "columns of a tile"),
            ("s", "ways k is split"),
            ("hk", "k at half the best rate"),
            ("S", "multiprocessors"),
            *_PEAK,
            ("t", "rate of the tile over the best tile's"),
            ("W", "memory bandwidth reached, byte/s"),
        ),
        "time of one tile times its waves; partial sums of a split k are written and read in float32",
    ),
    Formula(
        "matmul_smooth",
        "2*b*(m + hm)*(n + hn)*(k + hk)/(P*e)",
        (*_SIZES, ("hm", "m at half the best rate"), ("hn", "n, likewise"), ("hk", "k, likewise"), *_PEAK),
        "simple saturation in each size, for devices without tile quantisation",
    ),
    Formula(
        "matmul_best",
        "2*b*m*n*k/(P*c)",
        (*_SIZES, _PEAK[0], ("c", "fraction of peak that the best shape was measured at")),
        "no shape is faster than the fastest of all that were measured (benchmarks/data/matmul_achievable.csv)",
    ),
    Formula(
        "matmul_bytes",
        "b*(d*(m*k + k*n) + r*m*n)",
        (*_SIZES, ("d", "bytes of an operand's element"), ("r", "bytes of a result's element")),
        "operands read once, result written once",
    ),
    Formula(
        "kernel",
        "Max(arithmetic, bytes/W) + half/W",
        (
            ("arithmetic", "time of the arithmetic, s"),
            ("bytes", "bytes read and written"),
            ("half", "bytes at half the best rate"),
            ("W", "memory bandwidth reached, byte/s"),
        ),
        "roofline (Williams, Waterman & Patterson 2009) after a fixed start-up (Hockney 1994)",
    ),
    Formula(
        "attention",
        "flops*(1 + ha/keys)/(P*e)",
        (
            ("flops", "operations of the kernel"),
            ("ha", "keys at half the best rate"),
            ("keys", "positions that each query sees"),
            ("P", "dense peak, FLOP/s"),
            ("e", "fraction a fused kernel reaches over many keys"),
        ),
        "roofline of a fused attention kernel, whose products are short where keys are few",
    ),
)

# Tile (rows, columns) and its rate over the best tile's. Assumed, in the range of
# CUTLASS profiles of Ampere and Hopper: a small tile reads its operands more often.
_TILES: Sequence[tuple[int, int, float]] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (192, 128, 0.97),
    (128, 192, 0.97),
    (128, 160, 0.95),
    (128, 128, 0.92),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.55),
    (16, 128, 0.25),
)
_SPLITS = (1, 2, 4, 8)

_SHORT_BYTES = 2
ALIGNED_ELEMENTS = 8
"""Rows of 16-bit batched products that are no multiple of 16 bytes keep them from tensor cores.

NVIDIA, 'Matrix Multiplication Background User's Guide', "Requirements to use Tensor Cores". That it is so for batched
products of 2022: BigScience's table of numbers of heads (chronicles-prequel.md of tr11-176B-ml), in which heads of 108
take as long as float32 arithmetic in five of five runs, heads of 104, 144 and 216 do not. For single products libraries
have kernels that use tensor cores all the same, as fast as their loads of so few bytes let them.
"""

_UNALIGNED_FLOPS = {1: 1.0e12, 2: 2.0e12, 4: 2.0e12}
"""By elements of 16 bits that rows are aligned by: FLOP/s of a multiprocessor in single products.

Of an H200 (132 multiprocessors): rows of an odd number of elements 124 TFLOP/s over the three products of a layer, 0.13
to 0.19 of those of aligned ones; rows of 2 or 4 elements 0.35 of these (docs/accuracy/single_gpu.md). An A100's 108
come to 0.41 of its rate by this: GPT-2's step with 50304 tokens for 50257, 0.8 (nanoGPT, as remembered), asks for 0.44.
"""
_CHOICES = np.array([(*tile, split) for tile in _TILES for split in _SPLITS], dtype=np.float64)


def matmul_s(
    batch: Size,
    m: Size,
    n: Size,
    k: Size,
    dtype: str,
    device: DeviceSpec,
    result_bytes: int = 0,
    aligned: Size = ALIGNED_ELEMENTS,
) -> FloatArray:
    """Return the time in seconds of `batch` products [m, k] @ [k, n] in one kernel.

    Sizes may be arrays that broadcast together. `result_bytes`: of an element of the result; 0: as of the operands'.
    `aligned`: elements of 16 bits that all rows are aligned by, 1, 2, 4 or 8, where software does not pad them.
    Raises `CostModelError` where the device has no rate for `dtype`.
    """
    sizes = [np.asarray(each, dtype=np.float64) for each in (batch, m, n, k)]
    item = dtype_bytes(dtype)
    moved = FORMULAS["matmul_bytes"].evaluate(**_named(sizes), d=item, r=result_bytes or item)
    arithmetic = np.maximum(
        matmul_compute_s(batch, m, n, k, dtype, device), _unaligned_s(sizes, np.asarray(aligned), dtype, device)
    )
    return np.maximum(_on_device(arithmetic, moved, device), _at_best_s(sizes, dtype, device))


def convolution_product(pixels: int, weight: Sequence[int], of: str) -> tuple[int, int, int, int]:
    """Return the implicit product (batch, m, n, k) that makes the `result`, or the gradient of `input` or `weight`.

    `pixels`: of the result, over all samples, or of a transposed convolution's input. `weight`: its shape, [outer,
    inner / groups, *window]. Source: Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning", section 3.
    """
    outer, inner, *window = weight
    area = math.prod(window)
    match of:
        case "input":
            return (1, pixels, inner, outer * area)
        case "weight":
            return (1, outer, inner * area, pixels)
    return (1, pixels, outer, inner * area)


def matmul_compute_s(batch: Size, m: Size, n: Size, k: Size, dtype: str, device: DeviceSpec) -> FloatArray:
    """Return the time in seconds of the arithmetic of `matmul_s` alone."""
    b, rows, columns, inner = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (batch, m, n, k)))
    peak, efficiency = device.flops_for(dtype), device.matmul_efficiency_for(dtype)
    if not device.multiprocessors:
        hm, hn, hk = device.matmul_half
        return FORMULAS["matmul_smooth"].evaluate(
            **_named([b, rows, columns, inner]), hm=hm, hn=hn, hk=hk, P=peak, e=efficiency
        )
    tile_m, tile_n, tile_rate, split = _CHOICES.T
    sizes = _named([each[..., None] for each in (b, rows, columns, inner)])
    tile = {"Tm": tile_m, "Tn": tile_n, "s": split, "S": float(device.multiprocessors)}
    waves = FORMULAS["matmul_waves"].evaluate(**{name: sizes[name] for name in "bmn"}, **tile)
    times = FORMULAS["matmul_tiled"].evaluate(
        **sizes, **tile, waves=waves, hk=device.matmul_half[2], P=peak, e=efficiency, t=tile_rate, W=_bandwidth(device)
    )
    fastest: FloatArray = np.min(times, axis=-1)
    if dtype_bytes(dtype) != _SHORT_BYTES:
        return fastest
    unaligned = (b > 1) & ((columns % ALIGNED_ELEMENTS > 0) | (inner % ALIGNED_ELEMENTS > 0))
    plain = FORMULAS["matmul_smooth"].evaluate(
        **_named([b, rows, columns, inner]),
        hm=0,
        hn=0,
        hk=device.matmul_half[2],
        P=device.flops_for("float32"),
        e=device.matmul_efficiency_for("float32"),
    )
    return np.where(unaligned, np.maximum(fastest, plain), fastest)


def _unaligned_s(sizes: Sequence[FloatArray], aligned: npt.NDArray[Any], dtype: str, device: DeviceSpec) -> FloatArray:
    """Return the seconds that loads of so few elements hold products back for; 0 where they do not."""
    if device.pads or not device.multiprocessors or dtype_bytes(dtype) != _SHORT_BYTES:
        return np.zeros_like(sizes[0])
    flops = 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
    slow = [np.where(aligned == each, flops / rate, 0.0) for each, rate in _UNALIGNED_FLOPS.items()]
    return np.asarray(sum(slow) / device.multiprocessors, dtype=np.float64)


def _at_best_s(sizes: Sequence[FloatArray], dtype: str, device: DeviceSpec) -> FloatArray:
    """Return the seconds in which products would be at the rate of the best that was measured; 0: not known."""
    best = device.matmul_best.get(canonical_dtype(dtype), 0.0)
    if not best:
        return np.zeros_like(sizes[0])
    return FORMULAS["matmul_best"].evaluate(**_named(sizes), P=device.flops_for(dtype), c=best)


def memory_bound_s(bytes_moved: Size, device: DeviceSpec, transcendentals: Size = 0.0) -> FloatArray:
    """Return the time in seconds of a kernel that mainly moves memory.

    `transcendentals`: elements that pass through exp, tanh, erf and the like;
    on a CPU core these and not memory bound softmax, GELU and the norms.
    """
    counts = np.asarray(transcendentals, dtype=np.float64)
    rate = device.transcendentals_per_s
    return _on_device(counts / rate if rate else np.zeros_like(counts), bytes_moved, device)


def fused_s(bytes_moved: Size, bytes_left: Size, device: DeviceSpec) -> FloatArray:
    """Return the time in seconds of a memory-bound operator where the device's software fuses (`DeviceSpec.fusion`).

    `bytes_moved`: as a kernel of its own; `bytes_left`: of an ideal fusion, 0 where it is part of another's kernel.
    """
    alone, inside = (
        np.where(np.asarray(each) > 0, memory_bound_s(each, device), 0.0) for each in (bytes_moved, bytes_left)
    )
    return np.asarray(alone + device.fusion * (inside - alone))


def accumulate_s(sum_bytes: Size, device: DeviceSpec) -> FloatArray:
    """Return the time in seconds of adding a value to a sum of `sum_bytes` that is in memory.

    A kernel of its own reads both and writes one; fused into the product that makes the value, it reads the sum.
    """
    passes = 1.0 if device.sums_in_products else 3.0 - 2.0 * device.fusion
    return memory_bound_s(np.asarray(sum_bytes, dtype=np.float64) * passes, device)


def narrowing_s(elements: Size, item_bytes: int, dtype: str, device: DeviceSpec) -> FloatArray:
    """Return the time in seconds of casting `elements` of `item_bytes` to the narrower `dtype`, for products.

    A kernel of its own reads them and writes two copies, one transposed, for products take both operands along their
    inner dimension (Transformer Engine's `cast_transpose`; the transposed one is for the weights' gradient), or two
    that are scaled by rows and by columns (MXFP8). It is no part of the operator that made them: what they are scaled
    by is known once all of them are. Norms that write narrow values themselves, by scales of steps before, are not
    modelled.
    """
    moved = np.asarray(elements, dtype=np.float64) * (item_bytes + 2 * dtype_bytes(dtype))
    return memory_bound_s(moved, device)


def attention_s(
    flops: Size, bytes_moved: Size, dtype: str, device: DeviceSpec, keys: Size = float("inf")
) -> FloatArray:
    """Return the time in seconds of a fused attention kernel of `flops` operations over so many keys.

    Causal masks save some of `flops`; the caller counts. Head sizes that are no
    multiple of 8 are slower for real and not modelled.
    """
    peak = device.flops_for(dtype)
    arithmetic = FORMULAS["attention"].evaluate(
        flops=flops, ha=device.attention_half, keys=keys, P=peak, e=device.attention_share
    )
    return _on_device(arithmetic, bytes_moved, device)


def causal_share(keys: float, block: int) -> float:
    """Return the share of all pairs of as many queries and keys that a causal kernel computes.

    It computes blocks of `block` keys whole: 1 where one block holds all keys, a half of many blocks. With `block` 1
    just those pairs that the mask leaves, half of all (the diagonal is left out).
    """
    if block <= 1 or keys <= 0:
        return 0.5
    whole, rest = divmod(keys, block)
    pairs = block * block * whole * (whole + 1) / 2 + rest * keys
    return float(pairs / keys**2)


def optimizer_s(
    parameters: Size,
    optimizer: str,
    device: DeviceSpec,
    *,
    dtypes: DtypeOf | None = None,
    implementation: str = "foreach",
) -> FloatArray:
    """Return the time in seconds of one optimizer step over `parameters` elements.

    Memory traffic only; the launches of `foreach` are few and of `loop` left out.
    """
    per_parameter = optimizer_traffic_bytes(optimizer, dtypes, implementation)
    return memory_bound_s(np.asarray(parameters, dtype=np.float64) * per_parameter, device)


def fresh_s(tensor_bytes: Size, device: DeviceSpec) -> FloatArray:
    """Return the seconds that first use of a new tensor's pages adds to the kernel that writes it.

    Tensors of `fresh_bytes` and more get their pages from the system each time; on a CPU this can take several times
    as long as writing them. Smaller ones are taken to reuse what was freed; what returns to the system when the heap
    shrinks is not modelled.
    """
    sizes = np.asarray(tensor_bytes, dtype=np.float64)
    if not device.fresh_bytes or not device.fresh_bytes_per_s:
        return np.zeros_like(sizes)
    return np.where(sizes >= device.fresh_bytes, sizes / device.fresh_bytes_per_s, 0.0)


def _on_device(arithmetic_s: FloatArray, bytes_moved: Size, device: DeviceSpec) -> FloatArray:
    work = FORMULAS["kernel"].evaluate(
        arithmetic=arithmetic_s, bytes=bytes_moved, half=device.memory_half_bytes, W=_bandwidth(device)
    )
    if device.kind == "gpu":
        return np.maximum(work, device.kernel_launch_s)
    return work + device.kernel_launch_s


def _bandwidth(device: DeviceSpec) -> float:
    return device.memory_bytes_per_s * device.memory_efficiency


def _named(sizes: Sequence[FloatArray]) -> dict[str, FloatArray]:
    return dict(zip("bmnk", sizes, strict=True))
