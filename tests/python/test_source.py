"""Plain modules that tensor or expert parallelism has cut, sharded once more: equal to one rank with everything."""
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

import hyper_parallel as hp
from models import DIM, WORDS, batch, build, loss_of
from ranks import run_ranks


def reduced(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Copied(torch.autograd.Function):
    """What all ranks have goes into parts of a computation."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum of what the ranks have computed."""

    @staticmethod
    def forward(ctx, x, group):
        return reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    group = None  # of tensor parallelism

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x):
        y = self.norm(x)
        if self.group is None:
            return x + self.down(F.gelu(self.up(y)))
        return x + Summed.apply(self.down(F.gelu(self.up(Copied.apply(y, self.group)))), self.group)


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TENSOR = hp.ModuleShardingSpec({"up.weight": {"tp": Shard(0)}, "up.bias": {"tp": Shard(0)}, "down.weight": {"tp": Shard(-1)}})


def cut_by_plan(model, plan, mesh):
    """This rank's blocks, and how they came to be, by name."""
    infos = hp.build_source_shard_info(plan, mesh)
    for name, info in infos.items():
        whole = model.get_parameter(name)
        (placement,) = info.placements
        parts = whole.detach().chunk(info.mesh.size(), placement.dim)
        owner = model.get_submodule(name.rpartition(".")[0])
        block = nn.Parameter(parts[info.mesh.get_local_rank()].clone())
        owner.register_parameter(name.rpartition(".")[2], block)
        infos[name] = hp.SourceShardMetaInfo(info.mesh, info.placements, shape=whole.shape)
    return hp.build_source_shard_info_by_param(model, infos)


