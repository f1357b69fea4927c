"""Programs of other families than the testbed's five: plain modules that return a loss from one global batch.

Nothing in the cost model, the search or the calibration was made with them. Each takes about a second a step on one
core, so that two hosts at 1 Gbit/s have something to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Residual(nn.Module):
    """Two convolutions with group normalisation, and a shortcut where width or resolution change."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inner), nn.GroupNorm(8, outer)
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        changes = inner != outer or stride != 1
        self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [batch, outer, height / stride, width / stride]."""
        out = self.conv1(F.relu(self.norm1(x)))
        shortcut: Tensor = self.shortcut(x)
        return shortcut + self.conv2(F.relu(self.norm2(out)))


class ResNet(nn.Module):
    """Convolutions at three resolutions, and the cross-entropy of ten classes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        sizes = [width, width, 2 * width, 4 * width]
        self.layers = nn.ModuleList(
            Residual(sizes[stage] if i == 0 else sizes[stage + 1], sizes[stage + 1], 2 if stage and i == 0 else 1)
            for stage in range(3)
            for i in range(depth)
        )
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, height, width] and classes [batch]."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class UNet(nn.Module):
    """Convolutions down and up again with skips between, and the error of the noise that it finds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(Residual(width * 2**i, width * 2 ** (i + 1), 2) for i in range(2))
        self.middle = Residual(4 * width, 4 * width)
        self.up = nn.ModuleList(Residual(width * (2 ** (i + 1) + 2**i), width * 2**i) for i in (1, 0))
        self.head = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of noisy images and noise [batch, 3, height, width]."""
        x = self.stem(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat((F.interpolate(x, scale_factor=2.0), skips.pop()), 1))
        return F.mse_loss(self.head(x), y)


class VisionTransformer(nn.Module):
    """Patches, a class token, and torch's own encoder layers."""

    def __init__(self, width: int, depth: int, patch: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, size, size] and classes [batch]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), y)


class Translator(nn.Module):
    """An encoder and a decoder of torch's own layers over one table, which is the head as well."""

    def __init__(self, width: int, depth: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        heads = width // 64
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of source and target ids [batch, seq]."""
        source, target = self.tokens(x), self.tokens(y[:, :-1])
        for layer in self.encoder:
            source = layer(source)
        length = target.shape[1]
        causal = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        for layer in self.decoder:
            target = layer(target, source, tgt_mask=causal)
        return F.cross_entropy(F.linear(target, self.tokens.weight).flatten(0, 1), y[:, 1:].flatten())


class Recurrent(nn.Module):
    """Two LSTMs over the tokens of a text."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of token ids and labels [batch, seq]."""
        hidden, _ = self.lstm(self.tokens(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class Recommender(nn.Module):
    """Large tables beside a small network over their products, as in DLRM."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, y: Tensor) -> Tensor:
        """Return the loss of features [batch, 16], rows [batch, tables, bag] and clicks [batch]."""
        dense = self.dense(dense)
        found = [dense, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(found, 1)
        products = stacked @ stacked.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat((dense, crossed), 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, y)


@dataclass(frozen=True, slots=True)
class Program:
    """A model and the batch that it is called with, both made anew from a seed."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the model and its global batch, equal for equal seeds."""
        torch.manual_seed(seed)
        batch = self.data()
        return self.model(), batch


def _images(batch: int, size: int, classes: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def _texts(batch: int, seq: int, vocab: int) -> tuple[Tensor, ...]:
    return torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))


def _clicks(batch: int, tables: int, rows: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 16), torch.randint(rows, (batch, tables, 4)), torch.rand(batch).round()


def _hugging_face(kind: str, **settings: int) -> nn.Module:
    """Return a small causal model of transformers that returns its loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, use_cache=False, **settings))
    return Labelled(model)


class Labelled(nn.Module):
    """A model of transformers called with token ids and labels, for its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of token ids and labels [batch, seq]."""
        loss: Tensor = self.model(input_ids=x, labels=y).loss
        return loss


_LLAMA = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
_MIXTURE = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6}

FAMILIES = {
    "resnet": Program(lambda: ResNet(32, 2), lambda: _images(64, 32, 10)),
    "unet": Program(lambda: UNet(48), lambda: (torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32))),
    "vit": Program(lambda: VisionTransformer(384, 6, 8, 96), lambda: _images(8, 96, 1000)),
    "translator": Program(lambda: Translator(512, 3, 8192), lambda: _texts(8, 64, 8192)),
    "lstm": Program(lambda: Recurrent(512, 8192), lambda: _texts(32, 64, 8192)),
    "recommender": Program(lambda: Recommender(8, 20000, 64), lambda: _clicks(4096, 8, 20000)),
    "llama": Program(
        lambda: _hugging_face("llama", num_key_value_heads=4, vocab_size=4096, **_LLAMA), lambda: _texts(2, 512, 4096)
    ),
    "mixtral": Program(
        lambda: _hugging_face(
            "mixtral", num_key_value_heads=2, vocab_size=4096, num_local_experts=4, num_experts_per_tok=2, **_MIXTURE
        ),
        lambda: _texts(8, 128, 4096),
    ),
}
