"""Models of graphs, sets, tables of features and users' histories, and of what is drawn or integrated.

Shapes: b samples, n nodes or points, k neighbours, d features.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import HEADS, VOCABULARY, WIDTH, Around, Example, named, next_token, tokens

CLASSES = 10


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class _Neighbours(nn.Module):
    """Edges to the nearest points in the space of features, found anew in every layer."""

    def __init__(self, inside: int, outside: int, k: int = 4) -> None:
        super().__init__()
        self.k = k
        self.edge = nn.Sequential(
            nn.Conv2d(2 * inside, outside, 1, bias=False), nn.GroupNorm(4, outside), nn.LeakyReLU(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, d, n = x.shape
        square = (x**2).sum(1)
        apart = square[:, :, None] + square[:, None] - 2 * x.mT @ x
        near = apart.topk(self.k, largest=False).indices
        rows = (near + torch.arange(b)[:, None, None] * n).view(-1)
        features = x.mT.reshape(b * n, d)[rows].view(b, n, self.k, d)
        own = x.mT[:, :, None].expand_as(features)
        return self.edge(torch.cat([features - own, own], -1).permute(0, 3, 1, 2)).amax(-1)


@named
def moving_edges(batch: int) -> Example:
    """DGCNN: k nearest neighbours in the space of features, indexed flat over the batch."""
    body = nn.Sequential(
        _Neighbours(3, 16), _Neighbours(16, WIDTH), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES)
    )
    return Around(body), {"x": torch.randn(batch, 3, 12), "target": torch.randint(CLASSES, (batch,))}


class _Sampled(nn.Module):
    """Points chosen far from each other, what lies around each in a ball, and features brought back to all points."""

    def __init__(self, chosen: int = 4, k: int = 5) -> None:
        super().__init__()
        self.chosen, self.k = chosen, k
        self.local, self.back = _mlp(6, 32, WIDTH), _mlp(WIDTH + 3, 32, CLASSES)

    def forward(self, points: Tensor, target: Tensor) -> Tensor:
        b, n, _ = points.shape
        each = torch.arange(b)
        apart = torch.full((b, n), 1e10)
        last = torch.zeros(b, dtype=torch.long)
        chosen = []
        for _ in range(self.chosen):
            chosen.append(last)
            apart = torch.minimum(apart, (points - points[each, last].unsqueeze(1)).square().sum(-1))
            last = apart.argmax(-1)
        centres = points[each[:, None], torch.stack(chosen, 1)]
        distance = torch.cdist(centres, points)
        inside = torch.where(distance < 1.5, torch.arange(n), n).sort(-1).values[..., : self.k]
        inside = torch.where(inside == n, inside[..., :1], inside)
        around = points[each[:, None, None], inside] - centres.unsqueeze(2)
        features = self.local(torch.cat([around, centres.unsqueeze(2).expand_as(around)], -1)).amax(2)
        near, which = distance.mT.topk(3, largest=False)
        weights = 1 / (near + 1e-8)
        weights = weights / weights.sum(-1, keepdim=True)
        spread = (features[each[:, None, None], which] * weights.unsqueeze(-1)).sum(2)
        return F.cross_entropy(self.back(torch.cat([spread, points], -1)).mT, target)


@named
def sampled_points(batch: int) -> Example:
    """PointNet++: farthest points, balls, interpolation from the three nearest."""
    return _Sampled(), {"points": torch.randn(batch, 16, 3), "target": torch.randint(CLASSES, (batch, 16))}


class _Turning(nn.Module):
    """Messages by distance that move points too: what it predicts turns with the molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.move = (
            _mlp(2 * WIDTH + 8, 64, WIDTH),
            _mlp(2 * WIDTH, WIDTH),
            _mlp(WIDTH, 16, 1),
        )
        self.register_buffer("centres", torch.linspace(0, 4, 8))

    def forward(self, h: Tensor, at: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        between = at[:, :, None] - at[:, None]
        distance = (between.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        radial = torch.exp(-4 * (distance - self.centres) ** 2) * (0.5 * (torch.cos(distance) + 1)) * (distance < 3)
        n = h.shape[1]
        both = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), radial], -1)
        message = self.message(both) * pair.unsqueeze(-1)
        at = at + (between / (distance + 1) * self.move(message)).sum(2) / pair.sum(-1, keepdim=True).clamp(min=1)
        return h + self.update(torch.cat([h, message.sum(2)], -1)), at


