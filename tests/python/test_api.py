"""The surface: what fully_shard does to a module, what it refuses, and the methods of a sharded module."""
import dataclasses
import datetime
import os
import signal
import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
from models import DIM, Block, Net, Pair, Scaled, build
from ranks import Ranks, run_ranks
from scripts import loss_on, mesh_of, whole, wrap


def refused(error, *parts):
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


# What a sharded module is.


def becomes_dtensors(rank, world):
    mesh, model = mesh_of(world, 0), build()
    want = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert ours.fully_shard(model.blocks[0], mesh=mesh) is model.blocks[0]
    assert wrap(ours, build(), mesh=mesh) is not model
    ours.fully_shard(model, mesh=mesh)
    assert type(model).__name__ == "FSDPNet" and isinstance(model, (ours.FSDPModule, Net))
    assert type(model.blocks[0]).__name__ == "FSDPBlock" and type(model.blocks[1]) is Block
    assert [name for name, _ in model.named_parameters()] == list(want)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad
        assert parameter.device_mesh == mesh and parameter.placements == (Shard(0),) and parameter.shape == want[name].shape
        mine = torch.chunk(want[name], world)
        mine = mine[rank] if rank < len(mine) else want[name][:0]
        torch.testing.assert_close(parameter.to_local().detach(), mine, rtol=0, atol=0)
        torch.testing.assert_close(parameter.full_tensor().detach(), want[name], rtol=0, atol=0)
    # The shards of a unit are one flat buffer, and DTensors have no copies of it. Each has a storage that ends where it ends.
    block = model.blocks[0]
    shards = [parameter._local_tensor for parameter in block.parameters()]
    assert all(shard.storage_offset() == 0 and shard.untyped_storage().nbytes() == shard.nbytes for shard in shards)
    spans = sorted((shard.data_ptr(), shard.data_ptr() + shard.nbytes) for shard in shards if shard.numel() > 0)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    assert spans[-1][1] - spans[0][0] <= block._hyper_parallel_state.unit.memory()["shards"]


@pytest.mark.parametrize("world", [1, 3])
def test_parameters_are_dtensors_over_one_flat_shard(world):
    run_ranks(world, becomes_dtensors)


def hybrid_placements(rank, world):
    mesh, model = mesh_of(world, 2), build(Scaled)
    ours.fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(-1) if p.dim() == 2 else None)
    assert model.up.weight.placements == (Replicate(), Shard(1)) and model.scale.placements == (Replicate(), Shard(0))
    assert model.factor.placements == (Replicate(), Replicate()) and model.factor.to_local().shape == ()
    loss = model(torch.ones(2, DIM) * (rank + 1)).sum()
    loss.backward()
    assert model.up.weight.grad.placements == (Replicate(), Shard(1)) and model.up.weight.grad.shape == model.up.weight.shape
    plain = build(Scaled)
    want = torch.stack([plain(torch.ones(2, DIM) * (r + 1)).sum().detach() for r in range(world)]).mean() / plain.factor.detach()
    torch.testing.assert_close(whole(model.factor.grad), want)


def test_placements_of_hsdp_and_scalars():
    run_ranks(4, hybrid_placements)


# Methods.


def by_hand(rank, world):
    model = ours.fully_shard(nn.Linear(32, 32), mesh=mesh_of(world, 0))
    sharded = model.weight
    assert sharded.to_local().shape == (32 // world, 32)
    assert model.unshard() is None and type(model.weight) is nn.Parameter and model.weight.shape == (32, 32)
    torch.testing.assert_close(model.weight.detach(), sharded.full_tensor().detach())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())  # as in torch, that reshards
    model.unshard()
    model.reshard()
    model.reshard()
    assert model.weight is sharded
    handle = model.unshard(async_op=True)
    assert isinstance(handle, ours.UnshardHandle) and model.weight is sharded
    handle.wait()
    handle.wait()
    assert model.weight is not sharded
    model.unshard()
    model(torch.ones(1, 32)).sum().backward()
    assert model.weight is sharded and isinstance(sharded.grad, DTensor)
    with refused(ValueError, "async_op is 1"):
        model.unshard(1)


