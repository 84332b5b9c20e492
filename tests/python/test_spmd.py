"""dp_mesh_dims and replicate: the same losses, gradients, weights and layouts as FSDP2's, and what they refuse."""
import copy

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
import spmd_scripts
from compare import BF16, compare
from models import DIM, Block, build
from ranks import run_ranks
from scripts import gradients, mesh_of

MESHES = {
    "dp of 2": (2, dict(shape=(2,), names=("dp",), shard="dp")),
    "dp x tp": (4, dict(shape=(2, 2), names=("dp", "tp"), shard="dp")),
    "tp x dp": (4, dict(shape=(2, 2), names=("tp", "dp"), shard="dp")),
    "columns": (4, dict(shape=(2, 2), names=("dp", "tp"), shard="dp", dim=1)),
    "accumulated": (4, dict(shape=(2, 2), names=("dp", "tp"), shard="dp", micro_batches=2)),
    "replicas": (4, dict(shape=(2, 2), names=("rep", "dp"), shard="dp", replicate="rep")),
    "replicas x tp": (4, dict(shape=(2, 1, 2), names=("rep", "dp", "tp"), shard="dp", replicate="rep")),
    "two shard axes": (4, dict(shape=(2, 2), names=("dp", "cp"), shard=("dp", "cp"))),
    "two shard axes x tp": (4, dict(shape=(2, 1, 2), names=("dp", "cp", "tp"), shard=("dp", "cp"))),
    "two shard axes and replicas": (4, dict(shape=(2, 1, 2), names=("rep", "dp", "cp"), shard=("dp", "cp"), replicate="rep")),
    "replicas only": (4, dict(shape=(2, 2), names=("dp", "tp"), replicate="dp")),
}


@pytest.mark.parametrize("case", MESHES)
def test_one_mesh(case):
    world, options = MESHES[case]
    compare(world, spmd_scripts.one_mesh, **options)


def test_one_mesh_in_mixed_precision():
    options = MESHES["dp x tp"][1]
    compare(4, spmd_scripts.one_mesh, **BF16, **options)


def test_one_mesh_accumulates_in_mixed_precision():
    # FSDP2 adds up micro-batches before the sum over tp, in fp32; we take that sum for each, in bf16: one rounding more.
    options = MESHES["accumulated"][1]
    compare(4, spmd_scripts.one_mesh, optimizer_type=torch.optim.SGD, **{**BF16, "of_largest": 2**-8}, **options)


@pytest.mark.parametrize("by", [None, "sync", "all_reduce"])
def test_replicate(by):
    compare(2, spmd_scripts.replicated, by=by)


def test_replicate_over_four():
    compare(4, spmd_scripts.replicated)


def refused(*parts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))


def refusals(rank, world):
    mesh = spmd_scripts.mesh_of((2, 2), ("dp", "tp"))
    other = spmd_scripts.mesh_of((1, 2, 2), ("one", "dp", "tp"))
    dims = ours.DataParallelMeshDims(shard="dp")

    def model(*placements, shape=(4, 4), owner=mesh):
        module = nn.Linear(1, 1, bias=False)
        module.weight = nn.Parameter(DTensor.from_local(torch.ones(shape), owner, placements, run_check=False))
        return module

    def check(*parts, module=None, mesh=mesh, dims=dims, call=ours.fully_shard, **options):
        module = module or model(Replicate(), Replicate())
        weight, cls = module.weight, type(module)
        with refused(*parts):
            call(module, mesh=mesh, dp_mesh_dims=dims, **options)
        assert module.weight is weight and type(module) is cls and not module._forward_hooks

    check("dp_mesh_dims names 'ep'", dims=ours.DataParallelMeshDims(shard="ep"))
    check("want one with mesh_dim_names", mesh=None)
    check("want one with mesh_dim_names", mesh=mesh_of(world, 0))
    check("each axis once", dims=ours.DataParallelMeshDims(shard="dp", replicate="dp"))
    check("follow each other", mesh=other, dims=ours.DataParallelMeshDims(shard=("one", "tp")))
    check("follow each other", mesh=other, dims=ours.DataParallelMeshDims(shard=("dp", "one")))
    check("dp_mesh_dims is int", dims=1)
    check("weight is a plain tensor", module=nn.Linear(4, 4))
    check("lies on another mesh", module=model(Replicate(), Replicate(), Replicate(), owner=other))
    check("placement on axis 'dp' is", "want Replicate", module=model(Shard(0), Replicate()))
    check("placement P", module=model(Replicate(), Partial()))
    check("want a multiple of 4", module=model(Replicate(), Shard(0), shape=(3, 4)))
    check("shard_placement_fn is given", dims=ours.DataParallelMeshDims(replicate="dp"), shard_placement_fn=lambda parameter: None)
    check("want replicate alone", call=ours.replicate)
    check("MemoryBudget", reshard_after_forward=hp.MemoryBudget(1))
    with refused("mesh has 2 dims, want 1"):
        ours.replicate(Block(), mesh=mesh_of(world, 2))
    with refused("at least one"):
        ours.DataParallelMeshDims()
    assert ours.DataParallelMeshDims(shard=("a", "b")).shard_names == ("a", "b")
    assert ours.DataParallelMeshDims(shard="a").replicate_names == ()
    # torch's own class does as well.
    module = ours.fully_shard(model(Replicate(), Shard(0)), mesh=mesh, dp_mesh_dims=theirs.DataParallelMeshDims(shard="dp"))
    assert module.weight.device_mesh == mesh and module.weight.to_local().shape == (2, 4) and module.weight.shape == (8, 4)
    with refused("tensor parallelism has cut"):
        hp.clip_grad_norm_(module, 1.0)


def test_refusals():
    run_ranks(4, refusals)


def copied(rank, world, dims):
    mesh = spmd_scripts.mesh_of((2, 2), ("dp", "tp"))
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
    ours.fully_shard(model, mesh=mesh, dp_mesh_dims=ours.DataParallelMeshDims(**dims))
    twin = copy.deepcopy(model)
    assert twin.weight.device_mesh == mesh and twin.weight.placements == model.weight.placements
    torch.testing.assert_close(twin.weight.full_tensor(), model.weight.full_tensor())
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()])
    torch.testing.assert_close(twin(x).full_tensor(), model(x).full_tensor())


@pytest.mark.parametrize("dims", [{"shard": "dp"}, {"replicate": "dp"}], ids=["shard", "replicate"])
def test_copies(dims):
    run_ranks(4, copied, dims)


def replicate_by_default(rank, world):
    model, plain = ours.replicate(build(Block)), build(Block)
    assert isinstance(model, ours.ReplicateModule) and type(model).__name__ == "ReplicateBlock"
    assert model.scale.device_mesh.mesh_dim_names == ("replicate",) and model.scale.placements == (Replicate(),)
    x = torch.ones(2, DIM) * (rank + 1)
    model(x).sum().backward()
    for r in range(world):
        plain(torch.ones(2, DIM) * (r + 1)).sum().backward()
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).grad / world)
    norm = hp.clip_grad_norm_(model, 1e9)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad / world for p in plain.parameters()]))


def test_replicate_by_default():
    run_ranks(2, replicate_by_default)
