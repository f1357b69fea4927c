"""Models, clusters and batches on which free plans are held against recipes, and the sizes an expert would try."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


def _cluster(name: str, *groups: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the cluster file of so many nodes of each kind."""
    return {
        "version": 1,
        "name": name,
        "nodes": {f"node{place}": node for place, (_, node) in enumerate(groups)},
        "groups": [{"node": f"node{place}", "count": count} for place, (count, _) in enumerate(groups)],
    }


def _node(device: str, count: int, gbit_per_s: int, latency_us: int, links: str = "") -> dict[str, Any]:
    """Return a node that is no preset."""
    joined = {"links": {"preset": links}} if links else {}
    nic = {"bandwidth": f"{gbit_per_s}Gbit/s", "latency": f"{latency_us}us"}
    return {"device": device, "count": count, **joined, "nic": nic}


def _hgx(gbit_per_s: int, latency_us: int) -> dict[str, Any]:
    return {"preset": "dgx-a100-80gb", "nic": {"bandwidth": f"{gbit_per_s}Gbit/s", "latency": f"{latency_us}us"}}


_ETHERNET = _cluster("8x8 A100 on 25 Gbit/s", (8, _hgx(25, 25)))
_MIXED = _cluster("2 DGX H100 beside 2 DGX A100", (2, {"preset": "dgx-h100"}), (2, {"preset": "dgx-a100-80gb"}))
_OLDER = _cluster(
    "2 nodes of 8 L4 beside 2 nodes of 4 T4",
    (2, _node("l4", 8, 25, 20, "pcie4-host-bounce")),
    (2, _node("t4", 4, 25, 20, "pcie4-host-bounce")),
)
_SINGLES = _cluster("16 hosts of one L4 on 25 Gbit/s", (16, _node("l4", 1, 25, 20)))
_THREE = _cluster("3x8 A100 on 100 Gbit/s", (3, _hgx(100, 5)))
_SIX_V100 = _cluster("4 nodes of 6 V100", (4, _node("v100-32gb", 6, 200, 3, "nvlink2-switch")))
_SIX_A100 = _cluster("3 nodes of 6 A100 on 100 Gbit/s", (3, _node("a100-sxm-80gb", 6, 100, 5, "nvlink3")))
_TRIPLES = _cluster("4 nodes of 3 A100 on 10 Gbit/s", (4, _node("a100-sxm-80gb", 3, 10, 30, "nvlink3")))
_TWO_A100 = _cluster("2x8 A100 on 100 Gbit/s", (2, _hgx(100, 10)))
_GENERATIONS = _cluster(
    "8 A100 beside 2 nodes of 8 V100 on 100 Gbit/s",
    (1, _node("a100-sxm-40gb", 8, 100, 5, "nvlink3")),
    (2, _node("v100-32gb", 8, 100, 5, "nvlink2-switch")),
)
_SLOW = _cluster("4 nodes of 4 A10G on 10 Gbit/s", (4, _node("a10g", 4, 10, 30, "pcie4-host-bounce")))
_L40S = _cluster("4 nodes of 8 L40S on 100 Gbit/s", (4, _node("l40s", 8, 100, 5, "pcie4-host-bounce")))
_H100_L40S = _cluster(
    "1 DGX H100 beside 3 nodes of 4 L40S on 200 Gbit/s",
    (1, {"preset": "dgx-h100"}),
    (3, _node("l40s", 4, 200, 5, "pcie4-host-bounce")),
)
_3090 = _cluster("6 hosts of two RTX 3090 on 10 Gbit/s", (6, _node("rtx-3090", 2, 10, 30, "pcie4-host-bounce")))
_64_ETHERNET = _cluster("64x8 A100 on 100 Gbit/s", (64, _hgx(100, 10)))
_MIXED_48 = _cluster("16 DGX H100 beside 32 DGX A100", (16, {"preset": "dgx-h100"}), (32, {"preset": "dgx-a100-80gb"}))
_4090 = _cluster("4 nodes of 4 RTX 4090 on 10 Gbit/s", (4, _node("rtx-4090", 4, 10, 30, "pcie4-host-bounce")))
_MANY: dict[str, Any] = {"tp": 8, "pps": (4, 8)}


