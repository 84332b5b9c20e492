"""Optimizers over flat shards, clipping, averages, loss scaling: the numbers of torch's on one rank."""
import copy

import pytest
import torch
from torch import nn

import hyper_parallel as hp
import hyper_parallel.fsdp as fsdp
from models import batch, build, loss_of
from ranks import run_ranks
from scripts import gradients, mesh_of, weights, whole, wrap
from steps import check_equal, reference_step, refused, step


def optimizers(rank, world, kind, hybrid):
    model, plain = build(), build()
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, hybrid))
    decays = lambda name, shape: len(shape) > 1  # noqa: E731
    groups = [{"names": ["head.weight"], "lr": 0.05}, {"predicate": lambda name, shape: name.startswith("blocks.0"), "weight_decay": 0.5}]
    named = dict(plain.named_parameters())
    theirs = []
    for name, parameter in named.items():
        decay = (0.5 if name.startswith("blocks.0") else 0.1) if parameter.ndim > 1 else 0.0
        theirs.append({"params": [parameter], "lr": 0.05 if name == "head.weight" else 0.01, "weight_decay": decay})
    if kind == "sgd":
        optimizer = hp.optim.SGD(model, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, decays=decays, groups=groups)
        reference = torch.optim.SGD(theirs, momentum=0.9, nesterov=True)
    else:
        optimizer = hp.optim.AdamW(model, lr=0.01, weight_decay=0.1, decays=decays, groups=groups)
        reference = torch.optim.AdamW(theirs)
    assert optimizer.lrs == [0.05, 0.01, 0.01] and optimizer.lr == 0.01
    for number in range(3):
        step(model, rank, number)
        reference_step(plain, world, number)
        optimizer.step(), reference.step(), optimizer.zero_grad(), reference.zero_grad()
    check_equal(model, plain, atol=1e-5, rtol=1e-4)
    assert optimizer.state_bytes() > 0
    kept = copy.deepcopy(optimizer.state_dict())
    step(model, rank, 9)
    optimizer.step()
    optimizer.load_state_dict(kept)
    state = optimizer.state_dict()
    assert all(state[name]["step"] == 3 for name in state)
    optimizer.lrs = [0.1, 0.2, 0.3]
    assert optimizer.lr == 0.3
    optimizer.lr = 0.5
    assert optimizer.lrs == [0.5] * 3
    with refused(ValueError, "AdamW|SGD"):
        optimizer.lrs = [0.1]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("world,hybrid", [(2, 0), (4, 2)])
def test_flat_optimizers(world, hybrid, kind):
    run_ranks(world, optimizers, kind, hybrid)


def choices(rank, world, kind):
    """maximize, state_dtype: the numbers of torch's, and what the state is kept in."""
    make = {"sgd": (hp.optim.SGD, torch.optim.SGD, {"momentum": 0.9}), "adamw": (hp.optim.AdamW, torch.optim.AdamW, {})}[kind]
    sizes = {}
    for dtype, tolerance in [(None, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 2e-3)]:
        model, plain = wrap(hp, build(), mesh=mesh_of(world, 0)), build()
        optimizer = make[0](model, lr=0.01, maximize=True, state_dtype=dtype, **make[2])
        reference = make[1](plain.parameters(), lr=0.01, maximize=True, **make[2])
        for number in range(3):
            step(model, rank, number)
            reference_step(plain, world, number)
            optimizer.step(), reference.step(), optimizer.zero_grad(), reference.zero_grad()
        check_equal(model, plain, atol=tolerance, rtol=1e-4)
        for name, entry in optimizer.state_dict().items():
            assert {value.dtype for key, value in entry.items() if key != "step"} == {dtype or torch.float32}, name
        sizes[dtype] = optimizer.state_bytes()
    assert sizes[torch.float64] == 2 * sizes[None] == 4 * sizes[torch.bfloat16] > 0


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_directions_and_dtypes_of_states(kind):
    run_ranks(2, choices, kind)


