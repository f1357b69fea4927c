"""Models whose samples are permuted, counted or pointed at by place on their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations import moe as _registers_grouped_mm_fallback  # noqa: F401


class Experts(nn.Module):
    """Layers of experts: tokens are sorted by their expert, multiplied run by run and put back."""

    def __init__(self, layers: int = 2, experts: int = 4, chosen: int = 2, balance: float = 0.0) -> None:
        super().__init__()
        self.chosen, self.balance = chosen, balance
        self.layers = nn.ModuleList(nn.Linear(8, experts, bias=False) for _ in range(layers))
        self.weights = nn.ParameterList(torch.randn(experts, 8, 8) / 3 for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens [b, s, 8], with one that balances the experts where asked."""
        rest = x.new_zeros(())
        for router, weight in zip(self.layers, self.weights, strict=True):
            tokens = x.flatten(0, 1)
            gates = router(tokens).softmax(-1)
            best, experts = gates.topk(self.chosen, -1)
            x = x + self.mixed(tokens, best, experts, weight).view_as(x)
            rest = rest + (gates.mean(0) * (experts[:, :1] == torch.arange(gates.shape[1])).float().mean(0)).sum()
        return x.square().mean() + self.balance * rest if self.balance else x.square().mean()

    def mixed(self, tokens: torch.Tensor, best: torch.Tensor, experts: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return the sum of what a token's experts make of it."""
        kinds, order = experts.flatten().sort()
        back = torch.empty_like(order).index_put((order,), torch.arange(order.numel()))
        ends = torch.histc(kinds.float(), w.shape[0], min=0, max=w.shape[0] - 1).cumsum(0, dtype=torch.int32)
        made = (
            torch.ops.transformers.grouped_mm_fallback(tokens[order // self.chosen], w, ends)
            * best.flatten()[order, None]
        )
        return made[back].view(-1, self.chosen, tokens.shape[1]).sum(1)


class Gated(nn.Module):
    """Experts with two products and a gate between, as mixtures have; `native`: torch's grouped product, in bf16."""

    def __init__(self, native: bool = False) -> None:
        super().__init__()
        self.native = native
        self.router, self.head = nn.Linear(16, 4, bias=False), nn.Linear(16, 16)
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 16) / 4), nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens [b, s, 16]."""
        tokens = x.flatten(0, 1)
        best, experts = self.router(tokens).softmax(-1).topk(2, -1)
        kinds, order = experts.flatten().sort()
        ends = torch.histc(kinds.float(), 4, min=0, max=3).cumsum(0, dtype=torch.int32)
        gate, value = self.product(tokens[order // 2], self.up.transpose(1, 2), ends).chunk(2, -1)
        made = self.product(functional.silu(gate) * (value + 1.0), self.down.transpose(1, 2), ends)
        made = (made * best.flatten()[order, None])[order.argsort()].view(-1, 2, 16).sum(1)
        return self.head(tokens + made).square().mean()

    def product(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return each run of rows times its expert's matrix."""
        if self.native:
            return torch._grouped_mm(x.bfloat16(), w.bfloat16(), ends).float()
        return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


class Picked(nn.Module):
    """Classifies each sample by one of its tokens; positions and their projection are shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, 4))
        self.project, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> nn.Module:
        """Set the mode; the norm stays frozen."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of samples [b, 5, 4] of so many tokens."""
        places = torch.arange(x.shape[1])[None].repeat(x.shape[0], 1)
        x = torch.tanh(x + self.positions[places] + self.project(self.positions[:5]))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        logits = self.head(x)[torch.arange(x.shape[0]), lengths - 1]
        return functional.cross_entropy(logits, labels)


class Near(nn.Module):
    """Edges to each point's nearest ones, looked up among the points of all samples, as graphs of points do."""

    def __init__(self, far: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.far = far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of samples [b, n, 4]; `far`: of points that may be another sample's."""
        b, n, _ = x.shape
        for layer in (self.first, self.second):
            near = torch.cdist(x.detach(), x.detach()).topk(3, largest=False).indices
            rows = near + torch.arange(b).view(-1, 1, 1) * (n // 2 if self.far else n)
            around = x.reshape(b * n, -1)[rows.view(-1)].view(b, n, 3, -1)
            x = layer(torch.cat([around, x.unsqueeze(2).expand_as(around)], -1)).tanh().amax(2)
        return x.square().mean()


class Pairs(nn.Module):
    """Scores what was chosen and what was not in one go, at the last token of each, as reward models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(
        self, chosen: torch.Tensor, other: torch.Tensor, lengths: torch.Tensor, other_lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return the Bradley-Terry loss of pairs [b, 5, 4] of so many tokens each."""
        both, last = torch.cat([chosen, other]), torch.cat([lengths, other_lengths]) - 1
        scores = self.head(self.body(both).tanh()).squeeze(-1)
        better, worse = scores[torch.arange(both.shape[0]), last].chunk(2)
        return -functional.logsigmoid(better - worse).mean()


class Ranked(nn.Module):
    """Uses rows otherwise than one by one, or places otherwise than to point at rows: as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the loss of 8 samples, and for `returned` the samples in an order."""
        x = self.linear(x)
        order = x[:, 0].detach().sort()[1]
        match self.how:
            case "neighbours":
                rows = x[order].view(4, 2, 4)
                return (rows[:, 0] * rows[:, 1]).mean()
            case "beside":
                return (x[order] * x).mean()
            case "numbers":
                return (x * order[:, None]).mean()
            case "positions":
                return (x * torch.arange(8.0)[:, None]).mean()
            case "table":
                return x[torch.arange(8), torch.arange(8) // 2].square().mean()
            case "halves":
                both = torch.cat([x, x.tanh()])
                return both[torch.arange(16), torch.arange(16) // 4].square().mean()
            case "swapped":
                both = torch.cat([x, x.tanh()])
                return (both[(torch.arange(16) + 8) % 16] * both.exp()).mean()
            case "diagonal":
                return x.repeat(1, 2)[torch.arange(8), torch.arange(8)].square().mean()
            case "first":
                return x[order][0].mean()
            case "returned":
                return x[order].repeat(1, 200).tanh(), x.square().mean()  # more numbers than a metric is made of
        raise ValueError(self.how)


def routing() -> dict[str, tuple[nn.Module, Any]]:
    """Return the models that micro-batches can do, each with an example batch, the same at every call."""
    torch.manual_seed(4)
    lengths = torch.randint(1, 6, (8,))
    return {
        "experts": (Experts(), (torch.randn(8, 3, 8),)),
        "pairs": (Pairs(), (*torch.randn(2, 8, 5, 4), *torch.randint(1, 6, (2, 8)))),
        "near": (Near(), (torch.randn(8, 5, 4),)),
        "picked": (Picked().train(), (torch.randn(8, 5, 4), lengths, torch.randint(0, 3, (8,)))),
    }
