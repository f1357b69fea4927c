"""What software is called, and which stack it runs: by its name, the more specific first."""

from __future__ import annotations

import re
from dataclasses import replace

from cost_models.stack import CORE, CORE_ALONE, Stack

_PYTORCH = Stack("eager", float32_gradients=False, overlaps=True, stops_early=True, autocasts=True)
"""PyTorch's own operators. Its way of mixed precision is autocast (torch.amp), that of FSDP is `MixedPrecision`."""

_HALVED = r"apex|llm\.c\b|intern(lm|evo)|colossal|fair(seq|scale)|metaseq|olmo|lingua"
"""Software of PyTorch's operators that casts models as a whole instead.

Apex's O2, which NVIDIA's examples of BERT ask for; `NaiveAMPModel` of InternLM; `model.half()` of Colossal-AI's Gemini
and of fairseq; `floatX` of llm.c. OLMo runs under autocast with norms of its own that stay in 16 bits.
"""

_AUTOCASTING = (
    r"lightning|fabric|lit.?gpt|accelerate|hugging|\bhf\b|transformers|axolotl|llama.?factory|\btrl\b|ms.?swift"
)
"""Software that runs forward under autocast beside FSDP as well.

`FSDPPrecision.forward_context` of Lightning (src/lightning/fabric/plugins/precision/fsdp.py); `prepare_model` of
Accelerate, which Hugging Face's Trainer and what builds on it runs (src/accelerate/accelerator.py, `native_amp`).
"""

_TENSORFLOW = Stack(
    "eager", float32_gradients=False, overlaps=True, reruns_all=False, vendor_attention=True, autocasts=True
)
"""TensorFlow, whose rewrite of graphs for mixed precision has autocast's lists but for softmax, which follows products.

tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h: means, sums, powers and losses stay in float32.
"""

_FRAMEWORKS = (
    # Tables of NVIDIA's own recipes call them Megatron-Core with `te`; its own scripts run Transformer Engine unnamed.
    (r"nemo|megatron.?bridge|transformer.?engine|\bte\b", CORE),
    (r"megatron.?core|mcore|primus", CORE_ALONE),
    (
        r"hai.?llm",
        replace(
            CORE_ALONE,
            vendor_attention=False,
            rings=False,
            weighs_inside_from=0,
            joins_exchanges_from=2024,
            hides_exchanges=True,
        ),
    ),
    (
        r"megatron.?deepspeed",
        Stack(
            "fused",
            float32_gradients=False,
            overlaps=False,
            gathers_again=True,
            long_sums_without_zero=True,
            long_sums_from_ends=True,
            shards_states_from=2023,
            flat_copies=True,
            cross_entropy="vocab_parallel",
            pads=True,
        ),
    ),
    (
        r"neox",
        Stack(
            "fused",
            float32_gradients=False,
            overlaps=False,
            long_sums_without_zero=True,
            shards_states_from=2023,
            flat_copies=True,
            cross_entropy="vocab_parallel",
            pads=True,
        ),
    ),
    (
        r"deepspeed",
        Stack(
            "eager",
            float32_gradients=False,
            overlaps=True,
            long_sums_without_zero=True,
            shards_states_from=2023,
            flat_copies=True,
            balances=False,
        ),
    ),
    (
        r"megatron",
        Stack(
            "fused",
            float32_gradients=True,
            overlaps=False,
            joins=True,
            hides_backward=True,
            gathers_again=True,
            cross_entropy="vocab_parallel",
            core_from=2024,
            pads=True,
        ),
    ),
    (
        r"composer|llm.?foundry",
        Stack(
            "eager",
            float32_gradients=False,
            overlaps=True,
            keeps_narrow=True,
            stops_early=True,
            cross_entropy="composer",
        ),
    ),
    (
        r"flash.?att",
        Stack(
            "fused",
            float32_gradients=False,
            overlaps=True,
            joins=True,
            pads=True,
            autocasts=True,
            cross_entropy="flash",
        ),
    ),
    (r"oneflow|libai", Stack("fused", float32_gradients=False, overlaps=True, pads=True)),
    (
        r"nanotron",
        Stack(
            "eager",
            float32_gradients=True,
            overlaps=True,
            gathers_again=True,
            joins=True,
            cross_entropy="vocab_parallel",
        ),
    ),
    (
        r"torchtitan",
        Stack(
            "eager",
            float32_gradients=False,
            overlaps=True,
            reruns_all=False,
            per_operator=True,
            compiles_loss_from=2025,
        ),
    ),
    (
        r"(tensorflow|keras).*xla|xla.*(tensorflow|keras)",
        replace(_TENSORFLOW, kernels="compiled", cross_entropy="", pads=True),
    ),
    (r"tensorflow|keras", _TENSORFLOW),
    (
        r"maxtext|\bpax|paxml|jax|xla|flax|levanter|marin|easylm|t5x|praxis|\balpa\b",
        Stack(
            "compiled",
            float32_gradients=False,
            overlaps=True,
            reruns_all=False,
            saves_products=True,
            pads=True,
            vendor_attention=True,
            cross_entropy="",
        ),
    ),
    (_HALVED, _PYTORCH.without_autocast()),
    (_AUTOCASTING, replace(_PYTORCH, autocasts_shards=True)),
    (r"fsdp", _PYTORCH.without_autocast()),
)
"""What a framework's name contains, the more specific first. What runs under JAX is compiled by XLA, always."""


def pytorch() -> Stack:
    """Return PyTorch's own operators, sharded by FSDP or DDP."""
    return _PYTORCH


_RUNS_PYTORCH = (
    r"torch|fsdp|ddp|lightning|accelerate|hugging|\bhf\b|transformers|axolotl|lit.?gpt|nanogpt|olmo|lingua"
    r"|llama.?factory|\btrl\b|ms.?swift|xtuner|fair(seq|scale)|metaseq|colossal|intern(lm|evo)|open.?clip|\btimm\b"
)
"""What a framework's name contains that is plain PyTorch by its name, or runs its operators one by one."""


def is_known(framework: str) -> bool:
    """Return whether a framework's name says what it runs; PyTorch's own operators are assumed of all others."""
    return any(re.search(pattern, framework.lower()) for pattern in (*(each for each, _ in _FRAMEWORKS), _RUNS_PYTORCH))


def stack_of(framework: str, compiled: bool) -> Stack:
    """Return the stack of a framework, given whether torch.compile ran; PyTorch's own where the name says nothing."""
    found = next((each for pattern, each in _FRAMEWORKS if re.search(pattern, framework.lower())), pytorch())
    if not compiled:
        return found
    return replace(found, kernels="compiled", cross_entropy="", reruns_cheap=found.kernels != "compiled", pads=True)
