"""Models of sounds and of long sequences: spectrograms, convolutions over time, recurrences and long convolutions.

Shapes: b samples, t steps, d features, f frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.own_models.parts import HEADS, SEQ, VOCABULARY, WIDTH, Around, Example, language_model, named, tokens

CLASSES = 10


class _Relative(nn.Module):
    """Attention whose scores have a part by relative places, as Transformer-XL has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.place = nn.Linear(WIDTH, WIDTH, bias=False)
        self.by_content, self.by_place = (nn.Parameter(torch.randn(HEADS, WIDTH // HEADS) * 0.1) for _ in range(2))

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        """Return scores [b, heads, t, 2t - 1] by relative place as [b, heads, t, t] by place."""
        b, heads, t, places = x.shape
        x = F.pad(x, (1, 0)).view(b, heads, places + 1, t)
        return x[:, :, 1:].view(b, heads, t, places)[..., :t]

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (each.view(b, t, HEADS, -1) for each in self.qkv(self.norm(x)).chunk(3, -1))
        apart = torch.arange(t - 1, -t, -1.0)[:, None] * torch.exp(torch.arange(0, d, 2.0) * -(math.log(1e4) / d))
        place = self.place(torch.cat([apart.sin(), apart.cos()], -1)).view(2 * t - 1, HEADS, -1)
        content = torch.einsum("bihd,bjhd->bhij", q + self.by_content, k)
        moved = self.shifted(torch.einsum("bihd,jhd->bhij", q + self.by_place, place))
        weights = ((content + moved) / (d // HEADS) ** 0.5).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).reshape(b, t, d))


class _Convolved(nn.Module):
    """A gated convolution over time, each channel by itself."""

    def __init__(self, kernel: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.each = nn.Conv1d(WIDTH, WIDTH, kernel, padding="same", groups=WIDTH)
        self.after = nn.GroupNorm(1, WIDTH)
        self.out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.gate(self.norm(x).mT), dim=1)
        return self.out(F.silu(self.after(self.each(y)))).mT


class _Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.into = nn.Linear(8 * 5, WIDTH)
        self.before, self.behind = (
            nn.ModuleList(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
                for _ in range(2)
            )
            for _ in range(2)
        )
        self.attend = nn.ModuleList(_Relative() for _ in range(2))
        self.convolve = nn.ModuleList(_Convolved() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.subsample(x.unsqueeze(1)).permute(0, 2, 1, 3).flatten(2)
        x = self.into(x)
        layers = zip(self.before, self.attend, self.convolve, self.behind, self.norms, strict=True)
        for before, attend, convolve, behind, norm in layers:
            x = x + 0.5 * before(x)
            x = x + attend(x)
            x = x + convolve(x)
            x = norm(x + 0.5 * behind(x))
        return F.nll_loss(self.head(x).log_softmax(-1).flatten(0, 1), target.flatten())


@named
def conformer(batch: int) -> Example:
    """A conformer: convolutions shorten the sound, attention by relative places, gated convolutions over time."""
    return _Conformer(), {"x": torch.randn(batch, 43, 23), "target": tokens(batch, 10)}


class _Spectral(nn.Module):
    """A sound's spectrogram is taken in the model, with mel filters and a log, and classified."""

    def __init__(self, size: int = 32, mels: int = 12) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size))
        self.register_buffer("filters", torch.rand(mels, size // 2 + 1))
        self.norm = nn.InstanceNorm1d(mels)
        self.body = nn.Sequential(nn.Conv1d(mels, WIDTH, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], 1)
        found = torch.stft(x, self.size, self.size // 2, window=self.window, return_complex=True)
        power = found.real**2 + found.imag**2
        return self.head(self.body(self.norm((self.filters @ power).clamp(min=1e-5).log())).squeeze(-1))


@named
def spectrogram(batch: int) -> Example:
    """A short-time Fourier transform and mel filters inside the model."""
    return Around(_Spectral()), {"x": torch.randn(batch, 256), "target": torch.randint(CLASSES, (batch,))}


class _Dilated(nn.Module):
    """Gated dilated causal convolutions with skips, normed weights."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.into = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList(weight_norm(nn.Conv1d(16, 32, 2, dilation=2**i)) for i in range(layers))
        self.outs = nn.ModuleList(nn.Conv1d(16, 16 + WIDTH, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1), nn.ReLU(), nn.Conv1d(WIDTH, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        level = torch.sign(x) * torch.log1p(255 * x.abs()) / math.log(256)
        target = ((level + 1) / 2 * 255 + 0.5).long()
        x = self.into(level[:, None, :-1])
        total: Tensor | float = 0.0
        for i, (gate, out) in enumerate(zip(self.gates, self.outs, strict=True)):
            filtered, opened = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            left, skip = out(filtered.tanh() * opened.sigmoid()).split([16, WIDTH], 1)
            x, total = x + left, total + skip
        return F.cross_entropy(self.head(total), target[:, 1:])


@named
def waves(batch: int) -> Example:
    """WaveNet: dilated causal convolutions on a sound whose levels are also its targets."""
    return _Dilated(), {"x": torch.rand(batch, 64) * 2 - 1}


class _Read(nn.Module):
    """Text to frames: each step attends by content and by where it attended before, two cells, teacher's frames."""

    def __init__(self, frames: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encode = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.ReLU())
        self.both = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(frames, WIDTH), nn.ReLU())
        self.first, self.second = nn.LSTMCell(2 * WIDTH, WIDTH), nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query, self.memory = nn.Linear(WIDTH, 16, bias=False), nn.Linear(WIDTH, 16, bias=False)
        self.where, self.score = nn.Conv1d(2, 16, 5, padding=2), nn.Linear(16, 1, bias=False)
        self.frame, self.stop = nn.Linear(2 * WIDTH, frames), nn.Linear(2 * WIDTH, 1)
        self.postnet = nn.Sequential(
            nn.Conv1d(frames, 16, 5, padding=2), nn.Tanh(), nn.Conv1d(16, frames, 5, padding=2)
        )

    def forward(self, text: Tensor, frames: Tensor, valid: Tensor) -> Tensor:
        memory, _ = self.both(self.encode(self.embed(text).mT).mT)
        keys = self.memory(memory)
        zero = memory.new_zeros(len(text), WIDTH)
        one, two, context = (zero, zero), (zero, zero), zero
        weights = total = memory.new_zeros(text.shape)
        inputs = self.prenet(F.pad(frames[:, :-1], (0, 0, 1, 0)))
        made, stops = [], []
        for step in inputs.unbind(1):
            one = self.first(torch.cat([step, context], -1), one)
            where = self.where(torch.stack([weights, total], 1)).mT
            scores = self.score(torch.tanh(self.query(one[0]).unsqueeze(1) + keys + where)).squeeze(-1)
            weights = scores.masked_fill(~valid, -torch.inf).softmax(-1)
            total = total + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            two = self.second(torch.cat([one[0], context], -1), two)
            both = torch.cat([two[0], context], -1)
            made.append(self.frame(both))
            stops.append(self.stop(both))
        found = torch.stack(made, 1)
        better = found + self.postnet(found.mT).mT
        last = torch.zeros(len(text), len(stops))
        last[:, -1] = 1.0
        stop = F.binary_cross_entropy_with_logits(torch.cat(stops, 1), last, pos_weight=torch.tensor(5.0))
        return F.mse_loss(found, frames) + F.mse_loss(better, frames) + stop


@named
def text_to_speech(batch: int) -> Example:
    """Tacotron-like: attention by content and place from step to step, both ways encoded, a postnet."""
    valid = torch.arange(10) < torch.randint(4, 11, (batch, 1))
    return _Read(), {"text": tokens(batch, 10), "frames": torch.randn(batch, 6, 8), "valid": valid}


class _Diagonal(nn.Module):
    """A diagonal state space, complex, as a long convolution by FFT."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(WIDTH) * 2 - 4)
        self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, states)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(states).float().repeat(WIDTH, 1))
        self.out_of = nn.Parameter(torch.randn(WIDTH, states, 2) * 0.5)
        self.skip = nn.Parameter(torch.randn(WIDTH))
        self.mix = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        step = self.log_step.exp()
        a = torch.complex(-self.log_real.exp(), self.imaginary)
        moved = a * step[:, None]
        c = torch.view_as_complex(self.out_of) * (torch.exp(moved) - 1.0) / a
        kernel = 2 * torch.einsum("dn,dnt->dt", c, torch.exp(moved[..., None] * torch.arange(t))).real
        found = torch.fft.rfft(x.mT, n=2 * t) * torch.fft.rfft(kernel, n=2 * t)
        return self.mix((torch.fft.irfft(found, n=2 * t)[..., :t] + x.mT * self.skip[:, None]).mT)


@named
def diagonal_states(batch: int) -> Example:
    """S4D: a convolution as long as the sequence, its kernel from complex states."""
    return language_model(_Diagonal, batch)


class _Retained(nn.Module):
    """Attention that decays with distance, without softmax, its heads normed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvg, self.out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("decay", torch.log1p(-torch.exp2(-5.0 - torch.arange(HEADS))))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v, g = self.qkvg(x).chunk(4, -1)
        q, k, v = (each.view(b, t, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        apart = torch.arange(t)[:, None] - torch.arange(t)
        kept = torch.where(apart >= 0, (apart * self.decay[:, None, None]).exp(), 0.0)
        scores = q @ k.mT * kept
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
        y = (scores @ v).transpose(1, 2).reshape(b * t, d)
        return self.out(F.silu(g) * self.norm(y).view(b, t, d))


@named
def retention(batch: int) -> Example:
    """RetNet: scores that decay with distance, group norm over heads, a gate."""
    return language_model(_Retained, batch)


class _Delta(nn.Module):
    """A matrix as memory, corrected at every step (the delta rule), chunk by chunk with a triangular solve."""

    def __init__(self, chunk: int = 8) -> None:
        super().__init__()
        self.chunk = chunk
        self.qkv, self.rate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        n, c = t // self.chunk, self.chunk
        q, k, v = self.qkv(x).view(b, n, c, 3, HEADS, -1).permute(3, 0, 4, 1, 2, 5).unbind(0)
        k = F.normalize(k, dim=-1)
        rate = self.rate(x).sigmoid().view(b, n, c, HEADS).permute(0, 3, 1, 2).unsqueeze(-1)
        inside = torch.tril(rate * k @ k.mT, -1) + torch.eye(c)
        w, u = torch.linalg.solve_triangular(inside, torch.cat([rate * k, rate * v], -1), upper=False).chunk(2, -1)
        state = x.new_zeros(b, HEADS, d // HEADS, d // HEADS)
        made = []
        for i in range(n):
            new = u[:, :, i] - w[:, :, i] @ state
            made.append(q[:, :, i] @ state + torch.tril(q[:, :, i] @ k[:, :, i].mT) @ new)
            state = state + k[:, :, i].mT @ new
        return self.out(torch.stack(made, 2).permute(0, 2, 3, 1, 4).reshape(b, t, d))


@named
def delta_rule(batch: int) -> Example:
    """DeltaNet in chunks: a triangular solve inside a chunk, a state between chunks."""
    return language_model(_Delta, batch)


class _Averaged(nn.Module):
    """A gated linear recurrence by cumulated sums of logs, and a minimal one by logcumsumexp."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        opened, value, out = self.gates(x).chunk(3, -1)
        log_kept, log_taken = F.logsigmoid(-opened), F.logsigmoid(opened)
        log_value = torch.where(value >= 0, (F.relu(value) + 0.5).log(), -F.softplus(-value))
        along = log_kept.cumsum(1)
        found = (along + torch.logcumsumexp(log_taken + log_value - along, 1)).exp()
        return found * F.silu(out)


@named
def minimal_recurrence(batch: int) -> Example:
    """minGRU: a recurrence without its loop, by cumulated sums and logcumsumexp."""
    return language_model(_Averaged, batch)


class _Hashed(nn.Module):
    """Attention inside buckets: tokens are sorted by a hash of their keys, and attend in pieces of the sorted row."""

    def __init__(self, piece: int = 4) -> None:
        super().__init__()
        self.piece = piece
        self.qk, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("planes", torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qk, v = self.qk(x), self.v(x)
        turned = qk.detach() @ self.planes
        bucket = torch.cat([turned, -turned], -1).argmax(-1)
        place = torch.arange(t).expand(b, t)
        order = (bucket * t + place).argsort(-1)
        back = order.argsort(-1)
        rows = order.unsqueeze(-1).expand(-1, -1, d)
        qk, v = (each.gather(1, rows).view(b, -1, self.piece, d) for each in (qk, v))
        at = place.gather(1, order).view(b, -1, self.piece)
        k = F.normalize(torch.cat([torch.roll(qk, 1, 1), qk], 2), dim=-1)
        v = torch.cat([torch.roll(v, 1, 1), v], 2)
        k_at = torch.cat([torch.roll(at, 1, 1), at], 2)
        scores = (qk @ k.mT / d**0.5).masked_fill(at[..., None] < k_at[:, :, None], -1e9)
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        return self.out((weights @ v).view(b, t, d).gather(1, back.unsqueeze(-1).expand(-1, -1, d)))


@named
def hashed(batch: int) -> Example:
    """Reformer: attention inside buckets of a hash, by sorting and unsorting tokens."""
    return language_model(_Hashed, batch)


class _Skipped(nn.Module):
    """Only the tokens that score best go through a layer, in their order; the others pass it by."""

    def __init__(self, taken: int = SEQ // 2) -> None:
        super().__init__()
        self.taken = taken
        self.score = nn.Linear(WIDTH, 1)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1)
        chosen = score.topk(self.taken, dim=1).indices.sort(1).values
        rows = chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        done = self.layer(x.gather(1, rows)) * score.gather(1, chosen).sigmoid().unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(1, rows, done)


@named
def mixture_of_depths(batch: int) -> Example:
    """Mixture of depths: top-k tokens of a sequence are gathered, computed and scattered back."""
    return language_model(_Skipped, batch)
