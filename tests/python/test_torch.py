"""Together with other parts of torch: autocast, loss scaling, checkpoint wrappers, functions of one's own."""
import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

import hyper_parallel.fsdp as ours
from models import DIM, Block, Net, batch, build, loss_of
from ranks import run_ranks
from scripts import mesh_of, whole, wrap


def same_gradients(model, plain, **tolerance):
    """Of a plain model that saw the batches of all ranks."""
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(whole(parameter.grad), reference.grad, msg=lambda text: f"{name}: {text}", **tolerance)  # noqa: B023


def mean_loss(plain, world, step):
    losses = []
    for rank in range(world):
        tokens, targets = batch(rank, step)
        losses.append(loss_of(plain(tokens), targets))
    return torch.stack(losses).mean()


def autocast(rank, world):
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    tokens, targets = batch(rank, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        loss = loss_of(logits, targets)
    loss.backward()
    for other in range(world):
        tokens, targets = batch(other, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(plain(tokens), targets) / world
        loss.backward()
    same_gradients(model, plain, atol=1e-6, rtol=1e-5)


def test_autocast():
    run_ranks(2, autocast)


def scaled_loss(rank, world):
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        tokens, targets = batch(rank, step)
        scaler.scale(loss_of(model(tokens), targets)).backward()
        if step == 1 and rank == 0:
            model.head.weight.grad.to_local()[0, 0] = float("inf")  # one rank overflows
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        before = whole(model.norm.weight)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, whole(model.norm.weight)) == (step == 1)
        if step != 1:
            mean_loss(plain, world, step).backward()
            reference.step()
            reference.zero_grad()
    assert scaler.get_scale() == 32.0
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(whole(parameter), expected.detach(), msg=name)


def test_loss_scaling():
    run_ranks(2, scaled_loss)


def wrapped_checkpoints(rank, world):
    model, plain = build(), build()
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: isinstance(m, Block))
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh_of(world, 0))
    ours.fully_shard(model, mesh=mesh_of(world, 0))
    for step in range(2):
        tokens, targets = batch(rank, step)
        loss_of(model(tokens), targets).backward()
        mean_loss(plain, world, step).backward()
        same_gradients(model, plain)


def test_checkpoint_wrappers():
    run_ranks(2, wrapped_checkpoints)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x * 2).sum(0)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))
        self.rnn = nn.LSTM(DIM, DIM, batch_first=True)
        self.list = nn.ParameterList([torch.ones(DIM), torch.ones(DIM)])
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        hidden, _ = self.rnn(Doubled.apply(x, self.weight).unsqueeze(1))
        return self.linear(hidden.squeeze(1) * self.list[0] + self.list[1])


def own_functions(rank, world):
    model = build(Own)
    plain = copy.deepcopy(model)
    ours.fully_shard(model, mesh=mesh_of(world, 0), reshard_after_forward=True)
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        same_gradients(model, plain)
    assert model.count == 2


def test_functions_and_modules_that_keep_weights():
    run_ranks(2, own_functions)


def nested(rank, world):
    """Functions of gradients, retained graphs, hooks on outputs, a double use of one unit."""
    model = build(Block)
    plain = copy.deepcopy(model)
    ours.fully_shard(model, mesh=mesh_of(world, 0), reshard_after_forward=True)
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(3), requires_grad=True)
    y, want = model(model(x)), plain(plain(x))
    seen = []
    y.register_hook(lambda grad: seen.append(grad.shape))
    (grad_x,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (want_x,) = torch.autograd.grad(want.sum(), x, retain_graph=True)
    torch.testing.assert_close(grad_x, want_x)
    assert all(parameter.grad is None for parameter in model.parameters())
    y.sum().backward()
    want.sum().backward()
    same_gradients(model, plain)
    assert len(seen) == 2


def test_graphs_that_are_used_again():
    run_ranks(2, nested)


class Routed(Net):
    def forward(self, tokens, drop=False):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x if drop and i == 1 else y
        return self.head(self.norm(x))


def result_dropped_on_one_rank(rank, world):
    """A unit whose result rank 1 does not use: it takes part with zeros."""
    model, plain = build(Routed), build(Routed)
    wrap(ours, model, mesh=mesh_of(world, 0))
    for step in range(2):
        tokens, targets = batch(rank, step)
        loss_of(model(tokens, drop=rank == 1), targets).backward()
        losses = [loss_of(plain(batch(r, step)[0], drop=r == 1), batch(r, step)[1]) for r in range(world)]
        torch.stack(losses).mean().backward()
        same_gradients(model, plain)


def test_ranks_that_go_other_ways():
    run_ranks(2, result_dropped_on_one_rank)


def refused(*parts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))


