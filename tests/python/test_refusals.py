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
from torch.distributed._composable import replicate_with_fsdp
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
                 "set_post_optim_event", "set_reduce_op_type", "reset_iter_state",
                 "set_reduce_scatter_max_input_buffers", "set_symm_mem_for_comm"]:
        check(name, getattr(model, name))
    for name, fine in [*((name, True) for name in with_recurse), ("set_reduce_scatter_max_input_buffers", 1), ("set_reduce_op_type", "avg")]:
        check(name, lambda value: getattr(model, name)(fine, recurse=value))  # noqa: B023
    plain = ours.fully_shard(build(Block), mesh=mesh)
    for name in ["set_custom_all_gather", "set_custom_reduce_scatter"]:
        check(name, getattr(model, name), "None")
        check(name, getattr(plain, name))
    check("set_gradient_divide_factor", model.set_gradient_divide_factor, "None", "-1", "1.5")
    check("set_gradient_divide_factor", plain.set_reduce_scatter_divide_factor, "-1", "1.5")
    check("plan_memory", lambda value: model.plan_memory(local_accumulation=value))
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
               "bucket_size": ["-1"], "shard_layout": [], "threshold": [], "replica_init": ["None"]}
        for name, fine in (options | (own if api is hp else {"dp_mesh_dims": ["None"]})).items():
            check("fully_shard", lambda value: api.fully_shard(Block(), **{"mesh": mesh, name: value}), *fine)  # noqa: B023

    check("AdamW", hp.optim.AdamW)
    for name, fine in {"lr": ["1.5"], "betas": [], "eps": ["1.5"], "weight_decay": ["1.5"], "maximize": [], "master_weights": []}.items():
        check("AdamW", lambda value: hp.optim.AdamW(model, **{name: value}), *fine)  # noqa: B023
    check("AdamW", lambda value: setattr(optimizer, "lr", value), "1.5")
    check("AdamW", optimizer.load_state_dict)
    for name, fine in {"groups": [], "decays": ["None"], "parameters": ["None"], "state_dtype": ["None"]}.items():
        check("AdamW", lambda value: hp.optim.AdamW(model, **{name: value}), *fine)  # noqa: B023
    for name in ["lr", "weight_decay", "betas", "eps", "predicate"]:
        check("AdamW", lambda value: hp.optim.AdamW(model, groups=[{"names": ["scale"], name: value}]),  # noqa: B023
              "1.5" if name != "betas" else "", "None" if name == "predicate" else "")
    for name, fine in {"momentum": ["1.5"], "dampening": ["-1", "1.5"], "nesterov": []}.items():
        check("SGD", lambda value: hp.optim.SGD(model, **{name: value}), *fine)  # noqa: B023
    for name in ["momentum", "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn", "nesterov"]:
        check("Muon", lambda value: hp.optim.Muon(model, **{name: value}))  # noqa: B023
    for name, fine in {"decay": [], "ramp": [], "dtype": ["None"]}.items():
        check("Ema", lambda value: hp.optim.Ema(model, **{name: value}), *fine)  # noqa: B023
    for name, fine in {"init_scale": ["1.5"], "growth_factor": ["1.5"], "backoff_factor": [], "growth_interval": [], "enabled": []}.items():
        check("GradScaler", lambda value: hp.optim.GradScaler(**{name: value}), *fine)  # noqa: B023
    check("GradScaler", hp.optim.GradScaler().step)
    check("set_zero_level", lambda value: hp.set_zero_level(model, value))
    check("zero_grad", optimizer.zero_grad)
    check("zero_grad", model.zero_grad)
    check("clip_grad_norm_", lambda value: hp.clip_grad_norm_(value, 1.0))
    for name, fine in {"max_norm": ["1.5"], "norm_type": ["1.5"], "error_if_nonfinite": []}.items():
        check("clip_grad_norm_", lambda value: hp.clip_grad_norm_(model, **{"max_norm": 1.0, name: value}), *fine)  # noqa: B023
    model(torch.ones(1, DIM)).sum().backward()
    assert optimizer.lr == 1e-3


def test_arguments_of_other_types():
    run_ranks(1, wrong_types)


FSDP1 = {"BackwardPrefetch", "CPUOffload", "FullOptimStateDictConfig", "FullStateDictConfig", "FullyShardedDataParallel",
         "LocalOptimStateDictConfig", "LocalStateDictConfig", "MixedPrecision", "OptimStateDictConfig", "OptimStateKeyType",
         "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig", "StateDictSettings",
         "StateDictType"}


