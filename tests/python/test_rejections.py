"""What FSDP2 rejects: every check of torch.distributed.fsdp._fully_shard that a program can run into, tried on both sides."""
import contextlib
import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_parallel.fsdp as ours
import spmd_scripts
from models import DIM, Block, Scaled, build
from ranks import run_ranks
from scripts import mesh_of, whole


class Case(NamedTuple):
    """What FSDP2 raises, and what we say; None: it does right here."""

    run: object
    error: type
    text: str
    says: str | None
    world: int = 2


CASES = {}


def case(*expected):
    def add(run):
        CASES[run.__name__] = Case(run, *expected)

    return add


def replicate_of(api):
    return getattr(api, "replicate", replicate_with_fsdp.replicate)


def trains(model, plain, rank, world, steps=2):
    """Steps of `model` are those of `plain` with the gradients of all ranks' batches, averaged in fp32."""
    rows = lambda step, which: torch.randn(2, DIM, generator=torch.Generator().manual_seed(100 * step + which))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(steps):
        model(rows(step, rank)).square().sum().backward()
        references = list(plain.parameters())
        parts = [torch.autograd.grad(plain(rows(step, which)).square().sum(), references) for which in range(world)]
        for (name, parameter), reference, *grads in zip(model.named_parameters(), references, *parts):
            reference.grad = (sum(grad.float() for grad in grads) / world).to(reference.dtype)
            message = lambda text: f"{name}: {text}"  # noqa: B023
            torch.testing.assert_close(whole(parameter.grad), reference.grad, atol=1e-5, rtol=1e-5, msg=message)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(whole(parameter), reference.detach(), msg=name)


def shard_and_train(api, make, rank, world, steps=2, **options):
    model, plain = build(make), build(make)
    api.fully_shard(model, **{"mesh": mesh_of(world, 0), **options})
    trains(model, plain, rank, world, steps)


def sharded(api, world, **options):
    return api.fully_shard(build(Block), **{"mesh": mesh_of(world, 0), **options})


def blocks():
    return nn.Sequential(build(Block), build(Block, seed=8))


def shard_blocks(api, model, world):
    """Each block a unit, and both together."""
    for part in [*model, model]:
        api.fully_shard(part, mesh=mesh_of(world, 0))
    return model


# Arguments.
for name, run, *expected in [
    ("no_axes", lambda api, rank, world: api.DataParallelMeshDims(),
     ValueError, "At least one of shard or replicate", "shard and replicate are None"),
    ("a_container", lambda api, rank, world: api.fully_shard(nn.ModuleList([Block()]), mesh=mesh_of(world, 0)),
     ValueError, "does not support containers", "ModuleList, which has no forward"),
    ("no_module", lambda api, rank, world: api.fully_shard([], mesh=mesh_of(world, 0)),
     IndexError, "out of range", "list of modules is empty"),
    ("three_axes", lambda api, rank, world: sharded(api, world, mesh=init_device_mesh("cpu", (world, 1, 1))),
     ValueError, "1D or 2D", "mesh has 3 dims"),
    ("replicas_on_two_axes", lambda api, rank, world: replicate_of(api)(Block(), mesh=mesh_of(world, 1)),
     ValueError, "1D", "mesh has 2 dims, want 1"),
    ("a_mesh_of_others", lambda api, rank, world: api.fully_shard(Block(), mesh=DeviceMesh("cpu", [1 - rank])),
     IndexError, "out of range", "not part of"),
    ("reshard_by_a_word", lambda api, rank, world: sharded(api, world, reshard_after_forward="yes"),
     ValueError, "should be a bool or an int", "reshard_after_forward is 'yes'"),
    ("reshard_by_no_factor", lambda api, rank, world: sharded(api, world, reshard_after_forward=3),
     ValueError, "factor of", "reshard_after_forward is 3"),
    ("reshard_by_zero", lambda api, rank, world: sharded(api, world, reshard_after_forward=0),
     ValueError, "factor of", "reshard_after_forward is 0"),
    ("buffers_by_a_bool", lambda api, rank, world: sharded(api, world).set_reduce_scatter_max_input_buffers(True),
     TypeError, "must be an int", "want an int"),
    ("no_buffers", lambda api, rank, world: sharded(api, world).set_reduce_scatter_max_input_buffers(0),
     ValueError, "positive int", "want 1 or more"),
    ("reshard_after_forward_by_a_number", lambda api, rank, world: sharded(api, world).set_reshard_after_forward(1),
     ValueError, "should be a bool", "reshard_after_forward is 1"),
    ("a_stream_with_replicas",
     lambda api, rank, world: sharded(api, world, mesh=mesh_of(world, 1)).set_all_reduce_hook(print, stream=object()),
     ValueError, "stream cannot be set", "stream is given"),
    ("prefetch_of_a_plain_module", lambda api, rank, world: sharded(api, world).set_modules_to_forward_prefetch([Block()]),
     ValueError, "Expects FSDPModule", "element 0 is Block"),
    ("prefetch_of_a_plain_module_in_backward",
     lambda api, rank, world: sharded(api, world).set_modules_to_backward_prefetch([Block()]),
     ValueError, "Expects FSDPModule", "element 0 is Block"),
    ("an_unknown_method", lambda api, rank, world: api.register_fsdp_forward_method(sharded(api, world), "encode"),
     ValueError, "does not have a method", "has no method encode"),
    ("a_plain_module_shares", lambda api, rank, world: api.share_comm_ctx([Block()]),
     ValueError, "Expects list of FSDPModules", "element 0 is Block"),
]:
    CASES[name] = Case(run, *expected)


