"""The Python blocks of docs/guide/python.md, on four ranks: each with the names that its text takes for granted."""
import os
import pathlib
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
from models import DIM, WORDS, Net, batch, build, loss_of
from ranks import run_ranks
from scripts import whole

GUIDE = pathlib.Path(os.environ["HP_SOURCE"]) / "docs" / "guide" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


class Decoder(nn.Module):
    """As transformers nests its layers."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = build(Net).blocks
        self.saved = []

    def forward(self, x):
        for layer in self.model.layers:
            x = layer(x)
        return x

    def save_pretrained(self, folder, state_dict):
        self.saved.append((folder, state_dict))


class Cut(nn.Module):
    """Computes with this rank's rows of one weight and columns of the next."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, DIM // 2, bias=False)
        self.down = nn.Linear(DIM // 2, DIM, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class CutModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.mlp = Cut()

    def forward(self, tokens):
        return self.mlp(self.embed(tokens))


def imports(names):
    assert names["fully_shard"] is ours.fully_shard and names["MixedPrecisionPolicy"] is ours.MixedPrecisionPolicy


def layers(names):
    model = names["model"]
    assert all(isinstance(layer, ours.FSDPModule) for layer in [*model.model.layers, model])
    model(torch.ones(2, DIM)).sum().backward()


def saved(names):
    model, want = names["model"], build(Net).blocks.state_dict()
    assert len(model.saved) == (names["rank"] == 0)
    for folder, state in model.saved:
        assert folder == "somewhere" and all(torch.equal(state[f"model.layers.{name}"], value) for name, value in want.items())


def hybrid(names):
    model, hp = names["model"], names["hp"]
    assert type(model).__name__ == "HSDPNet" and model.blocks[0].scale.placements == (Replicate(), Replicate())
    assert names["state"]["head.weight"].placements == (Replicate(), Shard(0))
    tokens, targets = batch(names["rank"], 0)
    loss_of(model(tokens), targets).backward()
    hp.hsdp_sync_stream()
    assert whole(model.head.weight.grad).abs().sum() > 0


def tensor_parallel(names):
    model = names["model"]
    up, down = model.mlp.up.weight, model.mlp.down.weight
    assert up.placements == (_StridedShard(0, split_factor=2), Shard(0)) and up.shape == (DIM, DIM)
    assert down.placements == (Shard(0), Shard(1)) and isinstance(model.embed.weight, DTensor)
    model(batch(names["rank"], 0)[0]).sum().backward()


# A text that the block has; its names before, if it does not go on with those of the block before; what it has done.
STEPS = [
    ("from hyper_parallel.fsdp import", dict, imports),
    ("model.model.layers", lambda: {"model": Decoder(), "fully_shard": ours.fully_shard}, layers),
    ("save_pretrained", None, saved),
    ("replicate_params", lambda: {"model": build(Net)}, hybrid),
    ("ShardingPlan", lambda: {"model": build(CutModel), "hp": hp}, tensor_parallel),
]


def read(rank, world, blocks):
    names = {}
    for block, (mark, start, check) in zip(blocks, STEPS, strict=True):
        assert mark in block, f"{mark} is not in\n{block}"
        if start is not None:
            names = {**start(), "rank": rank, "folder": "somewhere"}
        exec(compile(block, f"the block of {GUIDE.name} with {mark}", "exec"), names)
        check(names)
        dist.barrier()


def test_blocks_of_the_guide():
    run_ranks(4, read, BLOCKS)
