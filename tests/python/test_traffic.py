"""How often we communicate, and what a step costs on the host."""
import gc
import pathlib
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.tensor.debug import CommDebugMode

import hyper_parallel.fsdp as ours
from models import DIM, Block, batch, build, loss_of
from ranks import run_ranks
from scripts import mesh_of, whole, wrap


def step(model, rank, number):
    tokens, targets = batch(rank, number)
    loss_of(model(tokens), targets).backward()


def counts(rank, world, hybrid):
    """Collectives of one step, FSDP2's and ours."""
    reference = wrap(theirs, build(), mesh=mesh_of(world, hybrid))
    step(reference, rank, 0)
    with CommDebugMode() as mode:
        step(reference, rank, 1)
    want = mode.get_total_counts()
    model = wrap(ours, build(), mesh=mesh_of(world, hybrid))
    step(model, rank, 0)
    unit = model._hyper_parallel_state.unit
    before = sum(calls for calls, _, _ in unit.counters().values())
    step(model, rank, 1)
    return want, sum(calls for calls, _, _ in unit.counters().values()) - before


@pytest.mark.parametrize("world,hybrid", [(2, 0), (4, 2)])
def test_collectives_of_a_step(world, hybrid):
    for want, got in run_ranks(world, counts, hybrid):
        assert 0 < got <= want


def traffic(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0), reshard_after_forward=True)
    unit = model._hyper_parallel_state.unit
    step(model, rank, 0)
    ((_, before, _),) = unit.counters().values()
    step(model, rank, 1)
    ((_, after, _),) = unit.counters().values()
    # Each unit is gathered twice, and its gradients are sent once: three times the part of the other ranks, padding included.
    parameters = sum(parameter.numel() for parameter in build().parameters()) * 4
    least = 3 * parameters * (world - 1) // world
    assert least <= after - before <= 1.2 * least + 4096
    return unit.transport()


def test_bytes_of_a_step():
    assert set(run_ranks(2, traffic)) <= {"samehost", "gloo"}


def memory(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    unit = model._hyper_parallel_state.unit
    for number in range(2):
        step(model, rank, number)
        model.zero_grad()
    settled = unit.memory()
    for number in range(3):
        step(model, rank, number)
        model.zero_grad()
    assert unit.memory() == settled


def test_a_step_allocates_nothing_after_the_second():
    run_ranks(2, memory)


def held(rank, world):
    """Memory, collectives and gradients of models with and without options that hold anyway, and of one with more blocks."""
    results = []
    for blocks, options in [(3, False), (3, True), (6, False)]:
        model = wrap(ours, build(blocks=blocks), mesh=mesh_of(world, 0), reshard_after_forward=True)
        unit = model._hyper_parallel_state.unit
        if options:
            for part in [model, *model.blocks]:
                part.set_force_sum_reduction_for_comms(True)
                part.set_allocate_memory_from_process_group_for_comm(True)
            model.set_reduce_scatter_max_input_buffers(1)
            model.set_separate_reduce_scatter_group(True)
            ours.share_comm_ctx([model, model.blocks[0]])
        before = {name: calls for name, (calls, _, _) in unit.counters().items()}
        for number in range(2):
            model.zero_grad()
            step(model, rank, number)
        calls = {name: calls - before[name] for name, (calls, _, _) in unit.counters().items()}
        results.append((unit.memory(), calls, [whole(parameter.grad) for parameter in model.parameters()]))
    (memory, calls, grads), (other_memory, other_calls, other_grads), (more_memory, _, _) = results
    assert memory == other_memory and calls == other_calls
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads))
    # One reduction at a time: more units take no more buffers.
    assert memory["pool"] == more_memory["pool"] > 0


def test_options_that_hold_at_all_times():
    run_ranks(2, held)