def other_tensors(rank, world):
    """Tensors that somebody puts in the place of parameters are no new values: nothing is read, nothing is written."""
    mesh, x = mesh_of(world, 0), torch.ones(2, DIM)
    model = ours.fully_shard(build(Block), mesh=mesh)
    before, want = {name: whole(p) for name, p in model.named_parameters()}, model(x)

    def unchanged():
        assert all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
        assert torch.equal(model(x), want)

    own = dict(model.named_parameters())
    result = torch.func.functional_call(model, own, (x,))
    result.sum().backward()
    assert torch.equal(result, want) and all(isinstance(p.grad, DTensor) for p in own.values())
    for values in [{"scale": torch.zeros(DIM)}, {"up.bias": nn.Parameter(torch.zeros(2 * DIM + 1))}, model.state_dict()]:
        name = "scale" if "scale" in values else "up.bias"
        with refused(f"parameter {name} of unit Block", "|functional_call works with the module's own parameters only"):
            torch.func.functional_call(model, values, (x,))
        unchanged()

    given = model.up.bias
    model.up.bias = nn.Parameter(torch.zeros(2 * DIM + 1))
    for _ in range(2):
        with refused("replaced by another Parameter", "load_state_dict", "parameter up.bias of unit Block"):
            model(x)
    model.up.bias = given
    unchanged()
    model.up.bias = None
    with refused("not registered any more", "parameter up.bias"):
        model(x)
    model.up.bias = given

    # Loading does replace them: with whole tensors, with DTensors of any placement, with this rank's part.
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    zeros["scale"] = distribute_tensor(zeros["scale"], mesh, [Replicate()])
    zeros["up.bias"] = model.state_dict()["up.bias"].to_local() * 0
    del zeros["up.bias"]
    model.load_state_dict(zeros, strict=False, assign=True)
    assert all(isinstance(p, DTensor) and whole(p).count_nonzero() == 0 for name, p in model.named_parameters() if name != "up.bias")
    wrong = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=(7,), stride=(1,))
    after = {name: whole(p) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"scale": wrong}, strict=False, assign=True)
    with refused("meta device", "parameter scale"):
        model.load_state_dict({"up.bias": before["up.bias"], "scale": torch.zeros(DIM, device="meta")}, strict=False, assign=True)
    assert all(isinstance(p, DTensor) and torch.equal(whole(p), after[name]) for name, p in model.named_parameters() if name != "up.bias")
    model(x).sum().backward()


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_in_the_place_of_parameters(world):
    run_ranks(world, other_tensors)


class Squared(nn.Module):
    def forward(self, weight):
        return weight * weight


def traced(rank, world):
    mesh, x = mesh_of(world, 0), torch.ones(2, DIM)
    model = ours.fully_shard(build(Block), mesh=mesh)
    want = model(x)
    with refused("unit Block runs under torch.jit.trace", "want the plain module"):
        torch.jit.trace(model, x)
    with refused("want the plain module exported, before fully_shard"):
        torch.export.export(model, (x,))
    assert torch.equal(model(x), want)
    model = ours.fully_shard(build(Block), mesh=mesh)
    torch.nn.utils.parametrize.register_parametrization(model.up, "weight", Squared())
    with refused("not registered any more", "parametrize", "parameter up.weight of unit Block"):
        model(x)


def test_tracing_export_and_late_parametrization():
    run_ranks(2, traced)


class Interrupted(Block):
    stop = False

    def forward(self, x):
        y = super().forward(x)
        if self.stop:
            raise KeyboardInterrupt("on purpose")
        return y


def interrupted(rank, world, what):
    model, plain = nn.Sequential(build(Interrupted), build(Interrupted)), nn.Sequential(build(Interrupted), build(Interrupted))
    for block in model:
        ours.fully_shard(block, mesh=mesh_of(world, 0))
    ours.fully_shard(model, mesh=mesh_of(world, 0))
    x = torch.ones(2, DIM)
    for _ in range(2):
        model[1].stop = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[1].stop = False
        if what == "state_dict":
            assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        elif what == "block":
            assert torch.equal(model[1](x), plain[1](x))
        elif what == "reset":
            model.reset_iter_state()
        if what != "forward":
            assert all(isinstance(parameter, DTensor) for parameter in model[1].parameters())
        assert torch.equal(model(x), plain(x))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(x).sum().backward()
    plain(x).sum().backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("what", ["forward", "state_dict", "block", "reset"])
def test_forwards_that_are_interrupted(what):
    run_ranks(2, interrupted, what)
