"""Models on sequences, sets and graphs of the user's own: attention and recurrence as tutorials write them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import (
    HEADS,
    SEQ,
    VOCABULARY,
    WIDTH,
    Around,
    Example,
    language_model,
    named,
    next_token,
    tokens,
)


class _Seq2Seq(nn.Module):
    """A GRU encoder, an attending GRU decoder; each step is given the true token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.embed = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.query, self.key, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.decoder = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(x))
        hidden = torch.cat([last[0], last[1]], 1)[None]
        token = torch.zeros(x.shape[0], 1, dtype=torch.long)
        loss = 0.0
        for step in range(4):
            scores = self.score(torch.tanh(self.query(hidden[0])[:, None] + self.key(memory)))
            context = (scores.softmax(1) * memory).sum(1, keepdim=True)
            made, hidden = self.decoder(torch.cat([self.embed(token), context], -1), hidden)
            loss = loss + F.cross_entropy(self.out(made.squeeze(1)), target[:, step])
            token = target[:, step : step + 1]
        return loss / 4


@named
def seq2seq(batch: int) -> Example:
    """GRU to GRU with attention and teacher forcing."""
    return _Seq2Seq(), {"x": tokens(batch, 6), "target": tokens(batch, 4)}


@named
def nn_decoder(batch: int) -> Example:
    """nn.TransformerDecoder on features of an image, positions as a parameter; sequence first."""

    class Captions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
            self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(SEQ, 1, WIDTH))
            self.decoder = nn.TransformerDecoder(
                nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, activation="gelu"), 4, nn.LayerNorm(WIDTH)
            )
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, image: Tensor, words: Tensor) -> Tensor:
            memory = self.patches(image).flatten(2).permute(2, 0, 1)
            before = self.embed(words.t()) + self.positions
            mask = torch.triu(torch.full((SEQ, SEQ), float("-inf")), diagonal=1)
            made = self.decoder(before, memory, tgt_mask=mask, tgt_key_padding_mask=words.eq(0))
            logits = self.head(made)[:-1]
            return F.cross_entropy(logits.reshape(-1, VOCABULARY), words.t()[1:].reshape(-1), ignore_index=0)

    words = tokens(batch)
    words[:, 0] = 1
    return Captions(), {"image": torch.randn(batch, 3, 8, 8), "words": words}


@named
def multihead(batch: int) -> Example:
    """nn.MultiheadAttention with weights returned, a mask of booleans and a key of another width."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.attend = nn.MultiheadAttention(WIDTH, HEADS, kdim=WIDTH // 2, vdim=WIDTH // 2, batch_first=True)
            self.small = nn.Linear(WIDTH, WIDTH // 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            small = self.small(h)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            made, weights = self.attend(h, small, small, attn_mask=mask, need_weights=True)
            return made * (1 + weights.amax(-1, keepdim=True))

    return language_model(Block, batch)


class _Nano(nn.Module):
    """GPT as most people write it for themselves: a mask as buffer, tied head, positions by arange."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.h = nn.ModuleList(_NanoBlock() for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        self.third = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.third.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x) + 0.1 * self.third(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class _NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(SEQ, SEQ)).view(1, 1, SEQ, SEQ))
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        k = k.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        q = q.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = v.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.c_proj(y)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


@named
def nano(batch: int) -> Example:
    """A GPT of one's own, one weight under three names, targets of which some do not count."""

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = _Nano()

        def forward(self, idx: Tensor, targets: Tensor) -> Tensor | None:
            return self.gpt(idx, targets)[1]

    target = tokens(batch)
    target[0] = -1
    target[1:5, 3:] = -1
    return Second(), {"idx": tokens(batch), "targets": target}


