"""Models whose rows are picked by the sample's own number, and that return more than what they are trained on.

Shapes: b samples, t steps of a sequence, d features, k classes or codes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import LAYERS, VOCABULARY, WIDTH, Example, named, tokens

STEPS, TAGS, CODES = 4, 5, 10


def _layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))


class _Field(nn.Module):
    """A conditional random field over tags: the score of a path beside that of all, by a loop over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCABULARY, WIDTH), _layers(), nn.Linear(WIDTH, TAGS)
        self.between = nn.Parameter(torch.randn(TAGS, TAGS))
        self.begin, self.end = nn.Parameter(torch.randn(TAGS)), nn.Parameter(torch.randn(TAGS))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        scores, rows = self.head(h), torch.arange(len(x))
        score = self.begin[tags[:, 0]] + scores[rows, 0, tags[:, 0]]
        every = self.begin + scores[:, 0]
        for t in range(1, x.shape[1]):
            counts = mask[:, t]
            step = self.between[tags[:, t - 1], tags[:, t]] + scores[rows, t, tags[:, t]]
            score = score + step * counts.to(step.dtype)
            after = torch.logsumexp(every.unsqueeze(2) + self.between + scores[:, t].unsqueeze(1), 1)
            every = torch.where(counts.unsqueeze(1), after, every)
        last = tags.gather(1, (mask.sum(1, keepdim=True) - 1)).squeeze(1)
        return (torch.logsumexp(every + self.end, 1) - score - self.end[last]).mean()


@named
def random_field(batch: int) -> Example:
    """A conditional random field."""
    return _Field(), {
        "x": tokens(batch, STEPS),
        "tags": torch.randint(TAGS, (batch, STEPS)),
        "mask": torch.arange(STEPS)[None] < torch.randint(1, STEPS + 1, (batch, 1)),
    }


class _Policy(nn.Module):
    """The gradient of a policy: the mean of what each sample's action has, and how sure and how spread it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(8, WIDTH), _layers(), nn.Linear(WIDTH, TAGS)

    def forward(self, x: Tensor, action: Tensor, gain: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        chances = self.head(x).log_softmax(-1)
        picked = chances[torch.arange(len(x)), action]
        with torch.no_grad():
            entropy = -(chances.exp() * chances).sum(-1).mean()
            told = {"perplexity": entropy.exp(), "surest": chances.max(), "right": (chances.argmax(-1) == action).sum()}
        return {"loss": -(picked * gain).mean() - 0.1 * picked.mean(), **told}


@named
def policy(batch: int) -> Example:
    """A policy's gradient by `log_probs[arange(b), actions]`, with metrics."""
    return _Policy(), {
        "x": torch.randn(batch, 8),
        "action": torch.randint(TAGS, (batch,)),
        "gain": torch.randn(batch),
    }


class _Coded(nn.Module):
    """A codebook by its nearest entries, straight through, with the perplexity of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(3, WIDTH, 3, 2, 1), nn.ConvTranspose1d(WIDTH, 3, 4, 2, 1)
        self.layers, self.codes = _layers(), nn.Parameter(torch.randn(CODES, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x).transpose(1, 2)
        for layer in self.layers:
            z = z + layer(z)
        nearest = torch.cdist(z.flatten(0, 1), self.codes).argmin(-1)
        code = self.codes[nearest].view_as(z)
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        made = self.decode((z + (code - z).detach()).transpose(1, 2))
        used = F.one_hot(nearest, CODES).to(x.dtype).mean(0)
        perplexity = torch.exp(-(used * (used + 1e-10).log()).sum())
        return {"loss": F.mse_loss(made, x) + loss, "perplexity": perplexity}


@named
def codebook(batch: int) -> Example:
    """VQ-VAE with a trained codebook."""
    return _Coded(), {"x": torch.randn(batch, 3, 16)}


class _Begun(nn.Module):
    """A learned token before others, written into a tensor made empty; parts of features changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.layers, self.head = _layers(), nn.Linear(WIDTH, TAGS)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.empty(x.shape[0], x.shape[1] + 1, WIDTH, dtype=self.token.dtype)
        h[:, 0] = self.token
        h[:, 1:] = self.embed(x)
        for layer in self.layers:
            more = layer(h).clone()
            more[..., ::2] *= 0.5
            h = h + more + h.mean(1, keepdim=True)
        return F.cross_entropy(self.head(h[:, 0]), target)


@named
def begun(batch: int) -> Example:
    """Writes into new memory and into parts of features."""
    return _Begun(), {"x": tokens(batch, STEPS), "target": torch.randint(TAGS, (batch,))}
