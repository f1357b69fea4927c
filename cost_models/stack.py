"""Execution stacks: what the software that runs a program makes of its operators and its communication.

Kernels: two constants a stack, catalogue `stacks`, and two of all software on all devices. Frameworks differ besides in
what they do, which are no constants: whether reductions of gradients run behind backward, the type that gradients are
summed in, what recomputation runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_models import catalog
from cost_models.device import FLASH_1_HEADS, DeviceSpec


@dataclass(frozen=True, slots=True)
class Stack:
    """One kind of software."""

    kernels: str
    """Entry of the catalogue: `eager`, `fused` or `compiled`."""

    float32_gradients: bool
    """Whether gradients of bf16 parameters are summed and reduced in float32."""

    overlaps: bool
    """Whether gradients are reduced, and parameters gathered, behind computation where micro-batches come before."""

    gathers_ahead: bool = False
    """Whether what a sharded optimizer made new is gathered behind the next forward (`--overlap-param-gather`)."""

    overlaps_tensor: bool = False
    """Whether gathers and scatters of sequence parallelism run behind the products that they feed or empty."""

    hides_backward: bool = False
    """Whether backward's sums over tensor-parallel ranks run behind the weight gradients of the same layer.

    Megatron-LM since 2022: `LinearWithGradAccumulationAndAsyncCommunication` of megatron/core/tensor_parallel/
    layers.py; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
    """

    gathers_again: bool = False
    """Whether linears keep a rank's own rows of what sequence parallelism gathers, and gather it again in backward.

    For weight gradients, behind the input gradients' product (`LinearWithGradAccumulationAndAsyncCommunication`, as
    above; Transformer Engine's `LayerNormLinear`; nanotron's `tp_recompute_allgather`, on by default). Colossal-AI
    keeps what it gathered (`_MatmulWithGatherForwardReduceScatterBackward`), and so does DTensor.
    """

    gathers_narrow: bool = False
    """Whether what linears gather over tensor-parallel ranks is cast first, where they compute in fp8.

    Transformer Engine's `initialize_ub`: "AllGather buffers use fp8 when using fp8 recipe", scattered sums do not.
    """

    keeps_narrow: bool = False
    """Whether linear layers that compute in fp8 keep what they cast for backward, not what they cast it of.

    Transformer Engine's `_Linear` and `_LayerNormLinear` save the cast input (transformer_engine/pytorch/module), and
    so do HAI-LLM's (DeepSeek-V3's report, section 3.3.3); torchao's float8 saves the input as it is.
    """

    balances: bool = True
    """Whether context parallelism splits positions, each rank's from both ends, or exchanges heads (DeepSpeed)."""

    rings: bool = False
    """Whether keys and values go round the ranks of context parallelism behind attention (Transformer Engine)."""

    joins: bool = False
    """Whether queries, keys and values are one product, and so gate and up of a gated feed-forward."""

    weighs_inside_from: int = 0
    """Year from which experts' activations are multiplied by tokens' weights, in one kernel with them; 0: never.

    What an expert makes is then not kept for backward. Megatron-Core 0.13 of 2025: "moving the probs multiplication
    from unpermutation to activation function of GroupedMLP" (its CHANGELOG.md; `weighted_bias_swiglu_impl`).
    """

    pads: bool = False
    """Whether rows of matrices are padded until they are aligned: vocabularies, or operands by a compiler.

    `make_vocab_size_divisible_by` of Megatron-LM and what comes of it (128 a rank); `pad_mm` of torch.compile; XLA's
    `CublasPadForGemms`; `pad_vocab_size_multiple` of flash-attention's training code (training/configs/experiment).
    nanotron pads a vocabulary to a multiple of its tensor-parallel ranks, and no further.
    """

    joins_exchanges_from: int = 0
    """Year from which a token goes to a node once, however many of its experts are there; 0: never.

    DeepEP and HybridEP, `moe_flex_dispatcher_backend` of Megatron-Bridge's recipes (scripts/performance/configs).
    """

    replays_from: int = 0
    """Year from which layers are replayed as CUDA graphs where NVLink joins whole racks (GB200, GB300); 0: never.

    `cuda_graph_impl` of Megatron-Bridge's recipes (scripts/performance/configs/qwen/qwen3_workload_base_configs.py):
    set for GB200 and GB300, not for the same model on B200, B300 and in fp8 on H100. Part of a layer is left out of
    them; what the host takes is that of compiled runs all the same, for which no row was fitted.
    """

    replays: bool = False
    """Whether they are on every device: what a row says of its run (`cuda_graphs`)."""

    hides_exchanges: bool = False
    """Whether what experts exchange runs behind another micro-batch's computation whatever the schedule (DualPipe).

    Where exchanges are joined otherwise, they do with virtual stages: `overlap_moe_expert_parallel_comm` of
    Megatron-Core needs them, and Megatron-Bridge's recipes set it where experts span nodes (`moe_a2a_overlap`).
    """

    fuses_parts: bool = False
    """Whether a norm, a gated activation and a rotation of positions are a kernel each, forward and backward.

    Transformer Engine's norms; `bias_swiglu_fusion` and `apply_rope_fusion` of Megatron-Core, on by default.
    """

    vendor_attention: bool = False
    """Whether fused attention is that of the device's maker (Transformer Engine and XLA call cuDNN's)."""

    sums_in_products: bool = False
    """Whether products add gradients to their float32 sums themselves (Megatron's `gradient_accumulation_fusion`)."""

    reruns_all: bool = True
    """Whether recomputation runs a whole layer again, or stops at the last value that backward needs."""

    stops_early: bool = False
    """Whether recomputation stops at the last value that backward needs in versions that can (torch 2.1 and later).

    `torch.utils.checkpoint.set_checkpoint_early_stop`, on by default; how FSDP's wrappers recompute.
    """

    per_operator: bool = False
    """Whether selective recomputation goes by operator (torchtitan's) instead of repeating attention's core."""

    saves_products: bool = False
    """Whether selective recomputation keeps matrix products alone: `minimal` of MaxText, `SAVE_DOT_ONLY` of paxml.

    JAX's `dots_with_no_batch_dims_saveable` (jax/_src/ad_checkpoint.py).
    """

    reruns_cheap: bool = False
    """Whether backward computes again what it can fuse, where nothing is said to be recomputed, instead of keeping it.

    torch.compile's partitioner: `min_cut_rematerialization_partition` of torch/_functorch/partitioners.py keeps what
    products and attention make, and of the rest what is least to keep. XLA keeps what its loops over layers return.
    """

    long_sums_without_zero: bool = False
    """Whether gradients of bf16 parameters are in float32 where no ZeRO stage is on (DeepSpeed's `get_data_types`)."""

    long_sums_from_ends: bool = False
    """Whether versions that can count embedding and head as layers have gradients of bf16 parameters in float32.

    Megatron-DeepSpeed got `--pp-partition-method type:transformer|embedding` in the week in which its bf16 became that
    of DeepSpeed's BF16_Optimizer (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, 27 and 28
    February 2022).
    """

    shards_states_from: int = 0
    """Year from which states of bf16 parameters are sharded over replicas where no ZeRO stage is on; 0: never.

    DeepSpeed's BF16_Optimizer, which it takes where gradients of bf16 are summed in float32, as without ZeRO by default
    (runtime/engine.py): `bf16_partitioned_groups`, `all_gather_dp_groups` of runtime/bf16_optimizer.py, spring 2022.
    """

    flat_copies: bool = False
    """Whether gradients are copied into contiguous buffers to be reduced and to update parameters (DeepSpeed)."""

    autocasts: bool = False
    """Whether forward runs under torch.autocast: norms, softmax and losses in float32, casts before and behind.

    Without shards of FSDP, parameters are in float32 then, and so are the values that layers add up, gradients and the
    optimizer's state.
    """

    autocasts_shards: bool = False
    """Whether that is so beside FSDP too, which casts the parameters that it gathers (its `MixedPrecision`)."""

    float32_parameters: bool = False
    """Whether parameters are in float32, and cast where they are read."""

    cross_entropy: str = "torch"
    """Whose kernels compute cross entropy from the logits; empty: one kernel forward and one backward, as compiled.

    `torch`: its own `log_softmax` and `nll_loss`. `vocab_parallel`: Megatron's, operator by operator in float32
    (megatron/core/tensor_parallel/cross_entropy.py, on one rank as on several; gpt-neox has the same).
    `vocab_parallel_fused`: the same in few compiled kernels (megatron/core/fusions/fused_cross_entropy.py). `composer`:
    flash-attn's on logits of 16 bits, the default of llm-foundry's MPT, and after backward its two training metrics,
    each the cross entropy again in float32 (composer/trainer, "Use microbatch outputs to update training metrics").
    `flash`: that kernel alone (src/losses/cross_entropy_apex.py of flash-attention's training code, in place).
    """

    compiles_loss_from: int = 0
    """Year from which torch.compile takes in the loss; before it, layers alone.

    torchtitan of 2024: "compiling loss function causes CUDA errors, turning off for now" (its train.py).
    """

    short_gradients_from: int = 0
    """Year from which gradients are summed and reduced in the type of the parameters after all; 0: never.

    `grad_sync_dtype=bf16` in the launcher scripts of NeMo-Framework-Launcher (examples/training/*/h100), later
    `grad_reduce_in_fp32 = False` in the recipes of NeMo 2 and Megatron-Bridge.
    """

    core_from: int = 0
    """Year from which it runs as Megatron-Core by that name; 0: never.

    Megatron-LM of 2024: `--transformer-impl transformer_engine` became its default, then models of `megatron.core`.
    """

    @property
    def keeps_short_logits(self) -> bool:
        """Return whether the loss reads logits of 16 bits as they are, and nothing casts them before."""
        return self.cross_entropy in {"composer", "flash"}

    @property
    def reruns_loss(self) -> bool:
        """Return whether backward makes the loss's softmax again from the logits, of 16 bits, and their sums.

        What torch.compile does where it takes in the loss: log_softmax is taken apart, its maxima and sums are kept,
        and what is left is elementwise, so cheap to make again in the kernel of its gradient (`reruns_cheap`).
        """
        return self.reruns_cheap and not self.cross_entropy

    def at_zero(self, stage: int) -> Stack:
        """Return the stack as it is with a stage of ZeRO, 0: none."""
        autocasts = self.autocasts and (stage < _OF_FSDP or self.autocasts_shards)
        return replace(
            self,
            float32_gradients=self.float32_gradients or (self.long_sums_without_zero and stage == 0),
            autocasts=autocasts,
            float32_parameters=autocasts and stage < _OF_FSDP,
        )

    def without_autocast(self) -> Stack:
        """Return the stack where parameters are of the type that is computed in, and nothing is cast by itself."""
        return replace(self, autocasts=False, float32_parameters=False)

    def of_year(self, year: int) -> Stack:
        """Return the stack as it was then."""
        if 0 < self.core_from <= year:
            core = CORE_ALONE.of_year(year)
            return core if self.kernels == "fused" else replace(core, kernels=self.kernels, cross_entropy="")
        return replace(
            self,
            float32_gradients=self.float32_gradients and not 0 < self.short_gradients_from <= year,
            hides_backward=self.hides_backward and year >= _ASYNCHRONOUS_BACKWARD,
            shards_states_from=self.shards_states_from if year >= self.shards_states_from else 0,
            weighs_inside_from=self.weighs_inside_from if year >= self.weighs_inside_from else 0,
            replays_from=self.replays_from if year >= self.replays_from else 0,
            joins_exchanges_from=self.joins_exchanges_from if year >= self.joins_exchanges_from else 0,
            fuses_parts=self.fuses_parts and year >= _TRANSFORMER_ENGINE,
            reruns_all=self.reruns_all and not (self.stops_early and year >= _EARLY_STOP),
            cross_entropy="torch" if year < self.compiles_loss_from else self.cross_entropy,
        )

    def cut(self, layers: int, stages: int) -> Stack:
        """Return the stack as it must be to run so many layers on so many stages: a version that can."""
        counts_ends = bool(layers % stages) and (layers + 2) % stages == 0
        return replace(self, float32_gradients=self.float32_gradients or (self.long_sums_from_ends and counts_ends))

    def on(self, device: DeviceSpec, year: int) -> DeviceSpec:
        """Return the device as it is in long runs with this software of that year.

        Clocks settle below those of a short benchmark where matrix units draw the power, which plain arithmetic of 32
        and 64 bits does not (cuBLAS reaches 0.97 of an A100's, 0.92 of a V100's, and keeps it); libraries take time to
        use new matrix units well; attention kernels of up to 2023 are the first generation (FlashAttention-2: July
        2023).
        """
        entry, every = catalog.entry("stacks", self.kernels), catalog.entry("stacks", "all")
        sustained = catalog.number(_known(device), "sustained", catalog.number(every, "sustained"))
        if device.released:
            early = catalog.number(every, "early") * max(0.0, 1.0 - (year - device.released) / _MATURE_AFTER_YEARS)
            sustained *= 1.0 - early
        attention, heads = device.attention_efficiency, device.attention_heads
        if self.vendor_attention and device.vendor_attention_efficiency:
            attention, heads = device.vendor_attention_efficiency, ()
        if year <= _FIRST_ATTENTION_KERNELS and device.early_attention_efficiency:
            attention, heads = device.early_attention_efficiency, FLASH_1_HEADS
        replays = self.replays or (0 < self.replays_from <= year and _is_in_racks(device))
        return replace(
            device,
            own_programs=False,
            pads=self.pads,
            host_s=catalog.number(catalog.entry("stacks", "compiled") if replays else entry, "host"),
            fusion=catalog.number(entry, "fusion"),
            fuses_parts=self.fuses_parts,
            sums_in_products=self.sums_in_products,
            cross_entropy=self.cross_entropy,
            matmul_efficiency={dtype: sustained * share for dtype, share in device.matmul_efficiency.items()}
            | {dtype: device.matmul_efficiency_for(dtype) for dtype in _PLAIN},
            default_matmul_efficiency=sustained * device.default_matmul_efficiency,
            matmul_best={
                dtype: share if dtype in _PLAIN else sustained * share for dtype, share in device.matmul_best.items()
            },
            attention_efficiency=attention,
            attention_heads=heads,
        )