def part_of(whole, slot_name, parameter, plain, mesh):
    """What this rank has of a tensor, by the definition: tp first, then the last axis of data parallelism."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(), whole
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}[slot_name.split(".", 2)[2]]
    block = whole.chunk(mesh["tp"].size(), dim)[mesh["tp"].get_local_rank()]
    return parameter, block.chunk(mesh["dp_shard"].size(), 0)[mesh["dp_shard"].get_local_rank()]


def tensor_parallel(rank, world, shape, hidden, options):
    names = ("dp_replicate", "dp_shard", "tp") if len(shape) == 3 else ("dp_shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain = build(Net, hidden=hidden)
    model = copy.deepcopy(plain)
    plan = hp.ShardingPlan({f"blocks.{i}": TENSOR for i in range(2)})
    infos = cut_by_plan(model, plan, mesh)
    data = mesh[names[:-1]] if len(shape) == 3 else mesh["dp_shard"]
    for block in model.blocks:
        block.group = mesh.get_group("tp")
        hp.fully_shard(block, mesh=data, source_shard_infos=hp.managed_source_shard_infos(block, infos, mesh=data), **options)
    hp.fully_shard(model, mesh=data, source_shard_infos=hp.managed_source_shard_infos(model, infos, mesh=data), **options)
    optimizer, reference = hp.optim.AdamW(model, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    data_ranks, row = world // mesh["tp"].size(), rank // mesh["tp"].size()
    for step in range(3):
        tokens, targets = batch(row, step)
        loss_of(model(tokens), targets).backward()
        for r in range(data_ranks):
            tokens, targets = batch(r, step)
            (loss_of(plain(tokens), targets) / data_ranks).backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            got, want = part_of(other.grad, name, parameter.grad, plain, mesh)
            torch.testing.assert_close(got, want, msg=lambda text: f"gradient of {name}: {text}")  # noqa: B023
        torch.testing.assert_close(hp.clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            got, want = part_of(other.detach(), name, parameter.detach(), plain, mesh)
            torch.testing.assert_close(got, want, msg=lambda text: f"{name}: {text}", atol=1e-5, rtol=1e-4)  # noqa: B023
    return {name: str(p.placements) if isinstance(p, DTensor) else "plain" for name, p in model.named_parameters()}


def test_tensor_parallel():
    layouts = run_ranks(4, tensor_parallel, (2, 2), 24, {})[0]
    assert layouts["blocks.0.up.weight"] == str((_StridedShard(0, split_factor=2), Shard(0)))
    assert layouts["blocks.1.down.weight"] == str((Shard(0), Shard(1)))
    assert layouts["blocks.0.norm.weight"] == layouts["embed.weight"] == str((Shard(0), Replicate()))


def test_tensor_parallel_with_replicas():
    layouts = run_ranks(4, tensor_parallel, (2, 1, 2), 24, {})[0]
    assert layouts["blocks.0.up.weight"] == str((Replicate(), _StridedShard(0, split_factor=2), Shard(0)))


def test_sizes_that_do_not_divide():
    layouts = run_ranks(4, tensor_parallel, (2, 2), 25, {})[0]
    # No DTensor says how both meshes cut 25 rows.
    assert layouts["blocks.0.up.weight"] == layouts["blocks.0.up.bias"] == "plain"
    assert layouts["blocks.0.down.weight"] == str((Shard(0), Shard(1)))


@pytest.mark.parametrize("options", [{"comm_fusion": False}, {"reshard_after_forward": True, "bucket_size": 600}, {"threshold": 200}],
                         ids=["unfused", "buckets", "threshold"])
def test_options_with_source_layouts(options):
    run_ranks(4, tensor_parallel, (2, 2), 24, options)


def torch_functions(rank, world):
    """What torch does with DTensors over both meshes: optimizers, clipping, state dictionaries."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    plain = build(Net, hidden=24)
    model = copy.deepcopy(plain)
    infos = cut_by_plan(model, hp.ShardingPlan({f"blocks.{i}": TENSOR for i in range(2)}), mesh)
    for part in [*model.blocks, model]:
        if part is not model:
            part.group = mesh.get_group("tp")
        hp.fully_shard(part, mesh=mesh["dp_shard"], source_shard_infos=hp.managed_source_shard_infos(part, infos, mesh=mesh["dp_shard"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for r in range(2):
        tokens, targets = batch(r, 0)
        (loss_of(plain(tokens), targets) / 2).backward()
    tokens, targets = batch(rank // 2, 0)
    loss_of(model(tokens), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    optimizer.step()
    reference.step()
    full = hp.StateDictOptions(full_state_dict=True)
    state = hp.get_model_state_dict(model, options=full)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)
    hp.set_model_state_dict(model, {name: value + 1 for name, value in state.items()}, options=full)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), state[name] + 1, msg=name)
    hp.load_full(model, state)
    values = state if rank == 0 else None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), state[name], msg=name)
    hp.load_from_rank0(model, values and {name: value + 2 for name, value in values.items()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), state[name] + 2, msg=name)


def test_what_torch_does_with_the_parameters():
    run_ranks(4, torch_functions)


class Gathered(torch.autograd.Function):
    """The rows of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group).chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Scattered(torch.autograd.Function):
    """The sums of this rank's rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduced(x, group).chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx, grad):
        return Gathered.apply(grad, ctx.group), None


class Experts(nn.Module):
    group, first = None, 0

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, DIM, DIM) / DIM**0.5)

    def forward(self, x, choice):
        if self.group is not None:
            x, choice = Gathered.apply(x, self.group), Gathered.apply(choice, self.group)
        y = torch.zeros_like(x)
        for i, weight in enumerate(self.weight):
            y = y + (choice == self.first + i).unsqueeze(1) * torch.tanh(x @ weight)
        return y if self.group is None else Scattered.apply(y, self.group)