@case(AssertionError, "once", "already a unit")
def twice(api, rank, world):
    api.fully_shard(api.fully_shard(Block(), mesh=mesh_of(world, 0)), mesh=mesh_of(world, 0))


@case(RuntimeError, "already managed by `fully_shard`", "already a unit")
def sharded_and_replicated(api, rank, world):
    replicate_of(api)(api.fully_shard(Block(), mesh=mesh_of(world, 0)), mesh=mesh_of(world, 0))


@case(AssertionError, "mesh_dim_names", None, 4)
def two_axes_without_names(api, rank, world):
    shard_and_train(api, Block, rank, world, mesh=init_device_mesh("cpu", (2, 2)))


@case(ValueError, "Invalid shard_placement_fn result", "shard_placement_fn returned Replicate")
def a_placement_that_is_none(api, rank, world):
    api.fully_shard(Block(), mesh=mesh_of(world, 0), shard_placement_fn=lambda parameter: Replicate())


@case(AssertionError, "Shard dim 2 is invalid", "shard_placement_fn returned")
def a_dimension_that_is_none(api, rank, world):
    api.fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh_of(world, 0), shard_placement_fn=lambda parameter: Shard(2))


@case(ValueError, "same process group", "shard_placement_fn returned ShardPlacementResult")
def other_meshes_by_parameter(api, rank, world):
    """Two parameters on one group with two descriptions of it."""
    mesh = mesh_of(world, 0)
    choose = lambda parameter: ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    api.fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=choose)


# Parameters.


@case(ValueError, "scalar parameters", None)
def a_scalar(api, rank, world):
    shard_and_train(api, Scaled, rank, world)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, 7).t())

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@case(NotImplementedError, "non-contiguous", None)
def strides(api, rank, world):
    shard_and_train(api, Transposed, rank, world)


@case(NotImplementedError, "uneven sharding", None)
def uneven_columns(api, rank, world):
    choose = lambda parameter: Shard(1) if parameter.dim() == 2 else None
    uneven = lambda: nn.Sequential(nn.Linear(DIM, 7), nn.Linear(7, 5))
    shard_and_train(api, uneven, rank, world, shard_placement_fn=choose)


def dtypes():
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, dtype=torch.bfloat16))
    model[1].register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    model.register_forward_hook(lambda module, args, result: result.float())
    return model


@case(AssertionError, "uniform original parameter dtype", None)
def two_dtypes(api, rank, world):
    # One step: an optimizer's step rounds to bf16, and not always alike for a part and the whole.
    shard_and_train(api, dtypes, rank, world, steps=1)


@case(AssertionError, "uniform gradient dtype", None)
def thawed(api, rank, world):
    """Only one dtype trained in the first forward."""
    model, plain = build(dtypes), build(dtypes)
    model[1].requires_grad_(False)
    api.fully_shard(model, mesh=mesh_of(world, 0))
    model(torch.ones(2, DIM)).sum().backward()
    model.zero_grad()
    model[1].requires_grad_(True)
    trains(model, plain, rank, world, steps=1)


@case(RuntimeError, "meta device", "meta|no values")
def on_the_meta_device(api, rank, world):
    with torch.device("meta"):
        model = Block()
    api.fully_shard(model, mesh=mesh_of(world, 0))
    model(torch.ones(2, DIM))


