"""The surface of C++ that torch.distributed.fsdp has no names for."""
import copy
import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import hyper_parallel as hp
import hyper_parallel.fsdp as fsdp
from models import DIM, Block, Net, batch, build, loss_of
from ranks import run_ranks
from scripts import mesh_of, weights, whole, wrap
from steps import check_equal, reference_step, refused, step


def test_names():
    assert all(hasattr(hp, name) for name in hp.__all__)
    assert hp.__all__ == sorted(hp.__all__)
    for cls in (hp.MixedPrecisionPolicy, hp.MemoryBudget, hp.SourceShardMetaInfo):
        with pytest.raises(dataclasses.FrozenInstanceError):
            field = dataclasses.fields(cls)[0].name
            setattr(cls(1) if cls is hp.MemoryBudget else cls(), field, None)
    assert issubclass(hp.MixedPrecisionPolicy, fsdp.MixedPrecisionPolicy)


# Main gradients.


def main_gradients(rank, world, dtype, hybrid, layout, by):
    policy = hp.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype == torch.float32 else None, reduce_dtype=torch.float32,
                                     apply_grad_on_fp32_main_grad=True)
    model = build().to(dtype)
    plain = copy.deepcopy(model)
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, hybrid), mp_policy=policy, shard_layout=layout)
    usual = dataclasses.replace(policy, apply_grad_on_fp32_main_grad=False)
    same = hp.fully_shard(copy.deepcopy(plain), mesh=mesh_of(world, hybrid), mp_policy=usual)
    for number in range(3):
        if by == "sync":
            model.set_requires_gradient_sync(number == 2)
            same.set_requires_gradient_sync(number == 2)
        step(model, rank, number)
        step(same, rank, number)
    for (name, parameter), other in zip(model.named_parameters(), same.parameters()):
        assert parameter.grad is None, name
        main = model.main_grad(parameter)
        assert main.dtype == torch.float32
        if layout == "per_parameter":
            assert main is parameter.main_grad and main.placements == parameter.placements and main.shape == parameter.shape
            torch.testing.assert_close(whole(main), whole(other.grad).float(), atol=2e-2, rtol=2e-2, msg=name)
        else:
            assert main.shape == parameter.shape
    torch.testing.assert_close(hp.get_total_norm(model), hp.get_total_norm(same), atol=1e-2, rtol=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    hp.optim.SGD(model, lr=0.5).step()
    for name, parameter in model.named_parameters():
        want = before[name].float() - 0.5 * model.main_grad(parameter)
        torch.testing.assert_close(whole(parameter), whole(want.to(dtype)), msg=name)
    model.zero_grad()
    assert all(model.main_grad(parameter) is None for parameter in model.parameters())
    with refused(ValueError, "no parameter of a unit"):
        model.main_grad(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world,hybrid,layout,by", [(1, 0, "per_parameter", None), (2, 0, "per_parameter", None),
                                                    (4, 2, "per_parameter", "sync"), (2, 0, "ragged", None)])
def test_main_gradients(world, hybrid, layout, by, dtype):
    run_ranks(world, main_gradients, dtype, hybrid, layout, by)


