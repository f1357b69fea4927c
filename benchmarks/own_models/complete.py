"""Complete models of the user's own: recommenders, graphs, diffusion, images, recurrent networks, many inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import (
    HEADS,
    LAYERS,
    SEQ,
    VOCABULARY,
    WIDTH,
    Around,
    Example,
    named,
    next_token,
    tokens,
)


class _Clicks(nn.Module):
    """Embedding bags of categories and a dense part, their products in pairs, and a click or none."""

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 16, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + tables * (tables + 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        parts = torch.stack([bottom, *(bag(categories[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs = parts @ parts.transpose(1, 2)
        row, column = torch.tril_indices(parts.shape[1], parts.shape[1], -1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([bottom, pairs[:, row, column]], 1)), clicked)


@named
def dlrm(batch: int) -> Example:
    """Embedding bags, products in pairs, a click or none."""
    categories = torch.randint(VOCABULARY, (batch, 4, 3))
    return _Clicks(), {
        "dense": torch.randn(batch, 8),
        "categories": categories,
        "clicked": torch.randint(2, (batch, 1)).float(),
    }


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0])


@named
def lstm(batch: int) -> Example:
    """Two layers of nn.LSTM."""
    return Around(_Recurrent(nn.LSTM), next_token), {"x": tokens(batch), "target": tokens(batch)}


@named
def gru(batch: int) -> Example:
    """Two layers of nn.GRU."""
    return Around(_Recurrent(nn.GRU), next_token), {"x": tokens(batch), "target": tokens(batch)}


class _Graph(nn.Module):
    """Messages along edges, added up at their targets; nodes are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        source, sink = edges
        for layer in self.layers:
            arrived = torch.zeros_like(nodes).index_add(0, sink, nodes[source])
            count = torch.zeros_like(nodes[:, 0]).scatter_add(0, sink, torch.ones_like(sink, dtype=nodes.dtype))
            nodes = F.relu(layer(torch.cat([nodes, arrived / count.clamp(min=1)[:, None]], 1)))
        return F.cross_entropy(self.head(nodes), target)


@named
def gnn(batch: int) -> Example:
    """Messages of a graph by index_add and scatter_add."""
    nodes = 4 * batch
    return _Graph(), {
        "nodes": torch.randn(nodes, WIDTH),
        "edges": torch.randint(nodes, (2, 6 * nodes)),
        "target": torch.randint(8, (nodes,)),
    }


class _Modulated(nn.Module):
    """A transformer block whose norms are scaled and shifted by a condition (adaLN-Zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        h = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norms[1](x) * (1 + scale2) + shift2)


class _Denoiser(nn.Module):
    """A diffusion transformer: patches of a noisy image and a time to the noise."""

    def __init__(self, channels: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.into = nn.Conv2d(channels, WIDTH, patch, stride=patch)
        self.times = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(10, WIDTH)
        self.register_buffer("positions", torch.randn(1, 16, WIDTH))
        self.blocks = nn.ModuleList(_Modulated() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, patch * patch * channels)

    def forward(self, image: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> dict[str, Tensor]:
        level = torch.cos(time * math.pi / 2)[:, None, None, None]
        noisy = level * image + (1 - level**2).sqrt() * noise
        frequencies = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angles = time[:, None] * frequencies
        condition = self.times(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(label)
        x = self.into(noisy).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        b, _, h, w = image.shape
        x = self.last(x).view(b, h // self.patch, w // self.patch, self.patch, self.patch, -1)
        predicted = torch.einsum("bhwpqc->bchpwq", x).reshape(image.shape)
        return {"loss": F.mse_loss(predicted, noise), "predicted": predicted}


@named
def dit(batch: int) -> Example:
    """A diffusion transformer with adaLN."""
    return _Denoiser(), {
        "image": torch.randn(batch, 4, 8, 8),
        "noise": torch.randn(batch, 4, 8, 8),
        "time": torch.rand(batch),
        "label": torch.randint(10, (batch,)),
    }


class _Branches(nn.Module):
    """Python decides by shapes and flags; several inputs, some missing; results in nested dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.heads = nn.ModuleDict({"first": nn.Linear(WIDTH, 4), "second": nn.Linear(WIDTH, 6)})

    def forward(
        self, x: Tensor, targets: dict[str, Tensor], mask: Tensor | None = None, deep: bool = True
    ) -> dict[str, Any]:
        if x.dim() == 3 and x.shape[1] % 2 == 0:
            x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if number % 2 and deep else x + layer(x)
        if mask is not None:
            x = x * mask[:, : x.shape[1], None]
        pooled = x.mean(1)
        logits = {name: head(pooled) for name, head in self.heads.items()}
        losses = {name: F.cross_entropy(logits[name], targets[name]) for name in logits}
        return {"loss": sum(losses.values()), "logits": logits, "parts": losses, "width": x.shape[-1]}


@named
def branches(batch: int) -> Example:
    """Control flow on shapes and flags, nested inputs and results."""
    targets = {"first": torch.randint(4, (batch,)), "second": torch.randint(6, (batch,))}
    return _Branches(), {"x": torch.randn(batch, SEQ, WIDTH), "targets": targets, "mask": torch.ones(batch, SEQ)}


