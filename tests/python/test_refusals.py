"""What fully_shard and the methods of a sharded module refuse, and that nothing is changed then; names, signatures, policies."""
import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
from models import DIM, Block, Net, build
from ranks import run_ranks
from scripts import mesh_of, wrap


def refused(error, *parts):
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


class Cut(nn.Module):
    pass


def refusals(rank, world):
    mesh = mesh_of(world, 0)

    def check(error, *parts, make=Block, **options):
        model = build(make)
        parameters, cls = dict(model.named_parameters()), type(model)
        with refused(error, *parts):
            ours.fully_shard(model, **{"mesh": mesh, **options})
        assert type(model) is cls and all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
        assert not model._forward_pre_hooks and not model._forward_hooks
        model(torch.ones(1, DIM)).sum().backward()

    check(ValueError, "mesh has 3 dims", mesh=init_device_mesh("cpu", (world, 1, 1)))
    check(ValueError, "mesh is int", mesh=3)
    check(ValueError, "reshard_after_forward is 'yes'", reshard_after_forward="yes")
    check(ValueError, "reshard_after_forward is 3", "factor", reshard_after_forward=3)
    check(ValueError, "shard_placement_fn returned", "parameter scale", shard_placement_fn=lambda p: Shard(2))
    check(ValueError, "shard_placement_fn returned 1", shard_placement_fn=lambda p: 1)
    check(ValueError, "mp_policy.param_dtype is 'bf16'", mp_policy=ours.MixedPrecisionPolicy(param_dtype="bf16"))
    check(ValueError, "mp_policy.param_dtype is Int", mp_policy=ours.MixedPrecisionPolicy(param_dtype=torch.int32))
    check(ValueError, "offload_policy is int", offload_policy=1)
    check(ValueError, "dp_mesh_dims", dp_mesh_dims=object())
    check(TypeError, "ignored_params has a str", ignored_params={"norm.weight"})

    for given, text in [([], "list of modules is empty"), ([Block(), 1], "element 1 is int"), ("x", "module is str"),
                        ((Block(),), "module is tuple"), (nn.ModuleList([Block()]), "ModuleList, which has no forward")]:
        with refused(ValueError, text):
            ours.fully_shard(given, mesh=mesh)
    model = ours.fully_shard(Block(), mesh=mesh)
    with refused(ValueError, "FSDPBlock is already a unit"):
        ours.fully_shard(model, mesh=mesh)
    with refused(RuntimeError, "sharded and cannot be copied"):
        copy.deepcopy(model)
    shared = build(Net, tied=True)
    ours.fully_shard(shared.embed, mesh=mesh)
    with refused(ValueError, "already managed by unit Embedding"):
        ours.fully_shard(shared, mesh=mesh)
    both = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))

    def cut(*placements, owner=both["tp"]):
        module = Cut()
        module.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 2), owner, placements))
        return module

    with refused(ValueError, "mesh is None", "DTensors"):
        ours.fully_shard(cut(Replicate()))
    with refused(ValueError, "two parts of one mesh", "parameter weight"):
        ours.fully_shard(cut(Replicate(), owner=mesh), mesh=mesh)
    with refused(ValueError, "placement P", "want Shard or Replicate"):
        ours.fully_shard(cut(Partial()), mesh=both["dp"])
    with refused(ValueError, "shard_layout is .ragged."):
        hp.fully_shard(cut(Replicate()), mesh=both["dp"], shard_layout="ragged")


def test_refusals():
    run_ranks(2, refusals)


def switches(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    for name in ["set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward", "set_reshard_after_backward",
                 "set_is_last_backward", "set_unshard_in_backward", "set_reduce_scatter_unused_params"]:
        with refused(ValueError, name, "is 1, want True or False"):
            getattr(model, name)(1)
        getattr(model, name)(True)
    for modules, text in [("blocks", "modules is str"), ([123], "element 0 is int"), ([nn.Linear(1, 1)], "element 0 is Linear")]:
        with refused(ValueError, text):
            model.set_modules_to_forward_prefetch(modules)
        with refused(ValueError, text):
            model.set_modules_to_backward_prefetch(modules)
    with refused(ValueError, "want one with synchronize"):
        model.set_post_optim_event(1)
    with refused(ValueError, "factor is 0"):
        model.set_gradient_divide_factor(0)
    with refused(ValueError, "NCCL"):
        model.set_symm_mem_for_comm()
    with refused(ValueError, "stream is given"):
        model.set_all_reduce_hook(print, stream=1)
    with pytest.raises(TypeError):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError):
        model.set_reduce_scatter_max_input_buffers(0)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    ours.share_comm_ctx([model, model.blocks[0]])
    ours.share_comm_ctx([])
    with refused(ValueError, "element 0 is Linear"):
        ours.share_comm_ctx([nn.Linear(1, 1)])
    with refused(ValueError, "has no method encode"):
        ours.register_fsdp_forward_method(model, "encode")
    ours.register_fsdp_forward_method(nn.Linear(1, 1), "encode")


def test_switches_check_their_arguments():
    run_ranks(1, switches)


def test_names_and_signatures_are_those_of_torch():
    missing = {name for name in dir(theirs.FSDPModule) if not name.startswith("_")} - set(dir(ours.FSDPModule))
    assert not missing
    for name in dir(theirs.FSDPModule):
        if name.startswith("_"):
            continue
        want = list(inspect.signature(getattr(theirs.FSDPModule, name)).parameters)
        assert list(inspect.signature(getattr(ours.FSDPModule, name)).parameters) == want, name
    assert list(inspect.signature(ours.fully_shard).parameters) == list(inspect.signature(theirs.fully_shard).parameters)
    for name in ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"]:
        want = {field.name: field.default for field in dataclasses.fields(getattr(theirs, name))}
        assert {field.name: field.default for field in dataclasses.fields(getattr(ours, name))} == want


def test_policies_are_values():
    policy = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(policy)) == policy and policy != ours.MixedPrecisionPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = None
    assert pickle.loads(pickle.dumps(ours.CPUOffloadPolicy(pin_memory=False))) == ours.CPUOffloadPolicy(pin_memory=False)


def test_without_a_process_group_there_is_a_world_of_one():
    (result,) = run_ranks(1, world_of_one, backend=None)
    assert result == 1


def world_of_one(rank, world):
    import os

    from ranks import free_port

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    model = ours.fully_shard(build(Block))
    model(torch.ones(2, DIM)).sum().backward()
    return model.up.weight.device_mesh.size()