def main_gradients_of_the_user(rank, world):
    """What optimizers of HyperParallel do to main_grad: read it, scale it, take it away."""
    policy = hp.MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)
    model = hp.fully_shard(build(Block), mesh=mesh_of(world, 0), mp_policy=policy)
    plain = build(Block)
    x = torch.ones(2, DIM)
    assert all(parameter.main_grad is None for parameter in model.parameters())

    def backward():
        model(x).sum().backward()
        plain(x).sum().backward()

    def check():
        for (name, parameter), other in zip(model.named_parameters(), plain.named_parameters()):
            torch.testing.assert_close(whole(parameter.main_grad), other[1].grad, msg=name)

    backward()
    backward()
    check()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        parameter.main_grad.mul_(0.5)
        other.grad.mul_(0.5)
    backward()
    check()
    twin = copy.deepcopy(model)
    assert all(parameter.main_grad is None for parameter in twin.parameters())
    check()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        parameter.main_grad = None
        other.grad = None
    backward()
    check()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        parameter.main_grad = parameter.main_grad * 2
        other.grad = other.grad * 2
    backward()
    check()
    model.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    check()
    twin(x).sum().backward()
    assert all(parameter.grad is None and parameter.main_grad is not None for parameter in twin.parameters())
    model.to(torch.float64)
    plain.to(torch.float64)
    model.zero_grad()
    plain.zero_grad()
    x = x.double()
    model(x).sum().backward()
    assert all(parameter.main_grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_main_gradients_are_the_users(world):
    run_ranks(world, main_gradients_of_the_user)


# Options.


def thresholds(rank, world, hybrid):
    """Small parameters stay whole, scalars and chosen ones too; equal to one rank."""
    model, plain = build(), build()
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, hybrid), threshold=200, bucket_size=1000)
    assert model.blocks[0].scale.placements[-1] == Replicate() and model.blocks[0].up.weight.placements[-1] == Shard(0)
    optimizer, reference = hp.optim.AdamW(model, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(3):
        step(model, rank, number)
        reference_step(plain, world, number)
        optimizer.step(), reference.step(), optimizer.zero_grad(), reference.zero_grad()
    check_equal(model, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("world,hybrid", [(2, 0), (4, 2)])
def test_threshold_and_buckets(world, hybrid):
    run_ranks(world, thresholds, hybrid)


def replicas(rank, world):
    mesh = mesh_of(world, 2)

    def make(how):
        torch.manual_seed(rank // 2)  # the replicas begin with different values
        return hp.fully_shard(nn.Linear(DIM, DIM), mesh=mesh, replica_init=how)

    x = torch.ones(1, DIM)
    with refused(ValueError, "weight"):
        make("check")(x)
    model = make("broadcast")
    model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(whole(model.weight), nn.Linear(DIM, DIM).weight.detach())
    with refused(ValueError, "replica_init is 'copy'"):
        make("copy")


def test_replicas():
    run_ranks(4, replicas)


def budgets(rank, world):
    def gathered(bytes):
        model = build()
        for part in [*model.blocks, model]:
            hp.fully_shard(part, mesh=mesh_of(world, 0), reshard_after_forward=hp.MemoryBudget(bytes))
        tokens, targets = batch(rank, 0)
        loss = loss_of(model(tokens), targets)
        kept = [block._hyper_parallel_state.unit.is_unsharded() for block in model.blocks]
        loss.backward()
        return kept

    assert gathered(1 << 30) == [True] * 3 and gathered(1) == [False] * 3
    with refused(ValueError, "memory budget is 0"):
        hp.fully_shard(Block(), mesh=mesh_of(world, 0), reshard_after_forward=hp.MemoryBudget(0))


def test_memory_budget():
    run_ranks(2, budgets)


def option_errors(rank, world):
    mesh = mesh_of(world, 0)
    for options, text in [({"threshold": -1}, "threshold is -1"), ({"threshold": True}, "threshold is True"),
                          ({"bucket_size": 1.5}, "bucket_size is 1.5"),
                          ({"bucket_size": 0}, "bucket_size is 0"), ({"comm_fusion": False, "bucket_size": 5}, "bucket_size is 5"),
                          ({"mp_policy": hp.MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=1)}, "main_grad is 1"),
                          ({"reshard_after_forward": "budget"}, "reshard_after_forward is 'budget'")]:
        model = Block()
        with refused(ValueError, text):
            hp.fully_shard(model, mesh=mesh, **options)
        assert type(model) is Block
    for call in [lambda m: hp.set_zero_level(m, 1), lambda m: hp.UnshardScope(m), lambda m: hp.reset_parameters(m, 0, print),
                 lambda m: hp.load_full(m, {}), lambda m: hp.load_from_rank0(m, {}), lambda m: hp.optim.SGD(m), lambda m: hp.optim.Muon(m), lambda m: hp.optim.Ema(m),
                 lambda m: hp.get_total_norm(m), lambda m: hp.clip_grad_value_(m, 1), lambda m: hp.optim.GradScaler().unscale_(m)]:
        with refused(ValueError, "module is Block, want one that fully_shard was called on"):
            call(Block())
    model = hp.fully_shard(Block(), mesh=mesh)
    for level in (0, 4, True):
        with refused(ValueError, "level is"):
            hp.set_zero_level(model, level)
    with refused(ValueError, "connected the ranks"):
        hp.init_process_group(samehost=False)
    with refused(ValueError, "huge_pages is None"):
        hp.init_process_group(huge_pages=None)
    for call, text in [(lambda: hp.optim.AdamW(model, groups=[{"rate": 1}]), "keys ..rate"),
                       (lambda: hp.optim.AdamW(model, groups=[{}]), "group"),
                       (lambda: hp.optim.Muon(model, adjust_lr_fn="x"), "adjust_lr_fn is 'x'"),
                       (lambda: hp.optim.Muon(model, adamw={"x": 1}), "keys ..x"),
                       (lambda: hp.optim.SGD(model, nesterov=True), "nesterov"), (lambda: hp.optim.Ema(model, decay=2), "decay is 2")]:
        with refused(ValueError, text):
            call()


def test_errors():
    run_ranks(2, option_errors)


# Methods and functions.


def methods(rank, world):
    model, plain = build(), build()
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, 0), reshard_after_forward=True)
    planned = model.plan_memory()
    assert model.plan_memory(local_accumulation=True, partial_accumulation=True).total >= planned.total
    assert model.transport() in ("samehost", "gloo")
    for number in range(3):
        step(model, rank, number)
        model.zero_grad()
    assert model.memory_use() == planned and planned.total == planned.shards + planned.gradients + planned.pool + planned.copies
    # Recursion and ways back, which FSDP2's names do not have.
    model.set_gradient_divide_factor(1.0, recurse=True)
    seen = []
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()), recurse=True)
    step(model, rank, 5)
    reference_step(plain, world, 5)
    assert len(seen) == 4
    check_equal(model, plain, lambda parameter: parameter.grad / (world if isinstance(parameter, DTensor) else 1))
    model.zero_grad()
    model.set_gradient_divide_factor(None, recurse=True)
    model.set_all_reduce_hook(None, recurse=True)
    calls = []

    def gather(output_tensor, input_tensor, group, async_op):
        calls.append(1)
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group=group, async_op=async_op)

    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_all_gather(None)
    model.blocks[0].set_custom_reduce_scatter(gather)
    model.blocks[0].set_custom_reduce_scatter(None)
    model.set_reshard_after_backward(True, True)
    model.set_requires_all_reduce(False)  # parks without replicas, too
    step(model, rank, 5)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(False)
    step(model, rank, 5)
    assert not calls and len(seen) == 4 and all(parameter.grad is None for parameter in model.parameters())
    model.wait_for_gradients()
    check_equal(model, plain, lambda parameter: parameter.grad)


