"""Small models."""
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

DIM, WORDS = 12, 22


class Block(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Scaled(Block):
    """With a parameter that has no dimension."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) * self.factor


class Net(nn.Module):
    """Embedding, blocks, head; sizes that no world divides."""

    def __init__(self, blocks=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def build(cls=Net, seed=7, **options):
    torch.manual_seed(seed)
    return cls(**options)


def batch(rank, step, rows=3):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (rows, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
