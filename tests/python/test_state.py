"""torch's state dictionaries and checkpoints, option by option: what FSDP2 gives and takes, on the same ranks."""
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

import hyper_parallel.fsdp as ours
from models import batch, build, loss_of
from ranks import run_ranks
from scripts import mesh_of, weights, whole, wrap

FULL, CPU, ZERO = {"full_state_dict": True}, {"cpu_offload": True}, {"broadcast_from_rank0": True}


def trained(api, rank, world, seed=7, steps=2, frozen=False, hybrid=0):
    model = build(seed=seed)
    if frozen:
        model.blocks[0].requires_grad_(False)
    wrap(api, model, mesh=mesh_of(world, hybrid))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    train(model, optimizer, rank, range(steps))
    return model, optimizer


def train(model, optimizer, rank, steps):
    for step in steps:
        tokens, targets = batch(rank, step)
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(got, want, what):
    """Keys, kinds and values of two nested dictionaries."""
    (got, _), (want, _) = tree_flatten_with_path(got), tree_flatten_with_path(want)
    assert [str(path) for path, _ in got] == [str(path) for path, _ in want], what
    for (path, a), (_, b) in zip(got, want):
        where = f"{what}: {path}"
        assert type(a) is type(b), where
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device, where
            if isinstance(a, DTensor):
                assert a.placements == b.placements, where
            message = lambda text: f"{where}: {text}"  # noqa: B023
            torch.testing.assert_close(whole(a), whole(b), atol=1e-5, rtol=1e-5, msg=message)
        else:
            assert a == b, where


def same_dictionaries(rank, world, hybrid):
    for frozen in (False, True):
        (a, a_optimizer), (b, b_optimizer) = (trained(api, rank, world, frozen=frozen, hybrid=hybrid) for api in (ours, theirs))
        for chosen in ({}, FULL, CPU, {**FULL, **CPU}, {"ignore_frozen_params": True}, {**FULL, "ignore_frozen_params": True},
                       {"flatten_optimizer_state_dict": True}, {**FULL, **CPU, "flatten_optimizer_state_dict": True},
                       {"keep_submodule_prefixes": False}):
            options = StateDictOptions(**chosen)
            want = get_model_state_dict(b, options=options)
            same(get_model_state_dict(a, options=options), want, f"model, {chosen}")
            if chosen == {"ignore_frozen_params": True} and frozen:
                assert want and not any(name.startswith("blocks.0.") for name in want)
            want = get_optimizer_state_dict(b, b_optimizer, options=options)
            same(get_optimizer_state_dict(a, a_optimizer, options=options), want, f"optimizer, {chosen}")
        part = {"submodules": {a.blocks[1]}}, {"submodules": {b.blocks[1]}}
        same(get_model_state_dict(a, **part[0]), get_model_state_dict(b, **part[1]), "a part")


@pytest.mark.parametrize("world,hybrid", [(1, 0), (2, 0), (4, 2)])
def test_dictionaries_are_those_of_fsdp2(world, hybrid):
    run_ranks(world, same_dictionaries, hybrid)


def fresh(state):
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, state)


def loaded(rank, world):
    source, source_optimizer = trained(ours, rank, world)
    want = weights(source)
    full = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(source, options=full), get_optimizer_state_dict(source, source_optimizer, options=full)
    state = fresh(state)
    train(source, source_optimizer, rank, range(2, 4))
    after = weights(source)
    for chosen in (FULL, {**FULL, **CPU}, {**FULL, **ZERO}, {**FULL, **CPU, **ZERO}):
        options = StateDictOptions(**chosen)
        model, optimizer = trained(ours, rank, world, seed=3, steps=1)
        before = list(model.parameters())
        copied = fresh(state)  # torch keeps some of the tensors that it is given
        given = copied if rank == 0 or "broadcast_from_rank0" not in chosen else ({}, {})
        set_model_state_dict(model, dict(given[0]), options=options)
        set_optimizer_state_dict(model, optimizer, given[1], options=options)
        assert all(a is b for a, b in zip(before, model.parameters()))
        same(weights(model), want, f"{chosen}")
        train(model, optimizer, rank, range(2, 4))
        same(weights(model), after, f"{chosen}, two steps later")
        copied = fresh(state)
        set_state_dict(model, optimizer, model_state_dict=dict(copied[0]), optim_state_dict=copied[1], options=full)
        same(weights(model), want, f"both after {chosen}")


def test_loading_goes_on_where_it_was():
    run_ranks(2, loaded)


def not_strict(rank, world):
    full = weights(build(seed=1))
    some = {name: value for name, value in full.items() if not name.startswith("head")}
    some["unknown.weight"] = torch.ones(3)
    outcomes = []
    for api in (ours, theirs):
        model, _ = trained(api, rank, world, steps=0)
        kept = whole(model.head.weight)
        with pytest.raises(RuntimeError):
            set_model_state_dict(model, dict(some), options=StateDictOptions(full_state_dict=True, strict=True))
        keys = set_model_state_dict(model, dict(some), options=StateDictOptions(full_state_dict=True, strict=False))
        outcomes.append((keys.missing_keys, keys.unexpected_keys))
        assert torch.equal(whole(model.head.weight), kept)
        for name, value in weights(model).items():
            assert name.startswith("head") or torch.equal(value, full[name]), name
    # torch fills up what is missing in a whole dictionary, and does not report it.
    assert outcomes[0] == outcomes[1] and outcomes[0][1] == ["unknown.weight"], outcomes


def test_dictionaries_that_do_not_fit():
    run_ranks(2, not_strict)


def frozen_parts(rank, world):
    model, optimizer = trained(ours, rank, world, frozen=True)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    state = get_model_state_dict(model, options=options)
    other, other_optimizer = trained(ours, rank, world, seed=3, steps=1, frozen=True)
    kept = weights(other.blocks[0])
    set_model_state_dict(other, state, options=options)
    set_optimizer_state_dict(other, other_optimizer, get_optimizer_state_dict(model, optimizer), options=options)
    same(weights(other.blocks[0]), kept, "frozen")
    for name, value in weights(model).items():
        assert name.startswith("blocks.0.") or torch.equal(value, whole(other.get_parameter(name))), name


def test_frozen_parts_stay_out():
    run_ranks(2, frozen_parts)


def saved_meanwhile(rank, world, folder, load_ours):
    model, optimizer = trained(ours, rank, world)
    state, optimizer_state = get_state_dict(model, optimizer)
    want = weights(model)
    future = dcp.async_save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train(model, optimizer, rank, range(2, 4))  # while files are written
    future.result()
    after = weights(model)

    other, other_optimizer = trained(ours if load_ours else theirs, rank, world, seed=3, steps=1)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    into = {"model": state, "optimizer": optimizer_state}
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    same(weights(other), want, "as saved")
    train(other, other_optimizer, rank, range(2, 4))
    same(weights(other), after, "two steps later")


@pytest.mark.parametrize("load_ours", [True, False], ids=["ours", "to_torch"])
def test_saving_while_training_goes_on(load_ours, tmp_path):
    run_ranks(2, saved_meanwhile, str(tmp_path), load_ours)
