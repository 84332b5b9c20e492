"""Field reports in which FSDP2 goes wrong: here the numbers are those of one process."""
import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hyper_parallel.fsdp as ours
from models import DIM, Block, Net, batch, build, loss_of
from ranks import run_ranks
from scripts import mesh_of, weights, whole, wrap


def rows(rank, step, count=3):
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def check(model, plain, what, **tolerance):
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters()):
        got, want = (parameter.grad, reference.grad) if what == "grad" else (parameter, reference.detach())
        assert (got is None) == (want is None), f"{name}: {got}, want {want}"
        if want is not None:
            message = lambda text: f"{name}: {text}"  # noqa: B023
            torch.testing.assert_close(whole(got).to(want.dtype), want, msg=message, **tolerance)


def thawed(rank, world):
    policy = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = build(Block).requires_grad_(False), build(Block).requires_grad_(False)
    ours.fully_shard(model, mesh=mesh_of(world, 0), mp_policy=policy)
    reduced = []
    model.set_all_reduce_hook(lambda gradient: reduced.append(gradient.dtype))
    model(rows(rank, 0))
    assert not reduced
    for step in range(3):
        # All thaw, then one is frozen again, then all train.
        model.requires_grad_(True), plain.requires_grad_(True)
        model.scale.requires_grad_(step != 1), plain.scale.requires_grad_(step != 1)
        model(rows(rank, step)).float().square().sum().backward()
        for other in range(world):
            half = copy.deepcopy(plain).bfloat16()
            half(rows(other, step).bfloat16()).float().square().sum().backward()
            for parameter, copied in zip(plain.parameters(), half.parameters()):
                if copied.grad is not None:
                    part = copied.grad.float() / world
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
        assert set(reduced) == {torch.float32}
        assert all(parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        check(model, plain, "grad", atol=1e-6, rtol=1e-5)
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.grad = None


@pytest.mark.parametrize("world", [1, 2])
def test_b09_frozen_at_the_first_forward_then_trained_reduces_in_fp32(world):
    run_ranks(world, thawed)


class Adapted(nn.Module):
    """A bf16 base and an fp32 adapter."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(DIM, DIM).bfloat16(), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.adapter(x)


def two_dtypes(rank, world, trains):
    model = build(Adapted)
    model.base.requires_grad_(trains)
    plain = copy.deepcopy(model)
    ours.fully_shard(model, mesh=mesh_of(world, 0), reshard_after_forward=True)
    optimizer, reference = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (model, plain))
    for step in range(3):
        model(rows(rank, step)).square().mean().backward()
        torch.stack([plain(rows(other, step)).square().mean() for other in range(world)]).mean().backward()
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
        check(model, plain, "grad", atol=1e-3, rtol=8e-3)  # one process adds up in bf16
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        check(model, plain, "value", atol=1e-3, rtol=8e-3)
    torch.testing.assert_close(whole(model.adapter.weight), plain.adapter.weight.detach(), atol=2e-3, rtol=1e-3)
    moved = [not torch.equal(whole(p), q) for p, q in zip(model.parameters(), build(Adapted).parameters())]
    assert moved == [trains, trains, True, True]


@pytest.mark.parametrize("trains", [False, True], ids=["frozen_base", "both_train"])
def test_b11_two_dtypes_in_one_unit(trains):
    run_ranks(2, two_dtypes, trains)


class Keeping(Block):
    def forward(self, x):
        self.kept = super().forward(x)
        return x


def kept_tensor(rank, world, way):
    model = nn.Sequential(build(Keeping), build(Block, seed=8))
    plain = copy.deepcopy(model)
    for part in model:
        ours.fully_shard(part, mesh=mesh_of(world, 0), reshard_after_forward=way != "kept")
    ours.fully_shard(model, mesh=mesh_of(world, 0))
    for step in range(2):
        model(rows(rank, step))
        if way == "error":
            # FSDP2 goes on with memory that is gone. Here it is said, and the next step is as if nothing had been.
            with pytest.raises(RuntimeError, match="(?s)unit 0 are resharded.*return every tensor.*or call unshard"):
                model[0].kept.square().sum().backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            model(rows(rank, step))
        if way != "kept":
            model[0].unshard()
        model[0].kept.square().sum().backward()
        losses = []
        for other in range(world):
            plain(rows(other, step))
            losses.append(plain[0].kept.square().sum())
        torch.stack(losses).mean().backward()
        check(model, plain, "grad")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("way", ["error", "kept", "unshard"])
def test_b20_a_loss_from_a_tensor_that_the_unit_kept(way):
    run_ranks(2, kept_tensor, way)


def late_optimizer(rank, world, grad):
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    with torch.set_grad_enabled(grad):
        model(batch(rank, 0)[0])  # leaves the root gathered
    optimizer, reference = torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.SGD(plain.parameters(), lr=0.5)
    assert all(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])
    for step in range(3):
        tokens, targets = batch(rank, step)
        loss_of(model(tokens), targets).backward()
        torch.stack([loss_of(plain(batch(other, step)[0]), batch(other, step)[1]) for other in range(world)]).mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        check(model, plain, "value")
    assert all(not torch.equal(value, first) for value, first in zip(weights(model).values(), build().parameters()))


@pytest.mark.parametrize("world,grad", [(1, False), (2, False), (2, True)])
def test_b26_an_optimizer_built_after_a_forward_trains(world, grad):
    run_ranks(world, late_optimizer, grad)


def averaged(rank, world, kind):
    """By torch's own AveragedModel, which deep-copies the model, or on lists of shards."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    update = get_ema_multi_avg_fn(0.5)
    expected = AveragedModel(plain, multi_avg_fn=update)
    if kind == "model":
        average = AveragedModel(model, multi_avg_fn=update)
        assert isinstance(average.module, ours.FSDPModule) and isinstance(average.module.blocks[0], ours.FSDPModule)
    else:
        averages = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer, reference = torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.SGD(plain.parameters(), lr=0.5)
    unit = model._hyper_parallel_state.unit
    for step in range(3):
        tokens, targets = batch(rank, step)
        loss_of(model(tokens), targets).backward()
        torch.stack([loss_of(plain(batch(other, step)[0]), batch(other, step)[1]) for other in range(world)]).mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        before = unit.counters()
        if kind == "model":
            average.update_parameters(model)
        elif step == 0:  # as AveragedModel begins
            for mine, parameter in zip(averages, model.parameters()):
                mine.copy_(parameter.detach())
        else:
            update(averages, [parameter.detach() for parameter in model.parameters()], step)
        assert unit.counters() == before  # on shards: nothing is gathered
        expected.update_parameters(plain)
    if kind == "model":
        other = average.module
    else:  # the averages as a model of its own
        other = wrap(ours, build(seed=4), mesh=mesh_of(world, 0))
        other.load_state_dict({name: value for (name, _), value in zip(model.named_parameters(), averages)})
    exported = build(seed=5)
    exported.load_state_dict(weights(other))
    check(other, expected.module, "value")
    check(model, plain, "value")
    tokens, _ = batch(rank, 9)
    torch.testing.assert_close(other(tokens), exported(tokens))


@pytest.mark.parametrize("kind", ["model", "lists"])
def test_b54_averages_of_weights_on_shards(kind):
    run_ranks(2, averaged, kind)