def masters(rank, world, kind, dtype):
    """Steps that are smaller than a parameter's last digit: lost without master weights, and kept with them."""
    digit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    ours, theirs = {"sgd": (hp.optim.SGD, torch.optim.SGD), "adamw": (hp.optim.AdamW, torch.optim.AdamW),
                    "muon": (hp.optim.Muon, None)}[kind]
    model = wrap(hp, build(blocks=1).to(dtype), mesh=mesh_of(world, 0))
    ones = model.blocks[0].scale
    step(model, rank, 0)
    # The largest step is a quarter of the last digit of a number just below 1.
    lr = digit / 4 / (whole(ones.grad).abs().max().item() if kind == "sgd" else 1.0)
    sizes = []
    for kept in (False, True):
        more = {"adamw": {"lr": lr, "weight_decay": 0.0, "master_weights": kept}} if kind == "muon" else {}
        optimizer = ours(model, lr=lr, weight_decay=0.0, master_weights=kept, **more)
        wide = {name: nn.Parameter(value.float()) for name, value in weights(model).items()}
        reference = theirs(wide.values(), lr=lr, weight_decay=0.0) if theirs else None
        for _ in range(6):
            model.zero_grad()
            step(model, rank, 0)
            for name, value in gradients(model).items():
                wide[name].grad = value.float()
            optimizer.step(), reference and reference.step()
        assert torch.equal(whole(ones), torch.ones_like(whole(ones))) != kept
        masters = [entry["master"] for entry in optimizer.state_dict().values() if "master" in entry]
        assert len(masters) == (len(wide) if kept else 0) and all(master.dtype == torch.float32 for master in masters)
        sizes.append(optimizer.state_bytes() - sum(master.nbytes for master in masters))
    assert sizes[0] == sizes[1]
    if reference:
        for name, value in weights(model).items():
            torch.testing.assert_close(value.float(), wide[name].detach(), atol=1e-6, rtol=digit, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_master_weights(kind, dtype):
    run_ranks(2, masters, kind, dtype)


def muon(rank, world, layout):
    model, plain = build(), build()
    for part in [*model.blocks, model]:
        hp.fully_shard(part, mesh=mesh_of(world, 0), shard_layout=layout)
    others = ["embed.weight", "head.weight"]
    optimizer = hp.optim.Muon(model, lr=0.02, weight_decay=0.1, not_matrices=others, adamw={"lr": 0.01, "weight_decay": 0.0})
    matrices = [p for name, p in plain.named_parameters() if p.ndim == 2 and name not in others]
    rest = [p for p in plain.parameters() if all(p is not matrix for matrix in matrices)]
    references = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0)]
    for number in range(2):
        step(model, 0, number)  # the same on all ranks, so that worlds can be compared
        reference_step(plain, 1, number)
        for each in [optimizer, *references]:
            each.step()
            each.zero_grad()
    if layout == "per_parameter":
        # torch orthogonalizes in bf16.
        check_equal(model, plain, atol=5e-3, rtol=5e-2)
    result = model(batch(0, 0)[0]).detach()
    other = hp.optim.Muon(model, not_matrices=others, state_dtype=torch.bfloat16, adamw={"state_dtype": torch.float64})
    step(model, 0, 2)
    other.step()
    shapes = {name: parameter.ndim for name, parameter in plain.named_parameters()}
    for name, entry in other.state_dict().items():
        want = torch.bfloat16 if shapes[name] == 2 and name not in others else torch.float64
        assert {value.dtype for key, value in entry.items() if key != "step"} == {want}, name
    return result


def test_muon():
    per_parameter = run_ranks(2, muon, "per_parameter")[0]
    torch.testing.assert_close(run_ranks(2, muon, "ragged")[0], per_parameter)
    torch.testing.assert_close(run_ranks(1, muon, "per_parameter")[0], per_parameter)


