"""A fine-tuning loop of Hugging Face Llama on four CPU ranks: unchanged but for one line.

    torchrun --nproc-per-node 4 examples/hf_llama.py

The model is small and starts from random weights, the tokens are synthetic; with `from_pretrained` and a data loader
in their places the loop is the same. The line is the call of `autopar.compile`.
"""

import os

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)


def tokens(samples: int = 32, seq: int = 32):
    """Return samples of counting in steps of 1 to 8: something that a small model can learn."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(CONFIG.vocab_size, (samples, 1), generator=generator)
    stride = torch.randint(1, 9, (samples, 1), generator=generator)
    return [{"input_ids": row, "labels": row} for row in (start + stride * torch.arange(seq)) % CONFIG.vocab_size]


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    loader = DataLoader(tokens(), batch_size=8)

    # the one line
    model = autopar.compile(model, f"cpu:{os.environ.get('WORLD_SIZE', '1')}", example_inputs=next(iter(loader)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for epoch in range(3):
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if os.environ.get("RANK", "0") == "0":
                print(f"epoch {epoch} step {step} loss {loss.item():.6f}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