class _Shared(nn.Module):
    """One layer used again and again, and an embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(LAYERS):
            x = self.layer(x)
        return self.head(x)


@named
def shared(batch: int) -> Example:
    """One block called four times, tied embedding."""
    return Around(_Shared(), next_token), {"x": tokens(batch), "target": tokens(batch)}


@named
def volumes(batch: int) -> Example:
    """Convolutions and transposed ones in three dimensions."""
    body = nn.Sequential(
        nn.Conv3d(2, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.MaxPool3d(2),
        nn.Conv3d(16, 16, 3, padding=1), nn.SiLU(), nn.ConvTranspose3d(16, 8, 2, stride=2), nn.Conv3d(8, 4, 1),
    )  # fmt: skip
    return Around(body), {"x": torch.randn(batch, 2, 4, 8, 8), "target": torch.randint(4, (batch, 4, 8, 8))}


@named
def batch_norm(batch: int) -> Example:
    """A plain convolutional network with BatchNorm in training."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return Around(body), {"x": torch.randn(batch, 3, 16, 16), "target": torch.randint(10, (batch,))}


@named
def nn_transformer(batch: int) -> Example:
    """nn.Transformer: encoder and decoder with masks."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.body = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            before, after = target[:, :-1], target[:, 1:]
            causal = nn.Transformer.generate_square_subsequent_mask(before.shape[1])
            padded = x == 0
            made = self.body(
                self.embed(x), self.embed(before), tgt_mask=causal, src_key_padding_mask=padded,
                memory_key_padding_mask=padded, tgt_is_causal=True,
            )  # fmt: skip
            return next_token(self.head(made), after)

    return Translator(), {"x": tokens(batch).clamp(min=1), "target": tokens(batch)}


@named
def nn_encoder(batch: int) -> Example:
    """nn.TransformerEncoder, a padding mask, sequence first."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0)
            self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            made = self.encoder(self.embed(x).transpose(0, 1), src_key_padding_mask=x == 0)
            return next_token(self.head(made.transpose(0, 1)), target)

    words = tokens(batch)
    words[:, 0] = 1
    return Tagger(), {"x": words, "target": torch.randint(8, (batch, SEQ))}


@named
def contrastive(batch: int) -> Example:
    """Two towers; each sample against all others of the batch."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)
            )
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
            scores = self.scale.exp() * a @ b.t()
            labels = torch.arange(len(scores), device=scores.device)
            return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2

    return Towers(), {"left": torch.randn(batch, WIDTH), "right": torch.randn(batch, WIDTH)}


@named
def vector_quantised(batch: int) -> Example:
    """An autoencoder whose code is the nearest of a table, straight-through (VQ-VAE)."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
            self.table = nn.Embedding(32, 8)
            self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            code = self.encoder(x).permute(0, 2, 3, 1)
            distance = torch.cdist(code.flatten(0, 2), self.table.weight)
            nearest = self.table(distance.argmin(-1)).view_as(code)
            kept = F.mse_loss(nearest, code.detach()) + 0.25 * F.mse_loss(code, nearest.detach())
            made = self.decoder((code + (nearest - code).detach()).permute(0, 3, 1, 2))
            return {"loss": F.mse_loss(made, x) + kept, "made": made}

    return Coder(), {"x": torch.randn(batch, 3, 8, 8)}


@named
def super_resolution(batch: int) -> Example:
    """Pixel shuffle on a bilinear base, reflected borders."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.PReLU(), nn.Conv2d(16, 12, 3, padding=1),
        nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.InstanceNorm2d(3, affine=True),
    )  # fmt: skip
    return Around(body, F.smooth_l1_loss), {"x": torch.randn(batch, 3, 8, 8), "target": torch.randn(batch, 3, 32, 32)}


@named
def losses(batch: int) -> Example:
    """Many losses of torch.nn at once, and distances."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.ELU(), nn.Linear(64, WIDTH))
            self.pair = nn.Bilinear(WIDTH, WIDTH, 4)

        def forward(self, x: Tensor, target: Tensor, label: Tensor) -> Tensor:
            made = self.body(x)
            spread = F.kl_div(made.log_softmax(-1), target.softmax(-1), reduction="batchmean")
            far = F.triplet_margin_loss(made, target, target.flip(1))
            close = (1 - F.cosine_similarity(made, target)).mean() + F.huber_loss(made, target)
            normal = torch.distributions.Normal(made, 1.0, validate_args=False).log_prob(target).mean()
            total = spread + far + close - normal + F.gaussian_nll_loss(made, target, made.exp())
            smooth = F.cross_entropy(self.pair(made, target), label, label_smoothing=0.1, weight=torch.ones(4) * 2)
            return total + smooth + made.square().mean(0).logsumexp(0)

    return Losses(), {
        "x": torch.randn(batch, WIDTH),
        "target": torch.randn(batch, WIDTH),
        "label": torch.randint(4, (batch,)),
    }