def frames(rank, world):
    """Python functions of ours that a step calls, once it is warm."""
    model = wrap(ours, build(), mesh=mesh_of(world, 0), reshard_after_forward=True)
    for number in range(2):
        step(model, rank, number)
        model.zero_grad()
    folder = str(pathlib.Path(ours.__file__).parents[1])
    calls = []

    def note(frame, event, argument):
        if event == "call":
            calls.append(frame.f_code.co_filename)

    threading.setprofile(note)  # of threads that begin now
    sys.setprofile(note)
    step(model, rank, 2)
    sys.setprofile(None)
    threading.setprofile(None)
    assert any("torch/nn/modules/module.py" in name for name in calls)
    assert [name for name in calls if name.startswith(folder)] == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_calls_no_python_of_ours(world):
    run_ranks(world, frames)


def waiting(rank, world, path):
    """Rank 1 begins when a thread of rank 0 says so, which it can only while rank 0's forward waits without the interpreter's lock."""
    model = wrap(ours, build(), mesh=mesh_of(world, 0), reshard_after_forward=True)
    step(model, rank, 0)
    begun, said = threading.Event(), pathlib.Path(path)

    def say():
        begun.wait()
        time.sleep(0.3)
        said.touch()

    if rank == 0:
        thread = threading.Thread(target=say)
        thread.start()
        begun.set()
    else:
        while not said.exists():
            time.sleep(0.01)
    step(model, rank, 1)
    if rank == 0:
        thread.join()


def test_waits_let_other_threads_run(tmp_path):
    run_ranks(2, waiting, str(tmp_path / "said"))


def lifetime(rank, world):
    model = wrap(ours, build(), mesh=mesh_of(world, 0))
    step(model, rank, 0)
    seen = weakref.ref(model)
    unit = weakref.ref(model._hyper_parallel_state.unit)
    del model
    gc.collect()
    assert seen() is None and unit() is None
    # Its groups are used again.
    step(wrap(ours, build(), mesh=mesh_of(world, 0)), rank, 1)


def test_a_model_goes_with_its_last_reference():
    run_ranks(2, lifetime)


def fake_world(rank, world):
    model = ours.fully_shard(torch.nn.Sequential(Block(), Block()), mesh=mesh_of(world, 0))
    assert model[0].norm.weight.to_local().shape == ((1,) if rank < DIM else (0,))
    model(torch.ones(1, DIM)).sum().backward()
    assert model[0].up.weight.grad.shape == (2 * DIM + 1, DIM)
    return model._hyper_parallel_state.unit.transport()


def test_a_faked_world_of_many():
    assert run_ranks(1, fake_world, backend="fake", size=1024) == ["fake"]


def through_gloo(rank, world):
    import os

    os.environ["HP_SAMEHOST"] = "0"
    model, plain = ours.fully_shard(build(Block), mesh=mesh_of(world, 0)), build(Block)
    model(torch.ones(2, DIM)).sum().backward()
    plain(torch.ones(2, DIM)).sum().backward()
    for parameter, reference in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(parameter.grad), reference.grad)
    return model._hyper_parallel_state.unit.transport()


def test_through_the_network():
    assert run_ranks(2, through_gloo, alone=True) == ["gloo"] * 2


def part_of_the_world(rank, world):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    # Two meshes that know nothing of each other, one from a group that exists.
    group = dist.new_group([2, 3])
    if rank == 0:
        return None  # takes no part
    if rank == 1:
        mesh = DeviceMesh("cpu", [1], _init_backend=False, mesh_dim_names=("alone",))
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    model, plain = ours.fully_shard(build(Block), mesh=mesh), build(Block)
    x = torch.ones(2, DIM) * (rank - 1)
    model(x).sum().backward()
    (plain(torch.ones(2, DIM)).sum() + plain(2 * torch.ones(2, DIM)).sum()).backward()
    return whole(model.down.weight.grad).allclose(plain.down.weight.grad / 2)


def test_a_mesh_of_some_ranks():
    assert run_ranks(4, part_of_the_world)[2:] == [True, True]