@pytest.mark.parametrize("world", [1, 2])
def test_unshard_and_reshard(world):
    run_ranks(world, by_hand)


class TwoWays(Block):
    def encode(self, x, *, shift=0.0):
        return self.up(self.norm(x)) + shift


def other_methods(rank, world):
    model, plain = build(TwoWays), build(TwoWays)
    policy = ours.MixedPrecisionPolicy(output_dtype=torch.float64)
    ours.fully_shard(model, mesh=mesh_of(world, 0), mp_policy=policy, reshard_after_forward=True)
    ours.register_fsdp_forward_method(model, "encode")
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(1))
    result = model.encode(x, shift=1.0)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.float(), plain.encode(x, shift=1.0))
    result.sum().backward()
    plain.encode(x).sum().backward()
    torch.testing.assert_close(whole(model.up.weight.grad), plain.up.weight.grad)
    with pytest.raises(TypeError):
        model.encode(x, unknown=1)
    model(x).sum().backward()


def test_other_methods_as_forward():
    run_ranks(2, other_methods)


class AnyArguments(Block):
    def forward(self, *args, **kwargs):
        return super().forward(args[0]) * kwargs.get("factor", 1.0) + sum(args[1:])


class NoTensor(Block):
    """Makes its own input, from a number, a name, or nothing."""

    def forward(self, rows=2, *, kind="ones"):
        return super().forward(getattr(torch, kind)(rows, DIM))


def replaced_forward(module):
    def forward(x, *, shift):
        return type(module).forward(module, x) + module.scale * shift

    module.forward = forward
    return module


def forwards(rank, world):
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(1))
    variants = [(AnyArguments, [((x,), {}), ((x, 1.0, x), {"factor": 2.0, "unused": None})]),
                (NoTensor, [((), {}), ((3,), {"kind": "zeros"}), ((), {"rows": 1})]),
                (lambda: replaced_forward(Block()), [((x,), {"shift": 2.0})])]
    for make, calls in variants:
        model, plain = build(make), build(make)
        ours.fully_shard(model, mesh=mesh_of(world, 0), reshard_after_forward=True)
        for args, kwargs in calls:
            got, want = model(*args, **kwargs), plain(*args, **kwargs)
            torch.testing.assert_close(got, want)
            assert isinstance(model.scale, DTensor)
            got.square().sum().backward()
            want.square().sum().backward()
        for (name, parameter), reference in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(parameter.grad), reference.grad, msg=name)
        with pytest.raises((TypeError, IndexError, AttributeError)):
            model(nonsense=1)
        torch.testing.assert_close(model(*calls[0][0], **calls[0][1]), plain(*calls[0][0], **calls[0][1]))

    # Replaced once it is a unit, and taken back.
    model, plain = build(Block), replaced_forward(build(Block))
    replaced_forward(ours.fully_shard(model, mesh=mesh_of(world, 0), reshard_after_forward=True))
    torch.testing.assert_close(model(x, shift=1.0), plain(x, shift=1.0))
    del model.forward, plain.forward
    torch.testing.assert_close(model(x), plain(x))


def test_variants_of_forward():
    run_ranks(2, forwards)


@dataclasses.dataclass
class Boxed:
    x: torch.Tensor
    note: str
    more: list


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen = []

    def forward(self, boxed, pair=None, *, options):
        tensors = [boxed.x, boxed.more[0]["x"], pair.first, pair.second, options["x"]]
        self.seen = [tensor.dtype for tensor in tensors]
        y = self.linear(sum(tensor.to(self.linear.weight.dtype) for tensor in tensors))
        return {"pair": Pair(y, y + 1), "boxed": Boxed(y * 2, "kept", [y, 3]), "ordered": OrderedDict(y=y), "none": None}