@named
def grouped_queries(batch: int) -> Example:
    """Attention with fewer keys than queries by repeat_interleave, biases of distance (ALiBi), RMS norm, SwiGLU."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.o = nn.Linear(WIDTH, WIDTH, bias=False)
            self.gate, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
            b, t, _ = x.shape
            q = self.q(h).view(b, t, HEADS, -1).transpose(1, 2)
            k, v = self.kv(h).view(b, t, 2, HEADS // 2, -1).permute(2, 0, 3, 1, 4)
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
            place = torch.arange(t)
            bias = self.slopes[:, None, None] * (place[None, :] - place[:, None]).clamp(max=0)
            bias = bias + torch.full((t, t), float("-inf")).triu(1)
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            a, g = self.gate(h).chunk(2, -1)
            return self.o(made.transpose(1, 2).reshape(b, t, -1)) + self.down(a * F.silu(g))

    return language_model(Block, batch)


@named
def linear_attention(batch: int) -> Example:
    """Causal linear attention by cumulated products, and token shift (RWKV's, as many write it)."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mix, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.ZeroPad2d((0, 0, 1, -1))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.mix + self.shift(x) * (1 - self.mix)
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
            made = (
                torch.einsum("bthd,bthde->bthe", q, state) / torch.einsum("bthd,bthd->bth", q, k.cumsum(1))[..., None]
            )
            return self.out(made.flatten(2))

    return language_model(Mix, batch)


class _Capacity(nn.Module):
    """Each expert takes as many tokens as fit, in their order; index_put places them, others pass by."""

    def __init__(self, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 64) / 6)
        self.down = nn.Parameter(torch.randn(experts, 64, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        share, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        taken = F.one_hot(chosen.flatten(1), self.experts)
        place = ((taken.cumsum(1) - 1) * taken).sum(-1)
        capacity = self.top * t // self.experts
        fits = place < capacity
        slot = chosen.flatten(1) * (capacity + 1) + torch.where(fits, place, torch.full_like(place, capacity))
        rows = x.repeat_interleave(self.top, 1)
        queue = x.new_zeros(b, self.experts * (capacity + 1), d)
        sample = torch.arange(b, device=x.device)[:, None].expand_as(slot)
        queue = queue.index_put((sample, slot), rows * fits[..., None])
        h = torch.einsum("becd,edh->bech", queue.view(b, self.experts, capacity + 1, d), self.up)
        made = torch.einsum("bech,ehd->becd", F.silu(h), self.down).flatten(1, 2)
        back = made[sample, slot] * fits[..., None] * share.flatten(1)[..., None]
        return back.view(b, t, self.top, d).sum(2)


@named
def capacity(batch: int) -> Example:
    """Experts with a capacity: places by cumsum, index_put and index."""
    return language_model(_Capacity, batch)


class _Attending(nn.Module):
    """Attention along the edges of a graph: softmax over each node's neighbours by scatter_reduce (GAT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.left, self.right = (nn.Parameter(torch.randn(3, HEADS, WIDTH // HEADS)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, nodes: Tensor, edges: Tensor, labelled: Tensor, target: Tensor) -> Tensor:
        source, sink = edges[0], edges[1]
        for number, layer in enumerate(self.layers):
            h = layer(nodes).view(len(nodes), HEADS, -1)
            left, right = (h * self.left[number]).sum(-1), (h * self.right[number]).sum(-1)
            score = F.leaky_relu(left[source] + right[sink], 0.2)
            index = sink[:, None].expand_as(score)
            top = torch.full_like(left, -1e9).scatter_reduce(0, index, score.detach(), "amax")
            weight = (score - top[sink]).exp()
            total = torch.zeros_like(left).index_add_(0, sink, weight)
            arrived = torch.zeros_like(h).index_add_(0, sink, h[source] * (weight / total[sink])[..., None])
            nodes = nodes + F.elu(arrived.flatten(1))
        each = F.cross_entropy(self.head(nodes), target, reduction="none")
        return (each * labelled).sum() / labelled.sum()


@named
def graph_attention(batch: int) -> Example:
    """A graph attention network; some nodes are labelled."""
    nodes = 4 * batch
    return _Attending(), {
        "nodes": torch.randn(nodes, WIDTH),
        "edges": torch.cat([torch.arange(nodes).repeat(2, 1), torch.randint(nodes, (2, 5 * nodes))], 1),
        "labelled": torch.rand(nodes) < 0.6,
        "target": torch.randint(8, (nodes,)),
    }


@named
def points(batch: int) -> Example:
    """Clouds of points: a matrix from the points turns them, the maximum over points is the cloud (PointNet)."""

    class Cloud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Sequential(nn.Conv1d(3, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU())
            self.matrix = nn.Linear(64, 9)
            self.body = nn.Sequential(nn.Conv1d(3, 32, 1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv1d(32, 64, 1))
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            identity = torch.eye(3).view(1, 9).repeat(x.shape[0], 1)
            matrix = (self.matrix(self.turn(x).max(2)[0]) + identity).view(-1, 3, 3)
            h = self.body(torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1))
            apart = torch.bmm(matrix, matrix.transpose(2, 1)) - torch.eye(3)[None]
            loss = F.nll_loss(F.log_softmax(self.head(torch.max(h, 2)[0]), dim=1), target)
            return loss + 0.001 * torch.mean(torch.norm(apart, dim=(1, 2)))

    return Cloud(), {"x": torch.randn(batch, 3, 24), "target": torch.randint(10, (batch,))}


@named
def latents(batch: int) -> Example:
    """Learned queries, the same for every sample, read the sequence by turns (Perceiver); a class token beside them."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, WIDTH)
            self.latents, self.token = nn.Parameter(torch.randn(6, WIDTH)), nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.cross = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))
            self.body = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)
            )
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor, valid: Tensor) -> Tensor:
            x = self.embed(x)
            h = torch.cat([self.token.expand(len(x), -1, -1), self.latents.unsqueeze(0).repeat(len(x), 1, 1)], 1)
            for cross, layer in zip(self.cross, self.body, strict=True):
                h = layer(h + cross(h, x, x, key_padding_mask=~valid, need_weights=False)[0])
            return self.head(h[:, 0])

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Reader()

        def forward(self, x: Tensor, valid: Tensor, target: Tensor) -> dict[str, Tensor]:
            logits = self.body(x, valid)
            right = (logits.argmax(-1) == target).float().mean()
            return {"loss": F.cross_entropy(logits, target), "logits": logits, "accuracy": right}

    valid = torch.rand(batch, SEQ) < 0.8
    valid[:, 0] = True
    return Loss(), {"x": torch.randn(batch, SEQ, 8), "valid": valid, "target": torch.randint(10, (batch,))}