def same_signature(got, want, name):
    """Names, kinds and defaults of parameters; a policy that is a default is the same one by its fields."""
    def described(function):
        return [(p.name, p.kind, repr(p.default)) for p in inspect.signature(function).parameters.values()]

    assert described(got) == described(want), name


def test_names_and_signatures_are_those_of_torch():
    names = set(theirs.__all__) - FSDP1
    assert names == set(theirs._fully_shard.__all__) and names <= set(ours.__all__)
    own = set(ours.__all__) - names
    assert own == {"replicate", "ReplicateModule"}
    for name in names:
        got, want = getattr(ours, name), getattr(theirs, name)
        assert inspect.isclass(got) == inspect.isclass(want), name
        if not inspect.isclass(want):
            same_signature(got, want, name)
            continue
        members = {member for member in dir(want) if not member.startswith("_")}
        assert members <= set(dir(got)), name
        for member in members:
            if callable(getattr(want, member)):
                same_signature(getattr(got, member), getattr(want, member), f"{name}.{member}")
            else:
                assert isinstance(inspect.getattr_static(got, member), type(inspect.getattr_static(want, member))), f"{name}.{member}"
        assert dataclasses.is_dataclass(got) == dataclasses.is_dataclass(want), name
        if dataclasses.is_dataclass(want):
            same_signature(got, want, name)
            fields = [[(f.name, f.default) for f in dataclasses.fields(cls)] for cls in (got, want)]
            assert fields[0] == fields[1] and got.__dataclass_params__.frozen == want.__dataclass_params__.frozen, name
            assert got.__dataclass_params__.eq == want.__dataclass_params__.eq, name
    same_signature(ours.replicate, replicate_with_fsdp.replicate, "replicate")


def test_policies_are_values():
    policy = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(policy)) == policy and policy != ours.MixedPrecisionPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = None
    values = [policy, ours.MixedPrecisionPolicy(), ours.OffloadPolicy(), ours.CPUOffloadPolicy(), ours.CPUOffloadPolicy(pin_memory=False),
              hp.MixedPrecisionPolicy(), hp.MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True), hp.MemoryBudget(1), hp.MemoryBudget(2),
              ours.DataParallelMeshDims(shard="dp"), ours.DataParallelMeshDims(shard=("dp", "cp"), replicate="rep")]
    for i, value in enumerate(values):
        for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert type(again) is type(value) and [again == other for other in values] == [i == j for j in range(len(values))], value


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


class Halved(torch.Tensor):
    """Gathers half of what it is, like a tensor that travels in another format."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor) / 2,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return None if out is not None else (outputs[0] * 2, outputs)


class Tagged(torch.Tensor):
    fsdp_post_all_gather = None


class Elsewhere(torch.Tensor):
    """Its values are in another tensor."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        def plain(x):
            return x.values if isinstance(x, Elsewhere) else x

        result = function(*map(plain, args), **{key: plain(value) for key, value in (kwargs or {}).items()})
        return Elsewhere(result) if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else result


def subclasses(rank, world):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    values = torch.full((2, 3), 2.0)
    over = nn.Parameter(DTensor.from_local(values, mesh["tp"], [Replicate()], run_check=False))
    over._local_tensor = values.as_subclass(Halved)
    for given, text in [(values.as_subclass(Halved), "Halved, whose fsdp_pre_all_gather"),
                        (over, "Halved, whose fsdp_pre_all_gather"),
                        (values.as_subclass(Tagged), "Tagged, whose fsdp_post_all_gather"),
                        (Elsewhere(values), "Elsewhere, whose __torch_dispatch__")]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, bias=False))
        weight = model[1].weight = given if given is over else nn.Parameter(given)
        model.append(ours.fully_shard(nn.Linear(2, 2), mesh=mesh["dp"]))
        for api in (ours.fully_shard, hp.fully_shard, ours.replicate):
            with refused(ValueError, text, "is not called here", "parameter 1.weight"):
                api(model, mesh=mesh["dp"])
        assert type(model) is nn.Sequential and not model._forward_pre_hooks and model[1].weight is weight
        assert not any(isinstance(parameter, DTensor) for parameter in model[0].parameters())
        ours.fully_shard(model, mesh=mesh["dp"], ignored_params={weight})
        assert model[1].weight is weight and isinstance(model[0].weight, DTensor)
        if given is not over:
            assert model(torch.ones(1, 3)).shape == (1, 2)


def test_tensors_that_say_how_they_are_gathered():
    run_ranks(2, subclasses)