def averages(rank, world):
    model, plain = wrap(fsdp, build(), mesh=mesh_of(world, 0)), build()
    ema = hp.optim.Ema(model, decay=0.5)
    want = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    optimizer, reference = hp.optim.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        step(model, rank, number)
        reference_step(plain, world, number)
        optimizer.step(), reference.step(), optimizer.zero_grad(), reference.zero_grad()
        ema.update(number)
        want = {name: 0.5 * want[name] + 0.5 * parameter.detach() for name, parameter in plain.named_parameters()}
    trained = weights(model)
    ema.swap()
    assert ema.swapped and ema.decay_at(0) == 0.5
    torch.testing.assert_close(weights(model), want)
    tokens = batch(0, 0)[0]
    torch.testing.assert_close(model(tokens), torch.func.functional_call(plain, want, (tokens,)))
    with refused(RuntimeError, "swapped"):
        ema.update(3)
    ema.restore()
    assert all(torch.equal(value, trained[name]) for name, value in weights(model).items())
    assert ema.averages()["head.weight"].shape == model.head.weight.to_local().shape
    ema.copy_to()
    torch.testing.assert_close(weights(model), want)
    ema.reset()


def test_averages():
    run_ranks(2, averages)


def scaled(rank, world):
    model, plain = wrap(fsdp, build(), mesh=mesh_of(world, 0)), build()
    optimizer, reference = hp.optim.SGD(model, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = hp.optim.GradScaler(init_scale=8.0, growth_interval=1)
    tokens, targets = batch(rank, 0)
    scaler.scale(loss_of(model(tokens), targets)).backward()
    scaler.unscale_(model)
    reference_step(plain, world, 0)
    torch.testing.assert_close(hp.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert scaler.step(optimizer) is True
    scaler.update()
    reference.step()
    check_equal(model, plain)
    assert scaler.get_scale() == 16.0 and scaler.state_dict() == {"scale": 16.0, "growth_tracker": 0}
    optimizer.zero_grad()
    # One rank's infinity: nobody steps.
    (scaler.scale(loss_of(model(tokens), targets)) * (float("inf") if rank == 1 else 1.0)).backward()
    assert scaler.step(optimizer) is False and scaler.found_nonfinite
    scaler.update()
    check_equal(model, plain)
    assert scaler.get_scale() == 8.0
    scaler.load_state_dict({"scale": 4.0, "growth_tracker": 0})
    assert scaler.get_scale() == 4.0
    with refused(RuntimeError, "update"):
        scaler.update()


def test_loss_scaling():
    run_ranks(2, scaled)


def clipping(rank, world):
    model, plain = build(), build()
    own, other = model.norm.weight, plain.norm.weight
    hp.fully_shard(model, mesh=mesh_of(world, 0), ignored_params={own})
    step(model, rank, 0)
    reference_step(plain, world, 0)
    own.grad = other.grad.clone()
    total = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    torch.testing.assert_close(hp.get_total_norm(model, plain_parameters=[own]), total)
    hp.clip_grads_with_norm_(model, 0.1, total, plain_parameters=[own])
    nn.utils.clip_grads_with_norm_(plain.parameters(), 0.1, total)
    check_equal(model, plain, lambda parameter: parameter.grad)
    hp.clip_grad_value_(model, 1e-3, plain_parameters=[own])
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    check_equal(model, plain, lambda parameter: parameter.grad)
    assert gradients(model)["norm.weight"].abs().max() <= 1e-3
    with refused(RuntimeError, "inite|NaN"):
        own.grad[0] = float("nan")
        hp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True, plain_parameters=[own])


def test_clipping():
    run_ranks(2, clipping)


def both_state_dictionaries(rank, world):
    model = wrap(fsdp, build(), mesh=mesh_of(world, 0))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, rank, 0)
    optimizer.step()
    options = hp.StateDictOptions(full_state_dict=True)
    states = hp.get_state_dict(model, optimizer, options=options)
    other = wrap(fsdp, build(seed=9), mesh=mesh_of(world, 0))
    other_optimizer = torch.optim.AdamW(other.parameters())
    hp.set_state_dict(other, other_optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    torch.testing.assert_close(weights(other), weights(model))


def test_both_state_dictionaries():
    run_ranks(2, both_state_dictionaries)