class _Molecule(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.kinds = nn.Embedding(8, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(_Turning() for _ in range(layers))
        self.energy = _mlp(WIDTH, 16, 1)

    def forward(self, kinds: Tensor, at: Tensor, energy: Tensor) -> Tensor:
        there = (kinds > 0).float()
        pair = there[:, :, None] * there[:, None] * (1 - torch.eye(kinds.shape[1]))
        h = self.kinds(kinds)
        for layer in self.layers:
            h, at = layer(h, at, pair)
        found = (self.energy(h).squeeze(-1) * there).sum(-1)
        return F.l1_loss(found, energy) + 0.01 * (at * there.unsqueeze(-1)).square().mean()


@named
def molecules(batch: int) -> Example:
    """An equivariant graph network with radial functions and padded atoms."""
    return _Molecule(), {
        "kinds": torch.randint(0, 8, (batch, 7)),
        "at": torch.randn(batch, 7, 3),
        "energy": torch.randn(batch),
    }


class _Factors(nn.Module):
    """Wide, deep and crossed: tables with offsets, hashed crosses, a factorisation machine and cross layers."""

    def __init__(self, fields: int = 6, table: int = 50) -> None:
        super().__init__()
        self.table = table
        self.register_buffer("starts", torch.arange(fields) * table)
        self.wide, self.deep = nn.Embedding(fields * table, 1), nn.Embedding(fields * table, 8)
        self.crossed = nn.EmbeddingBag(97, 8, mode="mean")
        self.cross = nn.ModuleList(nn.Linear(fields * 8, fields * 8) for _ in range(2))
        self.experts = nn.ModuleList(_mlp(fields * 8, WIDTH, 16) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(fields * 8, 3) for _ in range(2))
        self.towers = nn.ModuleList(_mlp(16 + 8, 8, 1) for _ in range(2))

    def forward(self, ids: Tensor, clicked: Tensor, bought: Tensor) -> dict[str, Tensor]:
        places = ids + self.starts
        v = self.deep(places)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
        linear = self.wide(places).sum(1) + pairs
        hashed = self.crossed((ids[:, :3] * 31 + ids[:, 3:] * 17) % 97)
        x0 = x = v.flatten(1)
        for layer in self.cross:
            x = x0 * layer(x) + x
        experts = torch.stack([each(x) for each in self.experts], 1)
        logits = [
            tower(torch.cat([torch.einsum("be,bed->bd", gate(x).softmax(-1), experts), hashed], -1)) + linear
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]
        click = torch.sigmoid(logits[0]).squeeze(-1)
        buy = click * torch.sigmoid(logits[1]).squeeze(-1)
        loss = F.binary_cross_entropy(click, clicked) + F.binary_cross_entropy(buy, bought)
        return {"loss": loss, "scores": torch.stack([click, buy], 1).detach()}


@named
def factors(batch: int) -> Example:
    """Wide and deep, DCN, factorisation machine and mixture of experts for several tasks (MMoE, ESMM)."""
    return _Factors(), {
        "ids": torch.randint(0, 50, (batch, 6)),
        "clicked": torch.randint(0, 2, (batch,)).float(),
        "bought": torch.randint(0, 2, (batch,)).float(),
    }


class _History(nn.Module):
    """What a user did, attended to by what is offered; negatives are drawn outside and looked up in the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.places = nn.Parameter(torch.randn(10, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, "gelu", batch_first=True) for _ in range(2)
        )
        self.interest = _mlp(4 * WIDTH, 16, 1)
        self.recent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, history: Tensor, wanted: Tensor, others: Tensor) -> Tensor:
        pad = history == 0
        x = self.items(history) + self.places
        causal = nn.Transformer.generate_square_subsequent_mask(history.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=causal, src_key_padding_mask=pad.float() * -1e4, is_causal=False)
        recent, _ = self.recent(x)
        last = recent[torch.arange(len(x)), (~pad).sum(1).clamp(min=1) - 1]
        offered = self.items(torch.cat([wanted[:, None], others], 1))
        q, k = torch.broadcast_tensors(offered[:, :, None], x[:, None])
        weights = self.interest(torch.cat([q, k, q - k, q * k], -1)).squeeze(-1).masked_fill(pad[:, None], -1e4)
        user = (weights.softmax(-1).unsqueeze(-1) * k).sum(2) + last[:, None]
        scores = (user * offered).sum(-1)
        return F.cross_entropy(scores, torch.zeros_like(wanted))


@named
def histories(batch: int) -> Example:
    """SASRec and DIN: causal layers over a padded history, attention by the offered item, sampled softmax."""
    history = torch.randint(1, VOCABULARY, (batch, 10))
    history[: batch // 2, 7:] = 0
    return _History(), {
        "history": history,
        "wanted": torch.randint(1, VOCABULARY, (batch,)),
        "others": torch.randint(1, VOCABULARY, (batch, 5)),
    }


def sparsemax(x: Tensor) -> Tensor:
    """Return the nearest point of the simplex: many weights are zero."""
    ordered = x.sort(-1, descending=True).values
    along = ordered.cumsum(-1) - 1
    count = torch.arange(1, x.shape[-1] + 1)
    support = (count * ordered > along).sum(-1, keepdim=True)
    return F.relu(x - along.gather(-1, support - 1) / support)


class _Tabular(nn.Module):
    """Columns chosen step by step by sparse masks, each column at most so often; ghost norm is left out."""

    def __init__(self, columns: int = 12, steps: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(columns)
        self.shared = nn.Linear(columns, 2 * WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(steps))
        self.attend = nn.ModuleList(nn.Linear(WIDTH // 2, columns) for _ in range(steps))
        self.head = nn.Linear(WIDTH // 2, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(x)
        left = torch.ones_like(x)
        a = x.new_zeros(len(x), WIDTH // 2)
        total, entropy = x.new_zeros(len(x), WIDTH // 2), x.new_zeros(())
        for own, attend in zip(self.own, self.attend, strict=True):
            mask = sparsemax(attend(a) * left)
            left = left * (1.3 - mask)
            entropy = entropy - (mask * (mask + 1e-10).log()).sum(1).mean()
            h = F.glu(self.shared(mask * x))
            d, a = (h + F.glu(own(h)) * 0.5**0.5).chunk(2, -1)
            total = total + F.relu(d)
        return F.cross_entropy(self.head(total), target) + 1e-3 * entropy


@named
def tabular(batch: int) -> Example:
    """TabNet: sparse masks over columns by sorting and cumulated sums."""
    return _Tabular(), {"x": torch.randn(batch, 12), "target": torch.randint(CLASSES, (batch,))}


class _Integrated(nn.Module):
    """A flow in time by Runge-Kutta steps with its trace by a random direction, and points drawn along rays."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.field = _mlp(5, WIDTH, 4)
        self.ray = _mlp(3, WIDTH, 2)

    def slope(self, x: Tensor, time: float) -> Tensor:
        return self.field(torch.cat([x, x.new_full((len(x), 1), time)], -1))

    def forward(self, x: Tensor, start: Tensor, towards: Tensor, depth: Tensor, where: Tensor) -> Tensor:
        width = 1 / self.steps
        for step in range(self.steps):
            time = step * width
            a = self.slope(x, time)
            b = self.slope(x + width / 2 * a, time + width / 2)
            c = self.slope(x + width / 2 * b, time + width / 2)
            d = self.slope(x + width * c, time + width)
            x = x + width / 6 * (a + 2 * b + 2 * c + d)
        coarse = torch.linspace(0.1, 2.0, 9)
        points = start[:, None] + towards[:, None] * coarse[:, None]
        weight = F.softplus(self.ray(points)[..., 0])
        share = (weight / weight.sum(-1, keepdim=True)).detach()
        along = F.pad(share[:, 1:].cumsum(-1), (1, 0))
        place = torch.searchsorted(along.contiguous(), where, right=True).clamp(1, 8)
        low, high = along.gather(1, place - 1), along.gather(1, place)
        at = coarse[place - 1] + (where - low) / (high - low).clamp(min=1e-5) * (coarse[place] - coarse[place - 1])
        at = torch.cat([coarse.expand(len(at), -1), at], 1).sort(-1).values
        fine = self.ray(start[:, None] + towards[:, None] * at[..., None])
        opaque = 1 - torch.exp(-F.softplus(fine[..., 0]) * F.pad(at.diff(dim=1), (0, 1), value=0.1))
        passed = torch.cumprod(F.pad(1 - opaque + 1e-10, (1, 0), value=1.0), 1)[:, :-1]
        seen = (passed * opaque * fine[..., 1]).sum(1)
        return F.mse_loss(seen, depth) + 0.5 * x.square().sum(-1).mean()


@named
def integrated(batch: int) -> Example:
    """A neural ODE by fixed steps, and a radiance field sampled by importance (searchsorted on each ray)."""
    return _Integrated(), {
        "x": torch.randn(batch, 4),
        "start": torch.randn(batch, 3),
        "towards": F.normalize(torch.randn(batch, 3), dim=-1),
        "depth": torch.rand(batch),
        "where": torch.rand(batch, 6).sort(-1).values,
    }


class _Dreamer(nn.Module):
    """A world model's losses: states of a recurrence, posterior against prior, rewards, an actor's log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = _mlp(8, WIDTH), _mlp(WIDTH + 8, WIDTH, 8)
        self.cell = nn.GRUCell(8 + 4, WIDTH)
        self.prior, self.posterior = _mlp(WIDTH, 16), _mlp(2 * WIDTH, 16)
        self.actor, self.critic = _mlp(WIDTH, 4), _mlp(WIDTH, 1)

    def forward(self, seen: Tensor, actions: Tensor, reward: Tensor, noise: Tensor, old: Tensor) -> Tensor:
        state = seen.new_zeros(len(seen), WIDTH)
        loss = seen.new_zeros(())
        kept = []
        for step in range(seen.shape[1]):
            inputs = torch.cat([noise[:, step], F.one_hot(actions[:, step], 4).float()], -1)
            state = self.cell(inputs, state)
            before, after = self.prior(state), self.posterior(torch.cat([state, self.encode(seen[:, step])], -1))
            p, q = (
                Independent(Normal(m, F.softplus(s) + 0.1), 1) for m, s in (before.chunk(2, -1), after.chunk(2, -1))
            )
            z = q.base_dist.loc + q.base_dist.scale * noise[:, step]
            loss = loss + kl_divergence(q, p).clamp(min=0.1).mean()
            loss = loss - Normal(self.decode(torch.cat([state, z], -1)), 1.0).log_prob(seen[:, step]).sum(-1).mean()
            kept.append(state)
        states = torch.stack(kept, 1)
        value = self.critic(states).squeeze(-1)
        returns = torch.flip(torch.flip(reward, (1,)).cumsum(1), (1,))
        better = (returns - value).detach()
        policy = Categorical(logits=self.actor(states))
        ratio = (policy.log_prob(actions) - old).exp()
        clipped = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better)
        return loss - clipped.mean() + F.mse_loss(value, returns) - 0.01 * policy.entropy().mean()


@named
def world_model(batch: int) -> Example:
    """Distributions inside forward: KL, log-probabilities, entropy; PPO's clipped ratio; a recurrence."""
    return _Dreamer(), {
        "seen": torch.randn(batch, 4, 8),
        "actions": torch.randint(0, 4, (batch, 4)),
        "reward": torch.randn(batch, 4),
        "noise": torch.randn(batch, 4, 8),
        "old": -torch.rand(batch, 4),
    }


class _Copying(nn.Module):
    """A decoder whose words are its own or the source's: two distributions mixed by scatter-add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.source = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.target = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out, self.mix = nn.Linear(2 * WIDTH, VOCABULARY), nn.Linear(2 * WIDTH, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.source(self.embed(source))
        x, _ = self.target(self.embed(target), state)
        weights = (x @ memory.mT).softmax(-1)
        both = torch.cat([x, weights @ memory], -1)
        own, p = self.out(both).softmax(-1), self.mix(both).sigmoid()
        places = source.unsqueeze(1).expand(-1, x.shape[1], -1)
        mixed = (p * own).scatter_add(-1, places, (1 - p) * weights)
        return next_token((mixed + 1e-9).log()[:, :-1], target[:, 1:])


@named
def copying(batch: int) -> Example:
    """A pointer generator: LSTMs, attention, words copied by scatter-add."""
    return _Copying(), {"source": tokens(batch, 8), "target": tokens(batch, 8)}
