"""What fully_shard and the methods of a sharded module refuse, and that nothing is changed then; names, signatures, policies."""
import copy
import dataclasses
import inspect
import io
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
    for attempt in (copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with refused(RuntimeError, "FSDPBlock is sharded and cannot be pickled", "state_dict"):
            attempt(model)
    around = ours.fully_shard(nn.Sequential(Block(), Block()), mesh=mesh)
    with refused(ValueError, "parameter scale of Block belongs to unit Sequential already", "inner modules first"):
        ours.fully_shard(around[0], mesh=mesh)
    linear = nn.Linear(2, 2)
    for script, text in [(torch.jit.script(linear), "the module is a RecursiveScriptModule"),
                         (torch.jit.trace(linear, torch.ones(1, 2)), "the module is a TopLevelTracedModule"),
                         (nn.Sequential(torch.jit.script(linear)), "module 0 is a RecursiveScriptModule")]:
        with refused(ValueError, text, "TorchScript", "want the nn.Module"):
            ours.fully_shard(script, mesh=mesh)
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


def wrong_types(rank, world):
    """Whatever is no argument for them raises TypeError or ValueError with the function's name, and changes nothing."""
    mesh = mesh_of(world, 0)
    model = hp.fully_shard(build(Block), mesh=mesh)
    optimizer = hp.optim.AdamW(model)
    values = {"None": None, "x": "x", "-1": -1, "1.5": 1.5, "object": object()}

    def check(op, call, *fine):
        for name, value in values.items():
            if name in fine:
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                call(value)
            assert f"[{op}]" in str(caught.value), f"{op}({name}): {caught.value}"

    with_recurse = ["set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward", "set_reshard_after_backward",
                    "set_reduce_scatter_unused_params", "set_separate_reduce_scatter_group"]
    for name in [*with_recurse, "unshard", "set_is_last_backward", "set_unshard_in_backward", "set_force_sum_reduction_for_comms",
                 "set_allocate_memory_from_process_group_for_comm", "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch",
                 "set_custom_all_gather", "set_custom_reduce_scatter", "set_post_optim_event", "set_reduce_op_type", "reset_iter_state",
                 "set_reduce_scatter_max_input_buffers", "set_symm_mem_for_comm"]:
        check(name, getattr(model, name))
    for name, fine in [*((name, True) for name in with_recurse), ("set_reduce_scatter_max_input_buffers", 1), ("set_reduce_op_type", "avg")]:
        check(name, lambda value: getattr(model, name)(fine, recurse=value))  # noqa: B023
    check("set_gradient_divide_factor", model.set_gradient_divide_factor, "-1", "1.5")
    check("set_gradient_divide_factor", model.set_reduce_scatter_divide_factor, "-1", "1.5")
    check("set_gradient_scaling_factor", model.set_gradient_scaling_factor, "None", "-1", "1.5")
    check("set_all_reduce_hook", model.set_all_reduce_hook, "None")
    check("set_all_reduce_hook", lambda value: model.set_all_reduce_hook(print, stream=value), "None")
    check("register_fsdp_forward_method", lambda value: ours.register_fsdp_forward_method(model, value))
    check("share_comm_ctx", ours.share_comm_ctx)

    for api in (ours, hp):
        check("fully_shard", lambda value: api.fully_shard(value, mesh=mesh))  # noqa: B023
        options = {"mesh": ["None"], "reshard_after_forward": ["None"], "shard_placement_fn": ["None"], "mp_policy": [],
                   "offload_policy": ["None"], "ignored_params": ["None"]}
        own = {"replicate_params": ["None"], "comm_fusion": [], "comm_fusion_zero_copy": ["None"], "source_shard_infos": ["None"],
               "bucket_size": ["-1"], "shard_layout": []}
        for name, fine in (options | (own if api is hp else {"dp_mesh_dims": ["None"]})).items():
            check("fully_shard", lambda value: api.fully_shard(Block(), **{"mesh": mesh, name: value}), *fine)  # noqa: B023

    check("AdamW", hp.optim.AdamW)
    for name, fine in {"lr": ["1.5"], "betas": [], "eps": ["1.5"], "weight_decay": ["1.5"], "maximize": [], "master_weights": []}.items():
        check("AdamW", lambda value: hp.optim.AdamW(model, **{name: value}), *fine)  # noqa: B023
    check("AdamW", lambda value: setattr(optimizer, "lr", value), "1.5")
    check("AdamW", optimizer.load_state_dict)
    check("zero_grad", optimizer.zero_grad)
    check("clip_grad_norm_", lambda value: hp.clip_grad_norm_(value, 1.0))
    for name, fine in {"max_norm": ["1.5"], "norm_type": ["1.5"], "error_if_nonfinite": []}.items():
        check("clip_grad_norm_", lambda value: hp.clip_grad_norm_(model, **{"max_norm": 1.0, name: value}), *fine)  # noqa: B023
    model(torch.ones(1, DIM)).sum().backward()
    assert optimizer.lr == 1e-3


def test_arguments_of_other_types():
    run_ranks(1, wrong_types)


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
