"""HyperParallel's names: HSDP over a mesh of 2 x 1, the ragged layout, and AdamW over flat shards.

torchrun --nproc-per-node=2 02_hyper_parallel.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hyper_parallel as hp


def main() -> None:
    dist.init_process_group("gloo")
    mesh = hp.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    for layer in (model[0], model[2]):
        hp.fully_shard(layer, mesh=mesh, shard_layout="ragged")
    sharded = hp.fully_shard(model, mesh=mesh, shard_layout="ragged", reshard_after_forward=False)
    optimizer = hp.optim.AdamW(sharded, lr=1e-2)

    torch.manual_seed(10 + dist.get_rank())
    x = torch.randn(32, 8)
    y = x.square().sum(dim=1, keepdim=True)
    losses = []
    for _ in range(20):
        # Two micro-batches for each step: the first leaves its gradients local.
        for i, (part, want) in enumerate(zip(x.chunk(2), y.chunk(2))):
            sharded.set_requires_gradient_sync(i == 1)
            loss = F.mse_loss(sharded(part), want) / 2
            loss.backward()
        hp.clip_grad_norm_(sharded, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