class Mixture(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.enter, self.experts, self.leave, self.count = nn.Linear(DIM, DIM), Experts(count), nn.Linear(DIM, DIM), count

    def forward(self, x):
        choice = torch.arange(len(x)) % self.count
        h = self.enter(x)
        return self.leave(h + self.experts(h, choice))


def expert_parallel(rank, world, count):
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    expert = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp_shard", "ep"))
    plain = build(Mixture, count=count)
    model = copy.deepcopy(plain)
    plan = hp.ShardingPlan({"experts": hp.ModuleShardingSpec({"weight": {"ep": Shard(0)}}, ep_size=2)})
    info = hp.build_source_shard_info(plan, dense, expert_source_mesh=expert)["experts.weight"]
    assert info.mesh == expert["ep"] and info.placements == (Shard(0),)
    own = expert["ep"].get_local_rank()
    shape = model.experts.weight.shape
    blocks = model.experts.weight.detach().chunk(2)
    model.experts.weight = nn.Parameter(blocks[own].clone())
    model.experts.group, model.experts.first = expert.get_group("ep"), own * len(blocks[0])
    infos = {model.experts.weight: hp.SourceShardMetaInfo(info.mesh, info.placements, shape=shape)}
    hp.fully_shard(model.experts, mesh=expert["edp_shard"], source_shard_infos=infos)
    hp.fully_shard(model, mesh=dense)
    assert hp.set_source_gradient_factor(model, dense) == 0.25
    optimizer, reference = hp.optim.AdamW(model, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def rows(r, step):
        return torch.randn(7, DIM, generator=torch.Generator().manual_seed(100 * step + r))

    def mine(whole):
        block = whole.chunk(2)[own]
        parts = block.chunk(2)
        edp = expert["edp_shard"].get_local_rank()
        return parts[edp] if edp < len(parts) else block[:0]

    for step in range(3):
        model(rows(rank, step)).square().mean().backward()
        for r in range(4):
            (plain(rows(r, step)).square().mean() / 4).backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            assert isinstance(parameter, DTensor) == (name != "experts.weight" or count % 4 == 0)
            for value, want in [(parameter.grad, other.grad), (parameter.detach(), other.detach())]:
                got = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(got, want if isinstance(value, DTensor) else mine(want), msg=name, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(hp.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("count", [4, 3])
def test_expert_parallel(count):
    run_ranks(4, expert_parallel, count)


def partial_gradients(rank, world):
    """Copies whose gradients are summands, or whole, whatever the unit does with others."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def grads(kinds, op):
        model = nn.Linear(2, 2, bias=False)
        info = hp.SourceShardMetaInfo(mesh["tp"], (Replicate(),), copy_gradients=kinds)
        hp.fully_shard(model, mesh=mesh["dp"], source_shard_infos={model.weight: info})
        model.set_reduce_op_type(op)
        (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        return model.weight.grad.full_tensor()[0, 0].item()

    kind = hp.CopyGradient
    assert grads((), "avg") == 1.5 and grads((), "sum") == 3
    assert grads((kind.PARTIAL,), "avg") == 3 and grads((kind.WHOLE,), "sum") == 1.5
    assert grads(("partial",), "sum") == 3


def test_gradients_of_copies():
    run_ranks(2, partial_gradients)


def ragged(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = nn.Linear(DIM, 8, bias=False)
    model = nn.Linear(DIM, 4, bias=False)
    model.weight = nn.Parameter(plain.weight.detach().chunk(2)[rank % 2].clone())
    infos = {model.weight: hp.SourceShardMetaInfo(mesh["tp"], (Shard(0),))}
    hp.fully_shard(model, mesh=mesh["dp"], source_shard_infos=infos, shard_layout="ragged")
    assert not isinstance(model.weight, DTensor) and model.weight.shape == (2, DIM)
    model(torch.ones(1, DIM) * (1 + rank // 2)).sum().backward()
    torch.testing.assert_close(model.weight.grad, torch.full((2, DIM), 1.5))
    torch.testing.assert_close(hp.get_total_norm(model), torch.full((8, DIM), 1.5).norm())


def test_ragged_layout():
    run_ranks(4, ragged)


def copied(rank, world, rows):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = nn.Linear(DIM, rows)
    model = nn.Linear(DIM, 1)
    block = lambda whole: nn.Parameter(whole.detach().chunk(2)[rank % 2].clone())  # noqa: E731
    model.weight, model.bias = block(plain.weight), block(plain.bias)
    infos = {p: hp.SourceShardMetaInfo(mesh["tp"], (Shard(0),), shape=whole.shape)
             for p, whole in [(model.weight, plain.weight), (model.bias, plain.bias)]}
    hp.fully_shard(model, mesh=mesh["dp"], source_shard_infos=infos, threshold=40)
    twin = copy.deepcopy(model)
    x = torch.ones(2, DIM)
    torch.testing.assert_close(twin(x), model(x))
    for own, other in zip(model.parameters(), twin.parameters()):
        assert type(own) is type(other) and own is not other and own.shape == other.shape
        if isinstance(own, DTensor):
            assert own.placements == other.placements and own.device_mesh == other.device_mesh
            torch.testing.assert_close(own.full_tensor(), other.full_tensor())
    twin(x).sum().backward()
    hp.optim.SGD(twin, lr=1.0).step()
    with torch.no_grad():
        assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize("rows", [8, 7])
def test_copies(rows):
    run_ranks(4, copied, rows)


def refused(*parts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))


def refusals(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stranger = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    info = hp.SourceShardMetaInfo(mesh["tp"], (Shard(0),))

    def check(infos, *parts, make=lambda: nn.Linear(4, 4, bias=False), **options):
        model = make()
        weight = model.weight
        with refused(*parts):
            hp.fully_shard(model, mesh=mesh["dp"], source_shard_infos=infos(weight), **options)
        assert type(model) is nn.Linear and model.weight is weight and not model._forward_hooks

    check(lambda w: [(w, info)], "source_shard_infos is list, want a mapping")
    check(lambda w: {w: (Shard(0),)}, "maps a Parameter to a tuple")
    check(lambda w: {"weight": info}, "maps a str")
    check(lambda w: {}, "no entry", "parameter weight")
    check(lambda w: {w: info, torch.ones(3): info}, "has an entry for a tensor of shape", "none of the parameters")
    check(lambda w: {w: hp.SourceShardMetaInfo(mesh["tp"], (Shard(0),), True)}, "origin_is_dtensor is true")
    check(lambda w: {w: hp.SourceShardMetaInfo(mesh["tp"], ())}, "has 0 placements")
    check(lambda w: {w: hp.SourceShardMetaInfo(mesh["tp"], (Partial(),))}, "want Shard, StridedShard or Replicate")
    check(lambda w: {w: hp.SourceShardMetaInfo(mesh["tp"], (Shard(2),))}, "source layout", "parameter weight")
    check(lambda w: {w: hp.SourceShardMetaInfo(mesh["tp"], (Shard(0),), shape=(10, 4))}, r"parameter has shape", r"this rank's block")
    check(lambda w: {w: hp.SourceShardMetaInfo(stranger, (Shard(0),))}, "want two parts of one mesh")
    check(lambda w: {w: hp.SourceShardMetaInfo(mesh["dp"], (Shard(0),))}, "two parts of one mesh")
    both = nn.Linear(4, 4)
    with refused("want one source mesh in a unit", "parameter bias"):
        infos = {both.weight: info, both.bias: hp.SourceShardMetaInfo(stranger, (Shard(0),))}
        hp.fully_shard(both, mesh=mesh["dp"], source_shard_infos=infos)
    with refused("weight is a DTensor, want plain parameters"):
        cut = nn.Linear(4, 4, bias=False)
        cut.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(0)]))
        hp.fully_shard(cut, mesh=mesh["dp"], source_shard_infos={cut.weight: info})
    with pytest.raises(ValueError, match="CopyGradient"):
        hp.SourceShardMetaInfo(mesh["tp"], (Replicate(),), copy_gradients=("half",))
    with refused("want one that fully_shard was called on"):
        hp.set_source_gradient_factor(nn.Linear(1, 1), mesh)
    with refused("want a DeviceMesh with mesh_dim_names"):
        hp.set_source_gradient_factor(hp.fully_shard(nn.Linear(4, 4), mesh=mesh["dp"]), init_device_mesh("cpu", (4,)))


def test_refusals():
    run_ranks(4, refusals)


def plans(rank, world):
    spec = hp.ModuleShardingSpec
    tp = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    plan = hp.ShardingPlan({"embed": spec({"weight": {"tp": Shard(0)}}), "norm": spec({"weight": {"tp": Replicate()}}),
                            "head": spec({"weight": {"tp": Shard(0)}})}, axis_names=("tp",))
    for mesh in (tp, dense, init_device_mesh("cpu", (4,))):
        infos = hp.build_source_shard_info(plan, mesh)
        assert {name: info.placements for name, info in infos.items()} == {
            "embed.weight": (Shard(0),), "norm.weight": (Replicate(),), "head.weight": (Shard(0),)}
        assert all(info.mesh == (dense["tp"] if mesh is dense else mesh) for info in infos.values())
    assert hp.build_source_shard_info(hp.ShardingPlan({"a": spec({"w": {"cp": Replicate()}})}, axis_names=()), None)["a.w"].placements == ()
    expert = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp_shard", "ep"))
    moe = hp.ShardingPlan({"moe": spec({"experts.weight": {"ep": Shard(0)}, "gate.weight": {"tp": Replicate()}}, ep_size=4)})
    infos = hp.build_source_shard_info(moe, dense, expert_source_mesh=expert)
    assert infos["moe.experts.weight"] == hp.SourceShardMetaInfo(expert["ep"], (Shard(0),))
    assert infos["moe.gate.weight"].mesh == dense["tp"]
    with refused("expert mesh"):
        hp.build_source_shard_info(moe, dense)
    with refused("blocks.0.w", "cp"):
        hp.build_source_shard_info(hp.ShardingPlan({"blocks.0": spec({"w": {"cp": Shard(1)}})}), dense)
    with refused("a.w", "b.w"):  # all problems at once
        hp.build_source_shard_info(hp.ShardingPlan({"a": spec({"w": {"tp": Partial()}}), "b": spec({"w": {"typo": Shard(0)}})}), dense)
    tied = hp.ShardingPlan({"embed": spec({"weight": {"tp": Replicate()}}), "head": spec({"weight": {"tp": Shard(0)}})},
                           tied_pairs=[("embed.weight", "head.weight")])
    assert hp.build_source_shard_info(tied, dense)["embed.weight"].placements == (Shard(0),)
    assert hp.build_source_shard_info(tied, dense, tied_pairs=[])["embed.weight"].placements == (Replicate(),)
    partial = hp.ShardingPlan({"norm": spec({"weight": {}}, partial_gradient_axes=("tp",))})
    assert hp.build_source_shard_info(partial, dense)["norm.weight"].copy_gradients == (hp.CopyGradient.PARTIAL,)
    with refused("want one for each dim"):
        hp.build_source_shard_info(hp.ShardingPlan({"a": spec({"w": {}})}), init_device_mesh("cpu", (4,)))

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    info = hp.SourceShardMetaInfo(dense["tp"], (Shard(0),))
    assert hp.build_source_shard_info_by_param(model, {"0.weight": info, "1.weight": info}) == {model[0].weight: info}
    with refused("0.weight and 1.weight are one parameter", "2.weight is no parameter"):
        hp.build_source_shard_info_by_param(model, {"0.weight": info, "1.weight": hp.SourceShardMetaInfo(), "2.weight": info})
    assert hp.managed_parameters(model) == [("0.weight", model[0].weight)] and hp.managed_parameters(model, {model[0].weight}) == []
    assert hp.managed_source_shard_infos(model, None, mesh=dense["dp_shard"]) is None
    filled = hp.managed_source_shard_infos(nn.Linear(4, 4), {}, mesh=dense["dp_shard"])
    assert [(entry.mesh, entry.placements) for entry in filled.values()] == [(dense["tp"], (Replicate(),))] * 2
    with refused("is a source axis, want one beside those of FSDP"):
        hp.default_source_shard_info(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    two = nn.Linear(4, 4)
    with refused("bias lies on", "want one source mesh in a unit"):
        hp.managed_source_shard_infos(two, {two.weight: info, two.bias: hp.SourceShardMetaInfo(tp, (Shard(0),))}, mesh=dense["dp_shard"])


def test_plans():
    run_ranks(4, plans)