@dataclass(frozen=True)
class Point:
    """What is planned, and the sizes with which an expert would try the recipes."""

    model: str
    cluster: str | dict[str, Any]
    batch: int
    seq: int | None = None
    precision: str = "bf16"
    tp: int = 2
    """Ranks along which tensors are split, in the recipes that split them."""

    pps: tuple[int, ...] = ()
    """Pipeline ranks, in those that have stages."""

    cps: tuple[int, ...] = ()
    eps: tuple[int, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    """Samples of a micro-batch, in the recipes that cut the batch in time."""

    set: dict[str, str] = field(default_factory=dict)


_WHISPER = {
    "d_model": "1280", "encoder_layers": "32", "decoder_layers": "32", "encoder_attention_heads": "20",
    "decoder_attention_heads": "20", "encoder_ffn_dim": "5120", "decoder_ffn_dim": "5120",
}  # fmt: skip
_MAMBA = {"hidden_size": "2560", "num_hidden_layers": "64", "num_heads": "80", "head_dim": "64"}
_WIDE = {"layers": "4", "hidden": "16384", "heads": "128"}
_T5_3B = {"heads": "32", "head_size": "128", "intermediate": "16384"}
_VIT_G = {"layers": "40", "hidden": "1408", "heads": "16", "intermediate": "6144"}
_QWEN_32B = {
    "hidden_size": "5120", "num_hidden_layers": "64", "intermediate_size": "27648", "num_attention_heads": "40",
    "num_key_value_heads": "8",
}  # fmt: skip
_FINE_EXPERTS = {"layers": "16", "experts": "64", "intermediate": "3584"}
_NEOX_20B = {
    "hidden_size": "6144", "num_hidden_layers": "44", "num_attention_heads": "64", "intermediate_size": "24576",
}  # fmt: skip
_FALCON_40B = {
    "hidden_size": "8192", "num_hidden_layers": "60", "num_attention_heads": "128", "num_kv_heads": "8",
    "new_decoder_architecture": "true",
}  # fmt: skip
_530B = {"layers": "105", "hidden": "20480", "heads": "128"}
_340B = {
    "layers": "96",
    "hidden": "18432",
    "heads": "96",
    "kv_heads": "8",
    "intermediate": "73728",
    "vocab": "256000",
    "positions": "4096",
}
_1T = {"layers": "128", "hidden": "25600", "heads": "160"}
_GROK = {"layers": "64", "hidden": "6144", "heads": "48", "intermediate": "32768", "vocab": "131072"}
_KIMI = {
    "n_routed_experts": "384",
    "num_attention_heads": "64",
    "num_key_value_heads": "64",
    "n_group": "1",
    "topk_group": "1",
}
_QWEN_235B = {
    "hidden_size": "4096", "num_hidden_layers": "94", "num_attention_heads": "64", "moe_intermediate_size": "1536",
}  # fmt: skip
_VIT_22B = {"layers": "48", "hidden": "6144", "heads": "48", "intermediate": "24576"}
_T5_11B = {"heads": "128", "head_size": "128", "intermediate": "65536"}
_BLOOM_7B = {"hidden_size": "4096", "n_layer": "30", "n_head": "32"}

POINTS = {
    "gpt2-8h100": Point("zoo:gpt2", "dgx-h100", 64, 1024, pps=(2,), sizes=(4,)),
    "gpt2-laptop": Point("zoo:gpt2", "cpu:4", 8, 256, "fp32", pps=(2, 4), sizes=(1, 2)),
    "bert-8l4": Point("zoo:bert-large", "l4:8", 256, 512, pps=(2,), sizes=(4, 8)),
    "bert-2x4090": Point("zoo:bert-large", "workstation-2x4090", 32, 512, pps=(2,), sizes=(2, 4)),
    "vit-ethernet": Point("zoo:vit-h", _ETHERNET, 512, pps=(2, 8), sizes=(2, 8)),
    "t5-32h100": Point("zoo:t5-large", "dgx-h100x4", 256, 512, pps=(2,), sizes=(4,)),
    "resnet-8l4": Point("zoo:resnet50", "l4:8", 512),
    "unet-8h100": Point("benchmarks.folklore_points:unet", "dgx-h100", 64, pps=(2,), sizes=(2,)),
    "1b-2x4090": Point("zoo:llama3-1b", "workstation-2x4090", 8, 2048, pps=(2,)),
    "1b-long": Point("zoo:llama3-1b", "dgx-h100", 8, 32768, cps=(2, 8), pps=(2,), sizes=(1,)),
    "8b-8h100": Point("zoo:llama3-8b", "dgx-h100", 32, 8192, tp=4, pps=(2,)),
    "8b-32h100": Point("zoo:llama3-8b", "dgx-h100x4", 128, 8192, tp=4, pps=(2, 4)),
    "8b-32k": Point("zoo:llama3-8b", "dgx-h100x4", 8, 32768, tp=8, pps=(2, 4), cps=(2, 4, 8), sizes=(1,)),
    "8b-131k": Point("zoo:llama3-8b", "dgx-h100x4", 4, 131072, tp=8, pps=(2, 4), cps=(2, 4, 8), sizes=(1,)),
    "8b-mixed": Point("zoo:llama3-8b", _MIXED, 128, 4096, tp=4, pps=(2, 4)),
    "8b-ethernet": Point("zoo:llama3-8b", _ETHERNET, 256, 4096, tp=8, pps=(2, 8)),
    "70b-128h100": Point("zoo:llama3-70b", "dgx-h100x16", 128, 8192, **_MANY),
    "70b-512a100": Point("zoo:llama3-70b", "dgx-a100-80gbx64", 1024, 4096, **_MANY),
    "70b-131k": Point("zoo:llama3-70b", "dgx-h100x16", 4, 131072, **_MANY, cps=(4, 8, 16), sizes=(1,)),
    "mixtral-32h100": Point("zoo:mixtral-8x7b", "dgx-h100x4", 128, 4096, eps=(8,), pps=(4,), tp=4),
    "deepseek-32h100": Point("zoo:deepseek-v2-lite", "dgx-h100x4", 256, 4096, eps=(8, 32), pps=(2,)),
    "gpt13b-64a100": Point("zoo:gpt3-13b", "dgx-a100-80gbx8", 256, 2048, tp=4, pps=(2, 4, 8)),
    "llama2-70b-64h100": Point("zoo:llama2-70b", "dgx-h100x8", 128, 4096, tp=8, pps=(2, 4), sizes=(1,)),
    "llama2-7b-16a100": Point("zoo:llama2-7b", "dgx-a100-40gbx2", 64, 4096, tp=4, pps=(2, 4)),
    "gpt2xl-8v100": Point("zoo:gpt2-xl", "dgx-1-v100", 64, 1024, "fp16", tp=4, pps=(2, 4)),
    "gpt6.7b-24a100": Point("zoo:gpt3-6.7b", _THREE, 96, 2048, pps=(3, 6)),
    "llama1b-16l4": Point("zoo:llama3-1b", _SINGLES, 128, 2048, pps=(2, 4, 8)),
    "mixtral22b-64h100": Point("zoo:mixtral-8x22b", "dgx-h100x8", 128, 4096, tp=4, pps=(4, 8), eps=(8,), sizes=(1,)),
    "llama8b-16h200": Point("zoo:llama3-8b", "p5enx2", 512, 8192, pps=(2,)),
    "bert-16t4": Point("zoo:bert-large", "t4:4x4", 256, 512, "fp16", pps=(2, 4), sizes=(2, 4)),
    "405b-512h100": Point("zoo:llama3-405b", "dgx-h100x64", 512, 8192, tp=8, pps=(8, 16), sizes=(1,)),
    "qwen3moe-16h100": Point("hf:qwen3_moe", "dgx-h100x2", 64, 4096, eps=(8, 16), pps=(2, 4)),
    "vit-4x4090": Point("zoo:vit-h", "workstation-4x4090", 64, pps=(2, 4), sizes=(2, 4)),
    "whisper-12a100": Point("hf:whisper", _TRIPLES, 96, 448, tp=3, pps=(2, 4), sizes=(2, 4), set=_WHISPER),
    "dit-24v100": Point("benchmarks.folklore_points:dit", _SIX_V100, 192, None, "fp16", pps=(2, 4), sizes=(2, 4)),
    "dlrm-8a100": Point("benchmarks.folklore_points:dlrm", "dgx-a100-80gb", 65536, None, tp=8),
    "8b-131k-16a100": Point("zoo:llama3-8b", _TWO_A100, 2, 131072, tp=8, pps=(2,), cps=(2, 8), sizes=(1,)),
    "mamba2-8h100": Point("hf:mamba2", "dgx-h100", 64, 2048, pps=(2, 4), set=_MAMBA),
    "1b-older": Point("zoo:llama3-1b", _OLDER, 48, 2048, "fp16", pps=(2, 4, 8)),
    "llama2-13b-18a100": Point("zoo:llama2-13b", _SIX_A100, 72, 4096, pps=(3, 6)),
    "gpt175b-1024h100": Point("zoo:gpt3-175b", "dgx-h100x128", 2048, 2048, tp=8, pps=(4, 8, 16), sizes=(1, 2)),
    "widegpt-16h100": Point("zoo:gpt3-13b", "dgx-h100x2", 64, 2048, tp=8, pps=(2,), sizes=(1,), set=_WIDE),
    "t5-3b-16a100": Point("zoo:t5-large", "hgx-a100-40gb-4gpux4", 128, 512, tp=4, pps=(2,), sizes=(4,), set=_T5_3B),
    "vitg-8a10g": Point("zoo:vit-h", "a10g:8", 256, pps=(4,), sizes=(4,), set=_VIT_G),
    "mixtral64-32a100": Point(
        "zoo:mixtral-8x7b", "dgx-a100-80gbx4", 128, 2048, tp=4, pps=(4,), eps=(8, 32), sizes=(1,), set=_FINE_EXPERTS
    ),
    "13b-8pcie": Point("zoo:llama2-13b", "a100-pcie-80gb:8", 64, 4096, pps=(4,), sizes=(1,)),
    "6.7b-generations": Point("zoo:gpt3-6.7b", _GENERATIONS, 96, 2048, "fp16", tp=4, pps=(3,), sizes=(1,)),
    "1.3b-slow": Point("zoo:gpt3-1.3b", _SLOW, 64, 2048, tp=4, pps=(4,), sizes=(1,)),
    "1b-8x16gb": Point("zoo:llama3-1b", "a4000:8", 32, 4096, pps=(4,), sizes=(1,)),
    "70b-16mi300x": Point("zoo:llama3-70b", "mi300x-platformx2", 64, 8192, tp=8, pps=(2,), sizes=(1,)),
    "32b-40h100": Point("hf:qwen2", "dgx-h100x5", 80, 8192, tp=4, pps=(5,), sizes=(1,), set=_QWEN_32B),
    "clip-16a100": Point("hf:clip", "dgx-a100-80gbx2", 2048, 77),
    "olmoe-8a100": Point("hf:olmoe", "dgx-a100-80gb", 64, 4096, pps=(2,), eps=(8,), sizes=(1,)),
    "glm-64h100": Point("hf:glm4_moe", "dgx-h100x8", 128, 4096, tp=8, pps=(8,), eps=(8,), sizes=(1,)),
    "deepseekv3-256h100": Point("hf:deepseek_v3", "dgx-h100x32", 1024, 4096, tp=8, pps=(16,), eps=(32,), sizes=(1,)),
}

BLIND = {
    "8b-8b200": Point("zoo:llama3-8b", "dgx-b200", 64, 8192, pps=(2,)),
    "70b-32h200": Point("zoo:llama3-70b", "dgx-h200x4", 64, 4096, tp=8, pps=(2, 4), sizes=(1,)),
    "neox-48a100": Point("hf:gpt_neox", "dgx-a100-40gbx6", 192, 2048, tp=8, pps=(3, 6), set=_NEOX_20B),
    "qwen3moe-32a100": Point("hf:qwen3_moe", "p4dex4", 128, 4096, eps=(8, 32), pps=(2, 4), sizes=(1,)),
    "8b-32l40s": Point("zoo:llama3-8b", _L40S, 64, 4096, tp=4, pps=(4, 8), sizes=(1,)),
    "gpt2xl-12x3090": Point("zoo:gpt2-xl", _3090, 96, 1024, tp=2, pps=(2, 6), sizes=(1, 2)),
    "vith-32v100": Point("zoo:vit-h", "dgx-1-v100x4", 1024, None, "fp16", pps=(2, 4), sizes=(2, 4)),
    "gemma3-16h100": Point("hf:gemma3_text", "dgx-h100x2", 64, 4096, tp=4, pps=(2,), sizes=(1,)),
    "mixtral-8mi300x": Point("zoo:mixtral-8x7b", "mi300x-platform", 32, 4096, eps=(8,), pps=(2,), sizes=(1,)),
    "gptoss-32h100": Point("hf:gpt_oss", "dgx-h100x4", 128, 4096, tp=4, eps=(8, 32), pps=(4,), sizes=(1,)),
    "8b-h100l40s": Point("zoo:llama3-8b", _H100_L40S, 40, 8192, tp=4, pps=(2, 5), sizes=(1,)),
    "bloom7b-16a100": Point("hf:bloom", "hgx-a100-40gb-4gpux4", 64, 2048, tp=4, pps=(2, 4), set=_BLOOM_7B),
    "falcon40b-64a100": Point("hf:falcon", "dgx-a100-80gbx8", 256, 2048, tp=8, pps=(4, 8), sizes=(1,), set=_FALCON_40B),
    "t5-8l4": Point("zoo:t5-large", "l4:8", 64, 512, pps=(2, 4), sizes=(2,)),
    "resnet-32h100": Point("zoo:resnet50", "dgx-h100x4", 4096),
    "bert-16cpu": Point("zoo:bert-large", "cpu:4x4", 32, 256, "fp32", tp=4, pps=(4, 8), sizes=(1, 2)),
    "1b-16v5e": Point("zoo:llama3-1b", "tpu-v5e:4x4", 64, 4096, tp=4, pps=(2, 4), sizes=(1,)),
    "gpt175b-96h100": Point("zoo:gpt3-175b", "dgx-h100x12", 192, 2048, tp=8, pps=(6, 12), sizes=(1, 2)),
    "8b-524k": Point("zoo:llama3-8b", "dgx-h100x8", 1, 524288, tp=8, cps=(4, 8), pps=(2,), sizes=(1,)),
    "mamba-8a100": Point("hf:mamba2", "dgx-a100-80gb", 64, 4096, pps=(2,), sizes=(1, 2), set=_MAMBA),
    "70b-24h20": Point("zoo:llama3-70b", "h20-96gb:8x3", 96, 4096, tp=8, pps=(3, 6), sizes=(1,)),
    "gpt2-6t4": Point("zoo:gpt2", "t4:1x6", 48, 1024, "fp16", pps=(2, 3, 6), sizes=(1, 2, 4)),
}
"""Points that were all written down before any of them was planned: nothing was mended for one of them."""

LARGE = {
    "405b-16384h100": Point("zoo:llama3-405b", "dgx-h100x2048", 2048, 8192, tp=8, pps=(16,), sizes=(1,)),
    "405b-2048h100": Point("zoo:llama3-405b", "dgx-h100x256", 1024, 8192, tp=8, pps=(8, 16), sizes=(1,)),
    "70b-2048h100": Point("zoo:llama3-70b", "dgx-h100x256", 2048, 8192, tp=8, pps=(4,), sizes=(1,)),
    "70b-4096a100": Point("zoo:llama3-70b", "dgx-a100-80gbx512", 1024, 4096, tp=8, pps=(4,), sizes=(1,)),
    "gpt175b-3072a100": Point("zoo:gpt3-175b", "dgx-a100-80gbx384", 1536, 2048, tp=8, pps=(8,), sizes=(1,)),
    "gpt530b-2240a100": Point("zoo:gpt3-175b", "dgx-a100-80gbx280", 1920, 2048, tp=8, pps=(35,), sizes=(1,), set=_530B),
    "deepseekv3-2048h100": Point("hf:deepseek_v3", "dgx-h100x256", 8192, 4096, tp=8, eps=(8, 64), sizes=(1,)),
}
"""Thousands of devices."""

LARGE_BLIND = {
    "nemotron-768h100": Point("zoo:gpt3-175b", "dgx-h100x96", 768, 4096, tp=8, pps=(12,), sizes=(1,), set=_340B),
    "grok-1024h100": Point(
        "zoo:mixtral-8x22b", "dgx-h100x128", 1024, 8192, tp=8, pps=(8,), eps=(8,), sizes=(1,), set=_GROK
    ),
    "kimi-1024h200": Point("hf:deepseek_v3", "dgx-h200x128", 4096, 4096, tp=8, eps=(8, 32), sizes=(1,), set=_KIMI),
    "qwen235b-128b200": Point(
        "hf:qwen3_moe", "dgx-b200x16", 512, 4096, tp=4, pps=(4,), eps=(8, 32), sizes=(1,), set=_QWEN_235B
    ),
    "70b-288gb200": Point("zoo:llama3-70b", "gb200:4x72", 576, 8192, tp=4, pps=(4,), sizes=(1,)),
    "8b-1024h100": Point("zoo:llama3-8b", "dgx-h100x128", 1024, 8192, tp=4, pps=(2,), sizes=(1,)),
    "8b-512ethernet": Point("zoo:llama3-8b", _64_ETHERNET, 1024, 4096, tp=8, pps=(4,), sizes=(1,)),
    "vit22b-512a100": Point("zoo:vit-h", "dgx-a100-80gbx64", 4096, tp=8, pps=(4,), sizes=(4,), set=_VIT_22B),
    "dlrm-64a100": Point("benchmarks.folklore_points:dlrm", "dgx-a100-80gbx8", 524288, tp=8),
    "8b-1m": Point("zoo:llama3-8b", "dgx-h100x32", 1, 1048576, tp=8, cps=(32,), pps=(2,), sizes=(1,)),
    "405b-131k": Point("zoo:llama3-405b", "dgx-h100x128", 64, 131072, tp=8, cps=(16,), pps=(16,), sizes=(1,)),
    "gpt1t-3072a100": Point("zoo:gpt3-175b", "dgx-a100-80gbx384", 3072, 2048, tp=8, pps=(32, 64), sizes=(1,), set=_1T),
    "t5-11b-256v100": Point(
        "zoo:t5-large", "dgx-1-v100x32", 1024, 512, "fp16", tp=8, pps=(2,), sizes=(4,), set=_T5_11B
    ),
    "70b-mixed": Point("zoo:llama3-70b", _MIXED_48, 768, 4096, tp=8, pps=(3, 4), sizes=(1,)),
    "mixtral-512v5p": Point("zoo:mixtral-8x7b", "tpu-v5p:4x128", 1024, 4096, tp=4, pps=(4,), eps=(8,), sizes=(1,)),
    "llama4-512h100": Point("hf:llama4_text", "dgx-h100x64", 1024, 8192, tp=8, pps=(4,), eps=(16,), sizes=(1,)),
    "13b-16x4090": Point("zoo:llama2-13b", _4090, 32, 4096, tp=4, pps=(4, 8), sizes=(1,)),
    "bert-512a100": Point("zoo:bert-large", "dgx-a100-80gbx64", 8192, 512, pps=(2,), sizes=(8,)),
}
"""Hundreds and thousands of devices, all written down before any was planned."""

POINTS |= BLIND | LARGE | LARGE_BLIND


def unet(batch: int = 64) -> Any:
    """Return a U-Net of the width and depth of the first ones, and images of 256 x 256 with labels."""
    from benchmarks.unet import UNet

    images = torch.empty(batch, 3, 256, 256)
    return UNet(width=64, levels=4), (images, torch.zeros(batch, 256, 256, dtype=torch.long))


def dit(batch: int = 192) -> Any:
    """Return a diffusion transformer of the sizes of DiT-XL/2, and latents of 32 x 32."""
    from benchmarks.diffusion import Denoiser

    with torch.device("meta"):
        return Denoiser(width=1152, layers=28, heads=16, side=32), {
            "image": torch.empty(batch, 4, 32, 32),
            "noise": torch.empty(batch, 4, 32, 32),
            "time": torch.empty(batch),
            "label": torch.zeros(batch, dtype=torch.long),
        }


def dlrm(batch: int = 65536) -> Any:
    """Return a recommender with 26 tables of a million rows of 128, as MLPerf's has them but smaller, and clicks."""
    from benchmarks.recommender import Clicks

    with torch.device("meta"):
        return Clicks(), {
            "dense": torch.empty(batch, 13),
            "categories": torch.zeros(batch, 26, dtype=torch.long),
            "clicked": torch.empty(batch, 1),
        }