@named
def conditional_field(batch: int) -> Example:
    """A linear chain of labels (CRF): the forward algorithm step by step, masks of lengths."""

    class Chain(nn.Module):
        def __init__(self, labels: int = 6) -> None:
            super().__init__()
            self.embed, self.emit = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, labels)
            self.start, self.move = nn.Parameter(torch.randn(labels)), nn.Parameter(torch.randn(labels, labels))

        def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            emitted = self.emit(self.embed(x))
            valid = torch.arange(x.shape[1])[None] < lengths[:, None]
            alpha = self.start + emitted[:, 0]
            for t in range(1, x.shape[1]):
                after = torch.logsumexp(alpha[:, :, None] + self.move, 1) + emitted[:, t]
                alpha = torch.where(valid[:, t, None], after, alpha)
            told = emitted.gather(2, labels[..., None])[..., 0]
            moved = self.move[labels[:, :-1], labels[:, 1:]]
            score = self.start[labels[:, 0]] + (told * valid).sum(1) + (moved * valid[:, 1:]).sum(1)
            return (torch.logsumexp(alpha, 1) - score).mean()

    return Chain(), {
        "x": tokens(batch, 8),
        "labels": torch.randint(6, (batch, 8)),
        "lengths": torch.randint(2, 9, (batch,)),
    }


@named
def factorised(batch: int) -> Example:
    """Fields of categories in one table by offsets, factorisation machine beside a deep part (DeepFM)."""

    class Machine(nn.Module):
        def __init__(self, sizes: tuple[int, ...] = (10, 20, 30, 4)) -> None:
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0))
            self.table, self.linear = nn.Embedding(sum(sizes), 16), nn.Embedding(sum(sizes), 1)
            self.bias = nn.Parameter(torch.zeros(1))
            self.deep = nn.Sequential(nn.Linear(16 * len(sizes), 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, fields: Tensor, clicked: Tensor) -> Tensor:
            fields = fields + self.offsets.unsqueeze(0)
            found = self.table(fields)
            pairs = 0.5 * (found.sum(1) ** 2 - (found**2).sum(1)).sum(1, keepdim=True)
            logit = self.bias + self.linear(fields).sum(1) + pairs + self.deep(found.flatten(1))
            return F.binary_cross_entropy_with_logits(logit.squeeze(1), clicked)

    fields = torch.stack([torch.randint(size, (batch,)) for size in (10, 20, 30, 4)], 1).int()
    return Machine(), {"fields": fields, "clicked": torch.randint(2, (batch,)).float()}


@named
def first_dim_time(batch: int) -> Example:
    """Inputs whose first dimension is time, and as long as the batch is large."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(batch, batch)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0) for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            h = self.embed(x)
            h = h + self.mix(h.permute(1, 2, 0)).permute(2, 0, 1)
            for layer in self.layers:
                h = layer(h)
            return self.head(h)

    class Loss(Around):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return next_token(self.body(x, target), target)

    return Loss(Tagger()), {"x": tokens(batch, batch).t(), "target": tokens(batch, batch).t()}
