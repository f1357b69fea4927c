"""What `benchmarks.equivalence` runs: models, meshes, and what each kind of plan fixes on them."""

from __future__ import annotations

from typing import Any

MODELS = ("mlp", "unet", "llama", "gpt2", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "whisper")
MESHES = {"2": (1, 2), "4": (1, 4), "2x2": (2, 2), "8": (1, 8)}
"""Nodes, and ranks of each."""

Fix = dict[str, int | str]

PLANS: dict[str, dict[str, Fix]] = {
    "free": {"2": {}, "4": {}, "2x2": {"dp_shard": 2}},
    "tp": {"2": {"tp": 2}, "4": {"tp": 4}, "2x2": {"dp_replicate": 2, "tp": 2}},
    "dp": {"2": {"dp_replicate": 2}, "4": {"dp_replicate": 4}, "2x2": {"dp_replicate": 2, "dp_shard": 2, "zero": 1}},
    "sharding": {
        "2": {"dp_shard": 2, "zero": 3},
        "4": {"dp_shard": 4, "zero": 3},
        "2x2": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    },
    "micro": {"2": {"dp_replicate": 2, "microbatch": 2}, "4": {"tp": 4, "microbatch": 4}},
    "micro-zero1": {"2": {"dp_shard": 2, "zero": 1, "microbatch": 2}},
    "micro-zero2": {"2": {"dp_shard": 2, "zero": 2, "microbatch": 2}},
    "micro-zero3": {"2": {"dp_shard": 2, "zero": 3, "microbatch": 2}},
    "gpipe": {
        "2": {"pp": 2, "schedule": "gpipe", "microbatch": 4},
        "4": {"pp": 4, "schedule": "gpipe", "microbatch": 2},
    },
    "1f1b": {
        "2": {"pp": 2, "schedule": "1f1b", "microbatch": 4},
        "4": {"pp": 4, "schedule": "1f1b", "microbatch": 2},
    },
    "interleaved": {
        "2": {"pp": 2, "schedule": "interleaved_1f1b", "interleave": 2, "microbatch": 4},
        "4": {"pp": 4, "schedule": "interleaved_1f1b", "interleave": 2, "microbatch": 2},
    },
    "zb_h1": {
        "2": {"pp": 2, "schedule": "zb_h1", "microbatch": 4},
        "4": {"pp": 4, "schedule": "zb_h1", "microbatch": 2},
    },
    "zbv": {
        "2": {"pp": 2, "schedule": "zbv", "interleave": 2, "microbatch": 4},
        "4": {"pp": 4, "schedule": "zbv", "interleave": 2, "microbatch": 2},
    },
    "pp-dp": {
        "4": {"pp": 2, "dp_replicate": 2, "microbatch": 2},
        "8": {"pp": 4, "dp_replicate": 2, "microbatch": 1},
    },
    "pp-tp": {"4": {"pp": 2, "tp": 2, "microbatch": 4}, "8": {"pp": 4, "tp": 2, "microbatch": 2}},
    "pp-dp-tp": {"8": {"pp": 2, "dp_shard": 2, "zero": 3, "tp": 2, "microbatch": 2}},
}
"""What each kind of plan fixes on the meshes on which it is run. Micro-batches are no multiple of the stages, but in
`pp-tp` on 8 ranks; with `dp` inside, each replica has so many."""

_NEVER = {"resnet": {name for name in PLANS if name not in {"free", "tp", "dp", "sharding"}}}
"""BatchNorm's statistics are those of the whole batch: plans that cut the batch in time are refused."""

_STACKS = {
    "gpt2": ("n_layer",),
    "t5": ("num_layers", "num_decoder_layers"),
    "whisper": ("encoder_layers", "decoder_layers"),
}
"""Settings that say how many layers there are, where it is not `num_hidden_layers` alone."""

_IN_TIME_BATCH = 12
"""Samples of a step in micro-batches: 3, 4, 6 and 12 of them are possible."""


def cases(models: list[str], meshes: list[str], plans: list[str]) -> list[tuple[str, str, str]]:
    """Return the model, mesh and plan of every case there is of those asked for."""
    return [
        (name, mesh, plan)
        for name in models
        for plan in plans
        for mesh in meshes
        if mesh in PLANS[plan] and plan not in _NEVER.get(name, ())
    ]


def size_of(fix: Fix) -> tuple[int, int]:
    """Return the samples of a step and the blocks of the model under a plan; 0: as many as the model usually has."""
    batch = _IN_TIME_BATCH if "microbatch" in fix else 0
    return batch, 2 * int(fix.get("interleave", 1)) * max(2, int(fix["pp"]) // 2) if "pp" in fix else 0


def build(name: str, batch: int = 0, blocks: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return a model in training mode and its keyword arguments, equal on every rank."""
    if name == "mlp":
        from benchmarks.testbed.scenarios import Scenario

        # With the first seed an input of a ReLU is 2e-8 after a step, whose sign is rounding's: 7 % of a gradient.
        model, (x, y) = Scenario(width=64, depth=max(4, blocks), batch=batch or 16).build(seed=2)
        return model.train(), {"x": x, "y": y}
    if name == "unet":
        from benchmarks.unet import example

        return example(batch or 8, levels=max(2, blocks // 2))
    from autopar.models.hf_tiny import BATCH, tiny

    stacks = _STACKS.get(name, ("num_hidden_layers",))
    settings: dict[str, Any] = {key: blocks // len(stacks) for key in stacks} if blocks else {}
    return tiny(name, batch=batch or BATCH, **settings)


def cluster_of(mesh: str) -> Any:
    """Return slow cores with fast links: there splitting pays for small models, which free plans else replicate."""
    from cost_models.cluster import ClusterSpec

    nodes, ranks = MESHES[mesh]
    node: dict[str, Any] = {"device": "slow", "count": ranks, "links": _link("20GB/s"), "nic": _link("10GB/s")}
    rate = {"preset": "cpu", "compute": {"fp32": "1GFLOP/s"}, "memory": {"bandwidth": "1GB/s"}}
    return ClusterSpec.from_dict(
        {
            "version": 1,
            "name": f"slow-cores-{mesh}",
            "devices": {"slow": rate},
            "nodes": {"host": node},
            "groups": [{"node": "host", "count": nodes}],
        }
    )


def _link(bandwidth: str) -> dict[str, str]:
    return {"bandwidth": bandwidth, "latency": "0us", "call_overhead": "1us"}
