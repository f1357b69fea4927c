"""A row of published training steps, for tests to change."""

ROW = {
    "id": "one", "source": "somebody", "framework": "megatron-lm", "year": "2021", "device": "a100-sxm-80gb",
    "gpus": "64", "gpus_per_node": "8", "intra_node_GB_per_s_per_gpu": "300", "inter_node_Gbit_per_s_per_node": "1600",
    "fabric_note": "8x200 Gbit/s InfiniBand", "model": "GPT", "family": "gpt", "layers": "4", "hidden": "1024",
    "heads": "16", "kv_heads": "16", "ffn_hidden": "4096", "vocab": "51200", "seq_len": "512", "precision": "bf16",
    "dp": "4", "tp": "8", "pp": "2", "interleave": "1", "sequence_parallel": "no", "zero": "0", "micro_batch": "1",
    "global_batch": "32", "recompute": "full", "compiled": "no", "attention": "unfused", "measured_step_s": "1.5",
    "measured_peak_gib": "",
}  # fmt: skip
