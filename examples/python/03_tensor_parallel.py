"""Tensor parallelism by hand, with plain tensors, under fully_shard: source layouts over a mesh of 2 x 2.

torchrun --nproc-per-node=4 03_tensor_parallel.py
"""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import hyper_parallel as hp


class Copied(torch.autograd.Function):
    """What all ranks have goes into parts of a computation: their gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """The parts of a result are added; each has the result's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Mlp(nn.Module):
    """Built whole; `cut` leaves this rank's rows of `up` and columns of `down`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def cut(self, mesh: hp.DeviceMesh) -> None:
        self.group = mesh.get_group()
        for layer, name, dim in [(self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)]:
            block = getattr(layer, name).detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
            setattr(layer, name, nn.Parameter(block.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(Copied.apply(self.norm(x), self.group)))
        return x + Summed.apply(self.down(h), self.group)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    data = mesh["dp_shard"]
    torch.manual_seed(0)
    blocks = [Mlp(32, 64), Mlp(32, 64)]
    model = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))
    cuts = hp.ModuleShardingSpec({"up.weight": {"tp": Shard(0)}, "up.bias": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}})
    plan = hp.ShardingPlan({"1": cuts, "2": cuts})
    for block in blocks:
        block.cut(mesh["tp"])
    infos = hp.build_source_shard_info_by_param(model, hp.build_source_shard_info(plan, mesh))
    for part in (*blocks, model):
        hp.fully_shard(part, mesh=data, source_shard_infos=hp.managed_source_shard_infos(part, infos, mesh=data))
    # Optimizers and state dictionaries see the whole tensors.
    weight: Any = blocks[0].up.weight
    assert weight.shape == (64, 32) and weight.to_local().shape == (16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(10 + data.get_local_rank())  # ranks of one tp group see the same data
    x = torch.randn(32, 8)
    y = x.square().sum(dim=1, keepdim=True)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        hp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