def containers(rank, world):
    model = Containers()
    policy = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    ours.fully_shard(model, mesh=mesh_of(world, 0), mp_policy=policy, reshard_after_forward=True)
    x, whole_numbers = torch.randn(2, DIM), torch.ones(2, DIM, dtype=torch.int64)
    result = model(Boxed(x, "note", [{"x": x}]), Pair(x, whole_numbers), options={"x": x})
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16]
    assert type(result["pair"]) is Pair and type(result["boxed"]) is Boxed and type(result["ordered"]) is OrderedDict
    assert result["boxed"].note == "kept" and result["boxed"].more[1] == 3 and result["none"] is None
    outputs = [*result["pair"], result["boxed"].x, result["boxed"].more[0], result["ordered"]["y"]]
    assert all(output.dtype == torch.float32 for output in outputs)
    for output in outputs:
        output.sum().backward(retain_graph=True)  # each leads the backward to the unit
    assert whole(model.linear.bias.grad).allclose(torch.full((DIM,), 12.0))


def test_tensors_in_containers():
    run_ranks(2, containers)


def hooks(rank, world):
    model = ours.fully_shard(build(Block), mesh=mesh_of(world, 0))
    calls, seen = [], []
    model.up.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.placements))
    model.set_all_reduce_hook(lambda reduced: (seen.append(reduced.numel()), reduced.zero_()))
    for _ in range(2):
        model(torch.ones(2, DIM)).sum().backward()
    assert calls == [(Shard(0),)] * 2 and len(seen) == 2
    assert all(whole(parameter.grad).count_nonzero() == 0 for parameter in model.parameters())


def test_hooks_on_gradients():
    run_ranks(2, hooks)


class Gather(theirs._fully_shard._fsdp_api.AllGather):
    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


class Scatter(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        assert op == dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def custom_communication(rank, world):
    model, plain = build(Block), build(Block)
    ours.fully_shard(model, mesh=mesh_of(world, 0), reshard_after_forward=True)
    gather, scatter, waited = Gather(), Scatter(), []
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    model.set_gradient_divide_factor(1.0)
    model.set_post_optim_event(lambda: waited.append(1))
    with refused(ValueError, "enable is True after set_custom_all_gather, want one of the two"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    x = torch.ones(2, DIM)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert (gather.calls, scatter.calls, waited) == (2, 1, [1])
    for parameter, reference in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(parameter.grad), world * reference.grad)


def test_custom_communication():
    run_ranks(2, custom_communication)


def hyper_vocabulary(rank, world):
    mesh = mesh_of(world, 2)
    model, plain = build(Block), build(Block)
    hp.fully_shard(model, mesh=mesh, replicate_params={model.scale}, comm_fusion=False, comm_fusion_zero_copy=None)
    assert type(model).__name__ == "HSDPBlock" and isinstance(model, (hp.HSDPModule, ours.FSDPModule))
    assert model.scale.placements == (Replicate(), Replicate())
    model.set_reduce_op_type(" Sum ")
    model.set_gradient_scaling_factor(torch.tensor([0.5]))
    x = torch.ones(2, DIM)
    model.set_is_last_backward(False)
    model(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    hp.hsdp_sync_stream()
    plain(x).sum().backward()
    for parameter, reference in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(parameter.grad), world * 0.5 * reference.grad)
    model.reset_iter_state(recursive=False)
    for call, text in [(lambda: model.set_reduce_op_type("max"), "max"), (lambda: model.set_reduce_op_type(1), "op is 1"),
                       (lambda: model.set_gradient_scaling_factor(True), "factor is True"),
                       (lambda: model.set_gradient_scaling_factor(torch.ones(2)), "one element"),
                       (lambda: hp.fully_shard(Block(), mesh=mesh, shard_layout="flat"), "shard_layout is 'flat'"),
                       (lambda: hp.fully_shard(Block(), mesh=mesh, source_shard_infos={}), "source_shard_infos"),
                       (lambda: hp.fully_shard(Block(), mesh=mesh, comm_fusion=False, comm_fusion_zero_copy=True), "zero_copy")]:
        with refused(ValueError, text):
            call()
    with refused(TypeError, "replicate_params has a str"):
        hp.fully_shard(Block(), mesh=mesh, replicate_params={"scale"})


def test_hyper_parallels_vocabulary():
    run_ranks(4, hyper_vocabulary)


def pieces(rank, world):
    model = nn.Sequential(Block(), Block(), Block())
    ours.fully_shard(model, mesh=mesh_of(world, 0))
    assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2

    class Later(type(model)):
        pass

    model.__class__ = Later
    assert isinstance(model, ours.FSDPModule)
    model(torch.ones(1, DIM)).sum().backward()
    # A list is one unit; what is below another element is dropped.
    parent = nn.Sequential(Block(), Block())
    given = [parent, parent[0], Block()]
    assert ours.fully_shard(given, mesh=mesh_of(world, 0)) is given
    assert not isinstance(parent[0], ours.FSDPModule) and isinstance(given[2], ours.FSDPModule)
    given[2](parent(torch.ones(1, DIM))).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for module in given for parameter in module.parameters())