@case(RuntimeError, "meta device", "meta|no values")
def offloaded_on_the_meta_device(api, rank, world):
    with torch.device("meta"):
        model = Block()
    api.fully_shard(model, mesh=mesh_of(world, 0), offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    model(torch.ones(2, DIM))


@case(ValueError, "shared with a parameter", "already managed by unit")
def tied_across_units(api, rank, world):
    model = blocks()
    model[1].up.weight = model[0].up.weight
    shard_blocks(api, model, world)
    model(torch.ones(2, DIM))


@case(AssertionError, "deepcopy", None)
def copied(api, rank, world):
    model, plain = build(Block), build(Block)
    trains(copy.deepcopy(api.fully_shard(model, mesh=mesh_of(world, 0))), plain, rank, world)


@case(AssertionError, "swap_tensors", "replaced by another")
def replaced_where_tensors_are_swapped(api, rank, world):
    model = api.fully_shard(build(Block), mesh=mesh_of(world, 0))
    model.scale = nn.Parameter(model.scale.detach().clone())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model(torch.ones(2, DIM))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@case(AssertionError, "requires even sharding", "want this rank's part")
def loaded_from_uneven_columns(api, rank, world):
    model = api.fully_shard(nn.Linear(DIM, 3, bias=False), mesh=mesh_of(world, 0), shard_placement_fn=lambda parameter: Shard(1))
    part = torch.ones(3, [DIM - 5, 5][rank])
    weight = DTensor.from_local(part, mesh_of(world, 0), [Shard(1)], run_check=False, shape=(3, DIM), stride=(DIM, 1))
    model.load_state_dict({"weight": weight}, assign=True)
    model(torch.ones(2, DIM))


# One mesh for all.


def cut(owner, *placements, shape=(DIM, DIM)):
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(shape), owner, placements, run_check=False))
    return module


def on_one_mesh(api, module, mesh, **dims):
    api.fully_shard(module, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(**(dims or {"shard": "dp"})))


def pair():
    return spmd_scripts.mesh_of((2, 1), ("dp", "tp"))


@case(ValueError, "mesh_dim_names", "want one with mesh_dim_names")
def one_mesh_without_names(api, rank, world):
    on_one_mesh(api, cut(mesh_of(world, 0), Replicate()), mesh_of(world, 0))


@case(ValueError, "not found", "dp_mesh_dims names 'ep'")
def an_unknown_axis(api, rank, world):
    on_one_mesh(api, cut(pair(), Replicate(), Replicate()), pair(), shard="ep")


@case(ValueError, "plain tensor", "weight is a plain tensor")
def a_plain_tensor(api, rank, world):
    on_one_mesh(api, nn.Linear(2, 2), pair())


@case(ValueError, "same mesh", "lies on another mesh")
def on_another_mesh(api, rank, world):
    on_one_mesh(api, cut(spmd_scripts.mesh_of((1, 2), ("tp", "dp")), Replicate(), Replicate()), pair())


class Distributed(nn.Module):
    """A weight that is a DTensor, and plain tensors around it."""

    def __init__(self, mesh, *placements):
        super().__init__()
        weight = torch.randn(4, DIM)
        self.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(weight, mesh, placements))
        self.placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)

    def forward(self, x):
        if not isinstance(self.weight, DTensor):
            return nn.functional.linear(x, self.weight)
        mesh = self.weight.device_mesh
        y = nn.functional.linear(DTensor.from_local(x, mesh, self.placements, run_check=False), self.weight)
        return y.redistribute(placements=self.placements).to_local()


def plain_of(model):
    plain = copy.deepcopy(model)
    plain.weight = nn.Parameter(whole(model.weight))
    return plain


@case(ValueError, "different mesh objects", None)
def on_an_equal_mesh(api, rank, world):
    """The same mesh, but not the same object."""
    model = Distributed(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), Replicate(), Replicate())
    plain = plain_of(model)
    twin = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    assert twin is not model.weight.device_mesh and twin == model.weight.device_mesh
    on_one_mesh(api, model, twin)
    trains(model, plain, rank, world)


@case(ValueError, "DP shard dim", "placement on axis 'dp' is")
def cut_where_it_should_be_sharded(api, rank, world):
    on_one_mesh(api, cut(pair(), Shard(0), Replicate()), pair())


@case(ValueError, "DP replicate dim", "placement on axis 'dp' is")
def cut_where_it_should_be_replicated(api, rank, world):
    on_one_mesh(api, cut(pair(), Shard(0), Replicate()), pair(), replicate="dp", shard="tp")


@case(ValueError, "not supported with DDPMeshInfo", "shard_placement_fn is given")
def placements_without_shards(api, rank, world):
    api.fully_shard(cut(pair(), Replicate(), Replicate()), mesh=pair(), dp_mesh_dims=api.DataParallelMeshDims(replicate="dp"),
                    shard_placement_fn=lambda parameter: Shard(0))


