"""Training scripts over one mesh for all parallelism, and without sharding. See scripts."""
import functools

import torch
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from models import DIM, batch, build, loss_of
from scripts import Record, layouts, policy

HIDDEN = 24


class Mlp(nn.Module):
    """Computes with DTensors."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return y.redistribute(placements=x.placements)


CUTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def distributed(model, mesh, tensor_axis):
    """Parameters become DTensors on all of the mesh, cut along one axis."""
    for name, parameter in list(model.named_parameters()):
        placements = [Replicate()] * mesh.ndim
        if tensor_axis is not None:
            placements[tensor_axis] = CUTS.get(name.split(".", 1)[1], Replicate())
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))


@functools.cache
def mesh_of(shape, names):
    # FSDP2 wants the mesh of the parameters and its argument to be one object, and DTensors share what is equal.
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def one_mesh(api, rank, world, shape=(), names=(), shard=None, replicate=None, dtype=None, dim=None, micro_batches=1,
             optimizer_type=torch.optim.AdamW):
    mesh = mesh_of(shape, names)
    model = nn.Sequential(build(Mlp), build(Mlp, seed=8))
    distributed(model, mesh, names.index("tp") if "tp" in names else None)
    options = {"mesh": mesh, "dp_mesh_dims": api.DataParallelMeshDims(shard=shard, replicate=replicate), "mp_policy": policy(api, dtype)}
    if dim is not None:
        options["shard_placement_fn"] = lambda parameter: Shard(dim) if parameter.ndim == 2 else None
    for part in model:
        api.fully_shard(part, **options)
    api.fully_shard(model, **options)
    optimizer = optimizer_type(model.parameters(), lr=1e-2, foreach=False)
    data = [name != "tp" for name in names]
    placements = [Shard(0) if is_data else Replicate() for is_data in data]
    place = sum(10**i * c for i, (c, is_data) in enumerate(zip(mesh.get_coordinate(), data)) if is_data)
    record = Record()
    record.steps.append(layouts(model))
    for step in range(3):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(10000 * step + 1000 * micro + place))
            loss = model(DTensor.from_local(x, mesh, placements)).to_local().float().square().mean()
            loss.backward()
        record.step(model, optimizer, loss)
    return record.steps


def replicated(api, rank, world, dtype=None, by=None):
    """Data parallelism without sharding."""
    replicate = getattr(api, "replicate", replicate_with_fsdp.replicate)
    mesh = mesh_of((world,), ("replicate",))
    model = build()
    for block in model.blocks:
        replicate(block, mesh=mesh, mp_policy=policy(api, dtype))
    replicate(model, mesh=mesh, mp_policy=policy(api, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = Record()
    record.steps.append(layouts(model))
    for step in range(3):
        for micro in range(2):
            if by == "sync":
                model.set_requires_gradient_sync(micro == 1)
            elif by == "all_reduce":
                model.set_requires_all_reduce(micro == 1)
            tokens, targets = batch(rank, 10 * step + micro)
            loss = loss_of(model(tokens), targets)
            loss.backward()
        record.step(model, optimizer, loss)
    return record.steps
