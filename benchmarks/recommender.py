"""A recommender: tables of categories that outweigh all else, and few layers behind them.

Shapes: b samples, f features. After Naumov et al., "Deep Learning Recommendation Model", 2019 (DLRM), with the widths
of MLPerf's.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def _layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(*each), nn.ReLU()) for each in pairwise(widths)))


class Clicks(nn.Module):
    """One row of each table and a dense part, their products in pairs, and a click or none."""

    def __init__(self, tables: int = 26, rows: int = 1_000_000, width: int = 128, dense: int = 13) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _layers(dense, 512, 256, width)
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(_layers(width + pairs, 1024, 1024, 512, 256), nn.Linear(256, 1))

    def forward(self, dense: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        """Return the loss."""
        bottom_bf = self.bottom(dense)
        parts = torch.stack([bottom_bf, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = parts @ parts.transpose(1, 2)
        row, column = torch.tril_indices(parts.shape[1], parts.shape[1], -1, device=dense.device)
        found = self.top(torch.cat([bottom_bf, products[:, row, column]], 1))
        return functional.binary_cross_entropy_with_logits(found, clicked)
