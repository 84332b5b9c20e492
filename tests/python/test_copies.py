"""What is saved, pickled and copied: state dictionaries, gradients, optimizers, and whole sharded modules."""
import copy
import io
import math
import pickle
import zipfile

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
from models import DIM, Block, build
from ranks import run_ranks
from scripts import Even, loss_on, mesh_of, train, weights, whole, wrap


def saved(value):
    """The file that torch.save makes, as it begins, and the bytes of tensors in it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    with zipfile.ZipFile(file) as records:
        data = sum(record.file_size for record in records.infolist() if "/data/" in record.filename)
    file.seek(0)
    return file, data


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else [])
            for tensor in tensors(element)]


def check_alike(got, want):
    assert len(got) == len(want) > 0
    for a, b in zip(got, want):
        assert type(a) is type(b) and a.dtype == b.dtype
        if isinstance(b, DTensor):
            assert a.placements == b.placements and a.shape == b.shape
            a, b = a.to_local(), b.to_local()
            assert a.numel() == 0 or a.data_ptr() != b.data_ptr()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def dictionaries(rank, world, hybrid, layout):
    mesh = mesh_of(world, hybrid)
    model = build()
    for module in [*model.blocks, model]:
        hp.fully_shard(module, mesh=mesh, shard_layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, 1)
    loss_on(model, rank, 1).backward()
    values = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gradients": [p.grad for p in model.parameters()]}
    shards = world // (hybrid or 1)
    # Of each parameter the rows of this rank, and nothing else of the unit's flat buffer.
    rows = {name: max(0, min(math.ceil(p.shape[0] / shards), p.shape[0] - mesh.get_local_rank(mesh.ndim - 1) * math.ceil(p.shape[0] / shards)))
            for name, p in build().named_parameters()}
    mine = 4 * sum(rows[name] * math.prod(p.shape[1:]) for name, p in build().named_parameters())
    if layout == "ragged":
        mine = 4 * sum(p.numel() for p in model.parameters())
    # AdamW has two tensors for each parameter, and a step of four bytes.
    for name, want in [("model", mine), ("gradients", mine), ("optimizer", 2 * mine + 4 * len(rows))]:
        file, data = saved(values[name])
        padding = 32  # torch writes two small records of its own
        assert want <= data <= want + padding, f"{name}: {data} bytes, want {want}"
        for again in (torch.load(file), copy.deepcopy(values[name]), pickle.loads(pickle.dumps(values[name]))):
            check_alike(tensors(again), tensors(values[name]))
    _, data = saved(values["model"]["head.weight"])
    head = values["model"]["head.weight"]
    head = head.to_local() if isinstance(head, DTensor) else head
    assert head.nbytes <= data <= head.nbytes + 32

    want = weights(model) if layout == "per_parameter" else {k: v.clone() for k, v in model.state_dict().items()}
    file, _ = saved(values["model"])
    train(model, optimizer, rank, 1)
    model.load_state_dict(torch.load(file))
    for name, value in (weights(model) if layout == "per_parameter" else model.state_dict()).items():
        assert torch.equal(value, want[name]), name
    loss_on(model, rank, 2).backward()


@pytest.mark.parametrize("world,hybrid,layout", [(1, 0, "per_parameter"), (2, 0, "per_parameter"), (4, 2, "per_parameter"), (2, 0, "ragged")])
def test_state_dictionaries_are_saved_copied_and_pickled(world, hybrid, layout):
    run_ranks(world, dictionaries, hybrid, layout)


def same_steps(a, b, rank):
    """Both train alike, to the last bit, and neither is seen by the other."""
    before = [p.detach().clone() for p in a.parameters()]
    one = train(b, torch.optim.AdamW(b.parameters(), lr=1e-2), rank, 2)
    assert all(torch.equal(whole(x), whole(y)) for x, y in zip(before, a.parameters()))
    two = train(a, torch.optim.AdamW(a.parameters(), lr=1e-2), rank, 2)
    for x, y in zip(one, two):
        for name in y:
            assert (x[name] is None and y[name] is None) or torch.equal(x[name], y[name]), name


def copied(rank, world, hybrid, layout, tied):
    mesh = mesh_of(world, hybrid)
    options = {"mesh": mesh, "shard_layout": layout, "mp_policy": hp.MixedPrecisionPolicy(reduce_dtype=torch.float64)}
    model = build(tied=tied)
    own = model.blocks[2].scale
    for block in model.blocks:
        hp.fully_shard(block, ignored_params={own}, replicate_params={block.norm.weight}, **options)
    hp.fully_shard([model.norm] if tied else [model.norm, model.head], **options)
    hp.fully_shard(model, **options)
    model.blocks[0].scale.requires_grad_(False)
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    model.set_reduce_op_type("sum")
    model.blocks[2].set_gradient_divide_factor(3.0)
    if not hybrid:
        own.register_hook(lambda grad: torch.zeros_like(grad))  # nobody else reduces it
    loss_on(model, rank, 0).backward()
    made = copy.deepcopy(model)
    assert type(made) is type(model) and type(made.blocks[0]) is type(model.blocks[0])
    names = [name for name, _ in made.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    for name, a, b in zip(names, made.parameters(), model.parameters()):
        assert type(a) is type(b) and a is not b and a.grad is None and a.requires_grad == b.requires_grad, name
        assert torch.equal(whole(a), whole(b)), name
        assert not isinstance(b, DTensor) or a.placements == b.placements
    assert type(made.blocks[2].scale) is nn.Parameter and made.blocks[2].scale is not own
    assert made.blocks[1]._hyper_parallel_state.prefetch == {
        "set_modules_to_backward_prefetch": [made.blocks[0]._hyper_parallel_state.unit]}
    for module in (model, made):
        module.zero_grad()
        module.blocks[2].scale.requires_grad_(False)
    same_steps(model, made, rank)
    again = copy.deepcopy(made)
    for module in again.modules():  # no hooks of earlier ones
        assert len(module._forward_pre_hooks) == len(module._forward_hooks) == isinstance(module, ours.FSDPModule)
        assert len(module._state_dict_pre_hooks) <= 1 and len(module._load_state_dict_post_hooks) <= 1
    same_steps(made, again, rank)


@pytest.mark.parametrize("world,hybrid,layout,tied", [(2, 0, "per_parameter", False), (1, 0, "per_parameter", True), (2, 0, "ragged", False),
                                                      (4, 2, "per_parameter", True)])
def test_deep_copies_train_like_their_originals(world, hybrid, layout, tied):
    run_ranks(world, copied, hybrid, layout, tied)


class Keeping(nn.Module):
    """Keeps the parameters of its LSTM in a list of its own, as torch does."""

    def __init__(self):
        super().__init__()
        self.rnn, self.linear = nn.LSTM(DIM, DIM, batch_first=True), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.linear(self.rnn(x)[0])

    def encode(self, x):
        return self.linear(x)


class Copying(Block):
    def __deepcopy__(self, memo):
        return "mine"


def copies_of_parts(rank, world):
    mesh, x = mesh_of(world, 0), torch.ones(2, 3, DIM)
    model = ours.fully_shard(build(Keeping), mesh=mesh)
    ours.register_fsdp_forward_method(model, "encode")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made, made_optimizer = copy.deepcopy((model, optimizer))
    assert all(a is b for a, b in zip(made.parameters(), made_optimizer.param_groups[0]["params"]))
    want, encoded = model(x), model.encode(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(made(x), want) and torch.equal(made.encode(x), encoded)
    assert model(x).count_nonzero() == model.encode(x).count_nonzero() == 0

    # Inside of a module that is no unit; converted, and not yet used; with its parameters gathered by hand.
    outer = nn.Sequential(ours.fully_shard(build(Block), mesh=mesh), nn.Linear(DIM, DIM)).bfloat16()
    outer[0].unshard()
    made = copy.deepcopy(outer)
    assert all(parameter.dtype == torch.bfloat16 for parameter in made.parameters())
    made(torch.ones(2, DIM, dtype=torch.bfloat16)).sum().backward()
    assert isinstance(made[0].scale.grad, DTensor) and outer[0].scale.grad is None
    # A module of a unit without the unit: DTensors of its own.
    part = copy.deepcopy(outer[0].up)
    assert torch.equal(whole(part.weight), whole(outer[0].up.weight)) and part.weight is not outer[0].up.weight
    assert part.state_dict().keys() == {"weight", "bias"}

    with torch.device("meta"):
        empty = Block()
    made = copy.deepcopy(ours.fully_shard(empty, mesh=mesh))
    assert all(parameter.is_meta for parameter in made.parameters())
    made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(1.0)
    made(torch.ones(2, DIM)).sum().backward()

    rows = hp.fully_shard(build(Block), mesh=mesh, shard_layout="ragged").bfloat16()
    made, y = copy.deepcopy(rows), torch.ones(2, DIM, dtype=torch.bfloat16)
    assert torch.equal(made(y), rows(y)) and all(torch.equal(a, b) for a, b in zip(made.parameters(), rows.parameters()))

    average = torch.optim.swa_utils.AveragedModel(outer[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(outer[0])
    assert torch.equal(whole(average.module.scale), whole(outer[0].scale))
    assert average(torch.ones(2, DIM, dtype=torch.bfloat16)).shape == (2, DIM)

    with pytest.raises(RuntimeError, match="FSDPCopying has a __deepcopy__ of its own"):
        copy.deepcopy(ours.fully_shard(Copying(), mesh=mesh))
    members = ours.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], mesh=mesh)
    first = members.pop(0)
    members.clear()
    with pytest.raises(RuntimeError, match="a module of the unit of FSDPLinear is gone"):
        copy.deepcopy(first)


def test_deep_copies_of_parts_and_in_odd_states():
    run_ranks(2, copies_of_parts)


def copied_with_tensor_parallel(rank, world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = build(Even)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrap(ours, model, mesh=mesh["dp_shard"])
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), rank // 2, 1)
    made = copy.deepcopy(model)
    for each in (model, made):
        loss_on(each, rank // 2, 0).backward()
    for a, b in zip(made.parameters(), model.parameters()):
        assert a.placements == b.placements and torch.equal(whole(a), whole(b)) and torch.equal(whole(a.grad), whole(b.grad))


def test_deep_copies_with_tensor_parallelism():
    run_ranks(4, copied_with_tensor_parallel)
