"""One accelerator, or one CPU core: capacity, rates and what fraction is achieved."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cost_models import catalog
from cost_models.errors import CostModelError, suggestion

DTYPE_ALIASES: Mapping[str, str] = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "uint8": "int8",
}
"""Other spellings of a data type, to the one used as key here."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "tf32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "fp8": 1,
    "int8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
}


def canonical_dtype(name: str) -> str:
    """Return the spelling of a data type that is used as key: `bf16` is `bfloat16`."""
    name = name.removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def dtype_bytes(name: str) -> int:
    """Return the bytes of one element of data type `name`."""
    key = canonical_dtype(name)
    if key not in DTYPE_BYTES:
        message = f"unknown data type {name!r}{suggestion(name, DTYPE_BYTES)}; known: {', '.join(DTYPE_BYTES)}"
        raise CostModelError(message)
    return DTYPE_BYTES[key]


_LAUNCHES = 3.3
"""Launches of a kernel that the host could issue while it issues an operator of a program, with the views before it.

As the catalogue's eager stack has it, 15 us beside launches of 4.5. An H200's host, whose launches take 7.3 us in a
row, took some 28 us an operator of GPT-2 and T5 (docs/accuracy/single_gpu.md): 3.8.
"""


def host_of(kind: str, kernel_launch_s: float) -> float:
    """Return `DeviceSpec.host_s` of our own programs; 0 for a CPU, which computes when nothing is issued."""
    return _LAUNCHES * kernel_launch_s if kind == "gpu" else 0.0


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One device as the cost models see it. All compute figures are dense."""

    name: str
    kind: str
    """`gpu` (launches run ahead of the device) or `cpu` (they do not)."""

    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by data type; `float32` is without TF32, which is `tf32`."""

    kernel_launch_s: float
    """Shortest time between two kernels: host cost of one operator, run eagerly."""

    memory_efficiency: float
    """Fraction of `memory_bytes_per_s` that a large elementwise kernel moves."""

    memory_half_bytes: float
    """Bytes at which a memory-bound kernel runs at half its best rate."""

    matmul_efficiency: Mapping[str, float] = field(hash=False)
    """Asymptotic fraction of peak by data type, without quantisation and small sizes."""

    default_matmul_efficiency: float
    """For data types that `matmul_efficiency` does not name."""

    matmul_half: tuple[float, float, float]
    """Sizes m, n, k at each of which a matmul runs at half its best rate."""

    attention_efficiency: float
    """Fraction of peak that a fused attention kernel of PyTorch's own reaches, forward and backward."""

    convolution_efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    """As `matmul_efficiency`, of convolutions, which another library computes; types not named: as products."""

    convolution_half: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """As `matmul_half`, of the products that convolutions are, where `convolution_efficiency` names any type."""

    attention_half: float = 0.0
    """Keys with which an attention kernel runs at half its best rate; 0: any number is as good."""

    attention_block: int = 1
    """Keys that a causal kernel computes or leaves out together; 1: it computes what the mask leaves alone."""

    matmul_best: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Fraction of peak that the best of all matmuls of every shape was measured at, by data type; none: not known.

    No product is faster: the shapes that fill tiles and multiprocessors best are those that power holds back most.
    """

    multiprocessors: int = 0
    """Multiprocessors that take whole tiles; 0: no tile quantisation."""

    reserved_bytes: int = 0
    """Memory taken by the driver's context and the communication library."""

    transcendentals_per_s: float = 0.0
    """Elements/s through exp, tanh, erf and the like; 0: never slower than memory."""

    fresh_bytes: int = 0
    """Size from which the allocator gets a tensor's pages anew from the system each time; 0: it keeps them."""

    fresh_bytes_per_s: float = 0.0
    """Rate at which the system hands out such pages, zeroed, at their first use."""
    host_s: float = 0.0
    """The host's time for one operator; it runs ahead, so that operators in a row take the longer of both."""

    host_waits: bool = False
    """Whether the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1)."""

    released: int = 0
    """Year in which its matrix instructions could be had, on it or on a device before it; 0: not known."""

    early_attention_efficiency: float = 0.0
    """As `attention_efficiency`, of the first fused kernels (FlashAttention 1); 0: the same."""

    vendor_attention_efficiency: float = 0.0
    """As `attention_efficiency`, of its maker's library (cuDNN) in place of PyTorch's own kernels; 0: the same."""

    attention_heads: tuple[int, ...] = ()
    """Sizes of heads that fused attention kernels are built for; others are padded to the next. Empty: any size."""

    own_programs: bool = True
    """Whether what runs are our own programs, PyTorch's kernels one by one, and not software that others measured."""

    pads: bool = True
    """Whether the software pads matrices whose rows are not aligned before it multiplies them, as ours does."""

    fusion: float = 0.0
    """Share of the traffic between memory-bound operators that the software's fused kernels keep off memory."""

    fuses_parts: bool = False
    """Whether a norm, a gated activation and a rotation of positions are a kernel each, forward and backward."""

    sums_in_products: bool = False
    """Whether a product adds its result to a sum in memory by itself (gradients of several micro-batches)."""

    cross_entropy: str = ""
    """Whose kernels compute cross entropy, see `Stack.cross_entropy`; empty: those of our own programs."""

    narrow: str = ""
    """The type, such as `fp8`, in which the software computes the linear layers of a model's blocks; empty: theirs.

    What is added, normalised and kept stays in the operands' own type, and so do attention, embedding and the head:
    recipes of Transformer Engine and torchao.
    """

    catalog: str = ""
    """Catalogue entry that the figures come from; empty if described by the user."""

    def with_host_s(self, device_s: float, operators: int) -> float:
        """Return the seconds of a run of operators that take the device `device_s`, the host's part included."""
        host_s = operators * self.host_s
        return device_s + host_s if self.host_waits else max(device_s, host_s)

    def at_share(self, share: float) -> "DeviceSpec":
        """Return the device with `share` of its core: all that it does takes 1 / `share` as long."""
        if share == 1.0:
            return self
        return replace(
            self,
            memory_bytes_per_s=self.memory_bytes_per_s * share,
            peak_flops={dtype: rate * share for dtype, rate in self.peak_flops.items()},
            kernel_launch_s=self.kernel_launch_s / share,
            transcendentals_per_s=self.transcendentals_per_s * share,
            fresh_bytes_per_s=self.fresh_bytes_per_s * share,
            host_s=self.host_s / share,
        )

    def for_convolutions(self) -> "DeviceSpec":
        """Return the device whose matrix products take what the products that convolutions are take on this one."""
        if not self.convolution_efficiency:
            return self
        return replace(
            self,
            matmul_efficiency={**self.matmul_efficiency, **self.convolution_efficiency},
            matmul_half=self.convolution_half,
            matmul_best={k: v for k, v in self.matmul_best.items() if k not in self.convolution_efficiency},
            convolution_efficiency={},
        )

    def flops_for(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for `dtype`.

        Raises `CostModelError` naming the types with a known peak.
        """
        key = canonical_dtype(dtype)
        if key not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            message = f"device {self.name!r} has no compute rate for {dtype!r}; known: {known}"
            raise CostModelError(message)
        return self.peak_flops[key]

    @property
    def attention_share(self) -> float:
        """Return the fraction of peak of attention kernels: our own programs have the vendor's, as torch on Hopper."""
        return (self.own_programs and self.vendor_attention_efficiency) or self.attention_efficiency

    def padded_head(self, size: float) -> float:
        """Return the size of head that a fused attention kernel computes with in place of `size`."""
        return next((float(each) for each in self.attention_heads if each >= size), size)

    def matmul_efficiency_for(self, dtype: str) -> float:
        """Return the largest fraction of peak that a matmul of `dtype` reaches."""
        return self.matmul_efficiency.get(canonical_dtype(dtype), self.default_matmul_efficiency)


FLASH_2_HEADS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Sizes of heads in FlashAttention-2's kernels, which PyTorch has too: csrc/flash_attn/src/static_switch.h."""

FLASH_1_HEADS = (16, 32, 64, 128)
"""Likewise of the first ones: csrc/flash_attn/src/fmha_fprop_fp16_kernel.cu of 2022."""


def catalogued_device(name: str) -> DeviceSpec:
    """Return the device of the catalogue that is called `name`.

    Raises `ClusterError` with the closest name where there is none.
    """
    entry = catalog.entry("devices", name)
    efficiency = catalog.mapping(entry, "matmul_efficiency")
    return DeviceSpec(
        name=name,
        kind=catalog.text(entry, "kind"),
        memory_bytes=int(catalog.number(entry, "memory_capacity")),
        memory_bytes_per_s=catalog.number(entry, "memory_bandwidth"),
        peak_flops={k: float(f.value) for k, f in catalog.mapping(entry, "compute").items()},
        kernel_launch_s=catalog.number(entry, "kernel_launch"),
        host_s=host_of(catalog.text(entry, "kind"), catalog.number(entry, "kernel_launch")),
        memory_efficiency=catalog.number(entry, "memory_efficiency"),
        memory_half_bytes=catalog.number(entry, "memory_half"),
        matmul_efficiency={k: float(f.value) for k, f in efficiency.items()},
        default_matmul_efficiency=catalog.number(entry, "default_matmul_efficiency"),
        matmul_half=(
            int(catalog.number(entry, "matmul_half_m", 0)),
            int(catalog.number(entry, "matmul_half_n", 0)),
            int(catalog.number(entry, "matmul_half_k")),
        ),
        attention_efficiency=catalog.number(entry, "attention_efficiency"),
        attention_half=catalog.number(entry, "attention_half", 0.0),
        attention_block=int(catalog.number(entry, "attention_block", 1)),
        matmul_best={k: float(f.value) for k, f in catalog.mapping(entry, "matmul_best").items()},
        convolution_efficiency={k: float(f.value) for k, f in catalog.mapping(entry, "convolution_efficiency").items()},
        convolution_half=(0, 0, int(catalog.number(entry, "matmul_half_k"))),
        multiprocessors=int(catalog.number(entry, "multiprocessors")),
        reserved_bytes=int(catalog.number(entry, "reserved")),
        transcendentals_per_s=catalog.number(entry, "transcendentals", 0.0),
        fresh_bytes=int(catalog.number(entry, "fresh_size", 0)),
        fresh_bytes_per_s=catalog.number(entry, "fresh_bandwidth", 0.0),
        released=int(catalog.number(entry, "instructions", catalog.number(entry, "released", 0))),
        early_attention_efficiency=catalog.number(entry, "early_attention_efficiency", 0.0),
        vendor_attention_efficiency=catalog.number(entry, "vendor_attention_efficiency", 0.0),
        attention_heads=FLASH_2_HEADS if catalog.text(entry, "kind") == "gpu" else (),
        catalog=name,
    )


def sources(device: DeviceSpec) -> Mapping[str, str]:
    """Return `figure: kind: source` of every figure taken from the catalogue.

    A device that was described in the cluster file has none.
    """
    if not device.catalog:
        return {}
    lines: dict[str, str] = {}
    for key, each in catalog.entry("devices", device.catalog).items():
        if isinstance(each, catalog.Figure):
            lines[key] = f"{each.kind}: {each.source}"
        else:
            lines |= {f"{key}.{k}": f"{f.kind}: {f.source}" for k, f in each.items()}
    return lines