def test_slices_subclasses_and_lists():
    run_ranks(2, pieces)


def ignored(rank, world):
    model = build(Block)
    own = model.scale
    ours.fully_shard(model, mesh=mesh_of(world, 0), ignored_params={own})
    assert model.scale is own and not isinstance(own, DTensor)
    model(torch.ones(2, DIM) * (rank + 1)).sum().backward()
    assert own.grad is not None and isinstance(model.norm.weight.grad, DTensor)


def test_ignored_parameters():
    run_ranks(2, ignored)


def flipped_gradients(rank, world):
    """What users do to .grad: keep it, replace it, scale it, let it stay for another backward."""
    model, plain = ours.fully_shard(build(Block), mesh=mesh_of(world, 0)), build(Block)
    x = torch.ones(2, DIM)

    def backward():
        model(x).sum().backward()
        plain(x).sum().backward()

    def check():
        for (name, parameter), reference in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(parameter.grad), reference.grad, msg=name)

    backward()
    kept = {name: (parameter.grad, whole(parameter.grad)) for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain.zero_grad()
    x = 3 * torch.ones(2, DIM)
    x[:, 0] = 1
    backward()
    check()
    for name, (grad, value) in kept.items():
        torch.testing.assert_close(whole(grad), value, msg=f"{name}: a gradient that was kept has changed")
    backward()  # accumulates
    check()
    for module in (model, plain):
        for parameter in module.parameters():
            parameter.grad = parameter.grad * 2
    backward()
    check()
    model.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    check()
    backward()
    check()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_the_users(world):
    run_ranks(world, flipped_gradients)


# When a rank fails.


def dies(rank, world, samehost, where):
    hp.init_process_group(samehost=samehost)
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    loss_on(model, rank, 0).backward()
    if rank == 2 and where == "forward":
        model.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL), prepend=True)
    elif rank == 2:
        model.blocks[1].up.register_full_backward_hook(lambda *_: os._exit(1))
    # What it had begun to send may or may not arrive. What a backward raises is a RuntimeError once autograd hands it on.
    error, op = (hp.CommError, "all_gather") if where == "forward" else (RuntimeError, "(all_gather|reduce_scatter)")
    with refused(error, rf"\[{op}_single\] peer rank 2 \(global 2\)", r"unit blocks\.\d, group dp_shard"):
        loss_on(model, rank, 1).backward()
    with refused(hp.CommError, "group dp_shard is broken by an earlier failure", op, "peer rank 2"):
        loss_on(model, rank, 2)
    assert issubclass(hp.CommError, RuntimeError)


@pytest.mark.parametrize("samehost,where", [(True, "forward"), (False, "backward")])
def test_a_rank_that_dies(samehost, where):
    ranks = Ranks(3, 3, "gloo")
    try:
        _, failures = ranks.run(dies, (samehost, where), 60)
    finally:
        ranks.close(kill=True)
    assert failures == ["rank 2 died"], "\n".join(failures)


def stops(rank, world, folder):
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4), dist.group.WORLD)
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    loss_on(model, rank, 0).backward()
    seen = os.path.join(folder, "seen")
    if rank == 1:
        while not os.path.exists(seen):
            time.sleep(0.05)
        return
    assert issubclass(hp.TimeoutError, hp.CommError)
    try:
        text = r"\[all_gather_single\] no answer from peer rank 1 \(global 1\) within 4 s"
        with refused(hp.TimeoutError, text, "unit Net, group dp_shard"):
            loss_on(model, rank, 1)
    finally:
        open(seen, "w").close()


def test_a_rank_that_does_not_come(tmp_path):
    run_ranks(2, stops, str(tmp_path), alone=True)
