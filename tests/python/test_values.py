"""Where values come from and go to: meta start, conversions, state dictionaries, checkpoints, optimizers on flat shards."""
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate, Shard

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
from models import DIM, Block, Net, batch, build, loss_of
from ranks import run_ranks
from scripts import mesh_of, weights, whole, wrap


def train(model, rank, optimizer, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        tokens, targets = batch(rank, step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_equal(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(whole(got[name]), whole(want[name]), msg=lambda text: f"{name}: {text}", **tolerance)  # noqa: B023


class Resettable(Net):
    def reset_parameters(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif isinstance(module, Block):
                nn.init.uniform_(module.scale)


def meta_start(rank, world, hybrid):
    with torch.device("meta"):
        model = Resettable()
    wrap(ours, model, mesh=mesh_of(world, hybrid))
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises((ValueError, RuntimeError), match="meta|no values"):
        model(batch(rank, 0)[0])
    model.to_empty(device="cpu")
    assert all(not parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    source = build(Resettable)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), source.parameters()):
            parameter.copy_(torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = wrap(theirs, build(Resettable), mesh=mesh_of(world, hybrid))
    theirs_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    torch.testing.assert_close(train(model, rank, optimizer, 3), train(reference, rank, theirs_optimizer, 3))
    check_equal(weights(model), weights(reference))


@pytest.mark.parametrize("world,hybrid", [(1, 0), (2, 0), (4, 2)])
def test_meta_start(world, hybrid):
    run_ranks(world, meta_start, hybrid)


def started_by_torch(api, rank, world, hybrid):
    with torch.device("meta"):
        model = Resettable()
    wrap(api, model, mesh=mesh_of(world, hybrid)).to_empty(device="cpu")
    torch.manual_seed(11 + rank % (world // max(hybrid, 1)))  # torch fills each rank's part from its own generator
    model.reset_parameters()
    began = weights(model)
    return began, train(model, rank, torch.optim.AdamW(model.parameters(), lr=1e-2), 3), weights(model)


def reset_by_torch(rank, world, hybrid):
    got, want = (started_by_torch(api, rank, world, hybrid) for api in (ours, theirs))
    check_equal(got[0], want[0], atol=0, rtol=0)
    assert got[0]["blocks.0.norm.weight"].eq(1).all() and got[0]["blocks.1.up.weight"].std() > 0.1
    torch.testing.assert_close(got[1], want[1])
    check_equal(got[2], want[2])


@pytest.mark.parametrize("world,hybrid", [(1, 0), (2, 0), (4, 2)])
def test_meta_start_with_reset_parameters(world, hybrid):
    run_ranks(world, reset_by_torch, hybrid)


def forgotten_values(rank, world):
    with torch.device("meta"):
        model = Block()
    ours.fully_shard(model, mesh=mesh_of(world, 0))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in list(model.parameters())[1:]:
            parameter.fill_(1.0)
    with pytest.raises(ValueError, match="no values: .*scale"):
        model(torch.ones(1, DIM))


def test_values_that_nobody_gave():
    run_ranks(2, forgotten_values)


def converted(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, rank, optimizer, 1)
    before = weights(model)
    model.to(torch.float64)
    assert all(parameter.dtype == torch.float64 and parameter.to_local().dtype == torch.float64 for parameter in model.parameters())
    check_equal({k: v.float() for k, v in weights(model).items()}, before)
    plain = build().double()
    plain.load_state_dict(weights(model))
    tokens, targets = batch(0, 5)
    loss, want = loss_of(model(tokens), targets), loss_of(plain(tokens), targets)
    torch.testing.assert_close(loss.detach(), want.detach())
    loss.backward()
    want.backward()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters()):
        assert parameter.grad.dtype == torch.float64
        torch.testing.assert_close(whole(parameter.grad), reference.grad, msg=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, rank, optimizer, 1)


@pytest.mark.parametrize("world", [1, 2])
def test_conversion(world):
    run_ranks(world, converted)


def halves(rank, world):
    """fp16 parameters: FSDP2's numbers, whether the model was converted before fully_shard or by .half() after it."""
    steps = []
    for api, early in [(theirs, True), (ours, True), (ours, False)]:
        model = build().half() if early else build()
        wrap(api, model, mesh=mesh_of(world, 0))
        if not early:
            assert model.half() is model
        tokens, targets = batch(rank, 0)
        logits = model(tokens)
        loss_of(logits, targets).backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert {logits.dtype, *(each.dtype for each in [*model.parameters(), *grads.values()])} == {torch.float16}
        assert all(isinstance(grad, DTensor) for grad in grads.values())
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        grads = {f"grad {name}": whole(grad) for name, grad in grads.items()}
        steps.append({"logits": logits.detach(), **grads, **weights(model)})
    check_equal(steps[1], steps[0], atol=1e-4, rtol=2e-3)
    check_equal(steps[2], steps[1], atol=0, rtol=0)


def test_half_precision():
    run_ranks(2, halves)


def loaded(rank, world, assign, form):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, rank, optimizer, 1)
    other = wrap(ours, build(seed=99), mesh=mesh_of(world, 0))
    state = other.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    if form == "cloned":
        state = {name: value.clone() for name, value in state.items()}
    want = weights(other)
    if form == "whole":
        state = want
        model_keys = model.load_state_dict(
            {name: torch.distributed.tensor.distribute_tensor(value, mesh_of(world, 0), [Shard(0)]) for name, value in state.items()},
            assign=assign)
    else:
        model_keys = model.load_state_dict(state, assign=assign)
    assert not model_keys.missing_keys and not model_keys.unexpected_keys
    check_equal(weights(model), want)
    tokens, targets = batch(rank, 3)
    torch.testing.assert_close(model(tokens), other(tokens))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, rank, optimizer, 1)
    assert all(not torch.equal(value, weights(model)[name]) for name, value in want.items())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("form", ["cloned", "whole"])
def test_load_state_dict(assign, form):
    run_ranks(2, loaded, assign, form)


def checkpointed(rank, world, folder, save_api, load_api, hybrid):
    first = wrap(save_api, build(seed=1), mesh=mesh_of(world, hybrid))
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    train(first, rank, optimizer, 2)
    state = {"model": hp.get_model_state_dict(first), "optimizer": hp.get_optimizer_state_dict(first, optimizer)}
    dcp.save(state, checkpoint_id=folder)

    second = wrap(load_api, build(seed=2), mesh=mesh_of(world, 0))
    optimizer2 = torch.optim.AdamW(second.parameters(), lr=1e-2)
    state = {"model": hp.get_model_state_dict(second), "optimizer": hp.get_optimizer_state_dict(second, optimizer2)}
    dcp.load(state, checkpoint_id=folder)
    hp.set_model_state_dict(second, state["model"])
    hp.set_optimizer_state_dict(second, optimizer2, state["optimizer"])
    check_equal(weights(second), weights(first))
    torch.testing.assert_close(train(second, rank, optimizer2, 2, start=2), train(first, rank, optimizer, 2, start=2))
    check_equal(weights(second), weights(first))


@pytest.mark.parametrize("save,load", [(ours, theirs), (theirs, ours), (ours, ours)], ids=["to_torch", "from_torch", "ours"])
def test_distributed_checkpoints(save, load, tmp_path):
    run_ranks(2, checkpointed_by_name, str(tmp_path), save is ours, load is ours, 0)


def test_distributed_checkpoint_of_hsdp(tmp_path):
    run_ranks(4, checkpointed_by_name, str(tmp_path), True, True, 2)


def checkpointed_by_name(rank, world, folder, save_ours, load_ours, hybrid):
    checkpointed(rank, world, folder, ours if save_ours else theirs, ours if load_ours else theirs, hybrid)


def whole_state(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    want = weights(model)
    full = hp.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    check_equal(full, want)
    on_zero = hp.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert on_zero.keys() == (want.keys() if rank == 0 else set())
    second = wrap(ours, build(seed=5), mesh=mesh_of(world, 0))
    before = list(second.parameters())
    hp.set_model_state_dict(second, on_zero, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    check_equal(weights(second), want)
    assert all(a is b for a, b in zip(before, second.parameters()))
    second(batch(rank, 0)[0])


def test_whole_state_dictionaries():
    run_ranks(2, whole_state)


def flat_adamw(rank, world, layout):
    model = hp_wrap(build(), mesh_of(world, 0), layout)
    if layout == "ragged":
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert sum(parameter.numel() for parameter in model.parameters()) < sum(parameter.numel() for parameter in build().parameters())
    optimizer = hp.optim.AdamW(model, lr=1e-2)
    assert optimizer.lr == 1e-2
    reference = wrap(theirs, build(), mesh=mesh_of(world, 0))
    theirs_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        tokens, targets = batch(rank, step)
        loss, want = loss_of(model(tokens), targets), loss_of(reference(tokens), targets)
        torch.testing.assert_close(loss, want)
        loss.backward()
        want.backward()
        norm = hp.clip_grad_norm_(model, 0.4)
        torch.testing.assert_close(norm.float(), whole(nn.utils.clip_grad_norm_(reference.parameters(), 0.4)))
        optimizer.step()
        theirs_optimizer.step()
        optimizer.zero_grad()
        theirs_optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    if layout == "per_parameter":
        check_equal(weights(model), weights(reference), atol=1e-5, rtol=1e-5)
    state = optimizer.state_dict()
    assert state.keys() == {name for name, _ in reference.named_parameters()}
    assert all(entry["step"] == 3 for entry in state.values())
    saved = {name: {key: value.clone() if key != "step" else value for key, value in entry.items()} for name, entry in state.items()}
    other = hp.optim.AdamW(model)
    other.load_state_dict(saved)
    for name, entry in other.state_dict().items():
        torch.testing.assert_close(entry["exp_avg"], saved[name]["exp_avg"])
    with pytest.raises(ValueError, match="AdamW"):
        other.load_state_dict({})
    with pytest.raises(ValueError):
        optimizer.lr = -1.0
    with pytest.raises(ValueError, match="module is Linear"):
        hp.optim.AdamW(nn.Linear(1, 1))


def hp_wrap(model, mesh, layout):
    for block in model.blocks:
        hp.fully_shard(block, mesh=mesh, shard_layout=layout)
    return hp.fully_shard(model, mesh=mesh, shard_layout=layout)


@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_flat_adamw(layout):
    run_ranks(2, flat_adamw, layout)


def learning_rates(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=5)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    first = weights(model)
    train(model, rank, optimizer, 1)
    schedule.step()
    with torch.no_grad():
        ema(averages, [parameter.detach() for parameter in model.parameters()], None)
    for average, name, now in zip(averages, first, weights(model).values()):
        torch.testing.assert_close(whole(average), (first[name] + now) / 2)


def test_schedules_and_averages():
    run_ranks(2, learning_rates)