@case(ValueError, "replicate-only", "want replicate alone")
def replicate_with_shards(api, rank, world):
    dims = api.DataParallelMeshDims(shard="dp")
    replicate_of(api)(cut(pair(), Replicate(), Replicate()), mesh=pair(), dp_mesh_dims=dims)


@case(NotImplementedError, "as int is not yet supported", None, 4)
def one_mesh_resharded_over_two(api, rank, world):
    mesh = spmd_scripts.mesh_of((4, 1), ("dp", "tp"))
    model = Distributed(mesh, Replicate(), Replicate())
    plain = plain_of(model)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"), reshard_after_forward=2)
    trains(model, plain, rank, world)


# Tensor parallelism.


def wide():
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM))


@case(NotImplementedError, "smaller mesh is not supported for DTensor", None, 4)
def parallel_resharded_over_two(api, rank, world):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model, plain = build(wide), build(wide)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    api.fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
    trains(model, plain, rank, world)


@case(NotImplementedError, "only supports 1D TP/EP", None)
def three_axes_of_tensors(api, rank, world):
    mesh = init_device_mesh("cpu", (2, 1, 1, 1), mesh_dim_names=("dp", "a", "b", "c"))
    model = Distributed(mesh["a", "b", "c"], Replicate(), Replicate(), Shard(0))
    model.placements = [Replicate()] * 3
    plain = plain_of(model)
    api.fully_shard(model, mesh=mesh["dp"])
    trains(model, plain, rank, world)


@case(TypeError, "value was None", "two parts of one mesh")
def unrelated_meshes(api, rank, world):
    api.fully_shard(cut(mesh_of(world, 0), Replicate()), mesh=mesh_of(world, 0))


# The order of calls.


@case(RuntimeError, "root module first", None)
def inner_forward_first(api, rank, world):
    model, plain = shard_blocks(api, blocks(), world), blocks()
    x = torch.ones(2, DIM)
    torch.testing.assert_close(model[1](x), plain[1](x))
    trains(model, plain, rank, world)


@case(RuntimeError, "requires a single root module", None)
def a_list_as_root(api, rank, world):
    parts, plain = [build(Block), build(Block, seed=8)], blocks()
    api.fully_shard(parts, mesh=mesh_of(world, 0))
    trains(nn.Sequential(*parts), plain, rank, world)


@case(RuntimeError, "must be called on the root", None)
def reset_below_the_root(api, rank, world):
    model, plain = shard_blocks(api, blocks(), world), blocks()
    model(torch.ones(2, DIM))
    model[0].reset_iter_state()
    trains(model, plain, rank, world)


# Methods.


def own_communication():
    from test_api import Gather

    return Gather()


@case(AssertionError, "custom", "NCCL")
def symmetric_memory_after_own_communication(api, rank, world):
    model = sharded(api, world)
    model.set_custom_all_gather(own_communication())
    model.set_symm_mem_for_comm()


@case(AssertionError, "custom", "after set_custom_all_gather")
def memory_of_the_group_after_own_communication(api, rank, world):
    model = sharded(api, world)
    model.set_custom_all_gather(own_communication())
    model.set_allocate_memory_from_process_group_for_comm(True)


@case(AssertionError, "custom", "after set_custom_reduce_scatter")
def memory_of_the_group_after_own_reduction(api, rank, world):
    model = sharded(api, world)
    model.set_custom_reduce_scatter(own_communication())
    model.set_allocate_memory_from_process_group_for_comm(True)


@case(AssertionError, "", None)
def reshard_of_replicas(api, rank, world):
    model, plain = build(Block), build(Block)
    replicate_of(api)(model, mesh=mesh_of(world, 0)).set_reshard_after_forward(True)
    trains(model, plain, rank, world)


@case(AssertionError, "FSDPMeshInfo", None)
def a_group_for_reductions_of_replicas(api, rank, world):
    model, plain = build(Block), build(Block)
    replicate_of(api)(model, mesh=mesh_of(world, 0)).set_separate_reduce_scatter_group()
    trains(model, plain, rank, world)


def tried(rank, world, name):
    case = CASES[name]
    with pytest.raises(case.error, match=case.text):
        case.run(theirs, rank, world)
    says = rf"(?s)^\[\w+\] .*({case.says})"
    with pytest.raises((ValueError, TypeError), match=says) if case.says else contextlib.nullcontext():
        case.run(ours, rank, world)


@pytest.mark.parametrize("name", CASES)
def test_what_fsdp2_rejects(name):
    run_ranks(CASES[name].world, tried, name)