def test_methods():
    run_ranks(2, methods)


def levels(rank, world, level):
    model, plain = build(), build()
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, 0))
    sizes = []
    for micro in range(2):
        hp.set_zero_level(model, level, micro == 1)
        step(model, rank, micro)
        reference_step(plain, world, micro)
        sizes.append(sum(block._hyper_parallel_state.unit.is_unsharded() for block in model.blocks))
    check_equal(model, plain, lambda parameter: parameter.grad)
    assert sizes[0] == (0 if level == 3 else 3)


@pytest.mark.parametrize("level", list(hp.ZeroLevel))
def test_zero_levels(level):
    run_ranks(2, levels, level)


@torch.no_grad()
def scopes_and_values(rank, world):
    def fill(name, whole_tensor, generator):
        nn.init.normal_(whole_tensor, std=0.1 * len(name), generator=generator)

    with torch.device("meta"):
        model = Net()
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, 0))
    model.to_empty(device="cpu")
    hp.reset_parameters(model, 7, fill)
    values = weights(model)
    other = hp.fully_shard(build(seed=3), mesh=mesh_of(world, 0), shard_layout="ragged")
    hp.reset_parameters(other, 7, fill)
    x = batch(0, 0)[0]
    torch.testing.assert_close(model(x), other(x))
    again = hp.fully_shard(build(seed=4), mesh=mesh_of(world, 0), shard_layout="ragged")
    hp.load_full(again, values)
    torch.testing.assert_close(again(x), other(x))
    hp.load_from_rank0(again, {name: 2 * value for name, value in values.items()} if rank == 0 else None)
    hp.load_full(model, {name: 2 * value for name, value in values.items()})
    torch.testing.assert_close(again(x), model(x))
    with refused(ValueError, "head.weight"):
        hp.load_full(model, {name: value for name, value in values.items() if name != "head.weight"})
    hp.load_full(model, {"norm.bias": torch.full((DIM,), 3.0)}, strict=False)
    assert whole(model.norm.bias).eq(3).all()
    with hp.UnshardScope(model):
        assert type(model.blocks[0].up.weight) is nn.Parameter and model.blocks[0].up.weight.shape == (2 * DIM + 1, DIM)
        inside = model(x)
        assert type(model.blocks[0].up.weight) is nn.Parameter
    assert isinstance(model.blocks[0].up.weight, DTensor)
    torch.testing.assert_close(inside, model(x))
    return whole(model.blocks[0].up.weight)


def test_scopes_and_values():
    results = [run_ranks(world, scopes_and_values)[0] for world in (1, 2)]
    torch.testing.assert_close(*results)


def traced(rank, world, folder):
    hp.trace.start(f"{folder}/trace-%r.json")
    model = wrap(fsdp, build(), mesh=mesh_of(world, 0))
    step(model, rank, 0)
    (path,) = hp.trace.stop()
    assert path == f"{folder}/trace-{rank}.json"
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    assert {"forward", "unshard", "reduce"} <= {event["name"].split()[0] for event in events if "name" in event}


def test_traces(tmp_path):
    run_ranks(2, traced, str(tmp_path))


def transports(rank, world, samehost):
    hp.init_process_group(samehost=samehost, map_shards=False, huge_pages=True, first_touch=True)
    model, plain = hp.fully_shard(build(), mesh=mesh_of(world, 0)), build()
    step(model, rank, 0)
    reference_step(plain, world, 0)
    check_equal(model, plain, lambda parameter: parameter.grad)
    return model.transport()


@pytest.mark.parametrize("samehost", [True, False])
def test_transports(samehost):
    want = "samehost" if samehost else "gloo"
    assert run_ranks(2, transports, samehost, alone=True) == [want, want]