def _is_in_racks(device: DeviceSpec) -> bool:
    """Return whether the device is made for racks that NVLink joins."""
    return catalog.number(_known(device), "link_domain", 0) > 0


def _known(device: DeviceSpec) -> Mapping[str, Any]:
    """Return what the catalogue says of a device; nothing of one that a user describes."""
    return catalog.entry("devices", device.catalog) if device.catalog else {}


_PLAIN = ("float32", "float64")
"""Types of products that do not pass through matrix units."""

_MATURE_AFTER_YEARS = 2.0
_FIRST_ATTENTION_KERNELS = 2023
_ASYNCHRONOUS_BACKWARD = 2022
_TRANSFORMER_ENGINE = 2023
"""The first whole year of Transformer Engine; what stacks fused before is in the share that was fitted to them."""

_OF_FSDP = 2
"""The stage of ZeRO from which PyTorch's own is FSDP (its SHARD_GRAD_OP and FULL_SHARD)."""

_EARLY_STOP = 2024
"""The first whole year of torch 2.1 (October 2023)."""


CORE = Stack(
    "fused",
    float32_gradients=True,
    overlaps=True,
    gathers_ahead=True,
    overlaps_tensor=True,
    gathers_again=True,
    gathers_narrow=True,
    keeps_narrow=True,
    rings=True,
    joins=True,
    pads=True,
    fuses_parts=True,
    vendor_attention=True,
    sums_in_products=True,
    cross_entropy="vocab_parallel_fused",
    short_gradients_from=2023,
    weighs_inside_from=2025,
    replays_from=2025,
    joins_exchanges_from=2025,
)
"""Megatron-Core as NeMo's recipes run it: with `--tp-comm-overlap`, off by default, which Transformer Engine does."""

CORE_ALONE = replace(
    CORE,
    overlaps_tensor=False,
    hides_backward=True,
    short_gradients_from=0,
    replays_from=0,
    joins_exchanges_from=0,
)
"""Megatron-Core as its own scripts run it."""
