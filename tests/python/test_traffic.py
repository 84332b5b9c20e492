"""How often we communicate, and what a step costs on the host."""
import collections
import gc
import pathlib
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
import scripts
from models import DIM, Block, Net, batch, build, loss_of
from ranks import run_ranks
from scripts import Checkpointed, Even, mesh_of, policy, whole, wrap


def step(model, rank, number):
    tokens, targets = batch(rank, number)
    loss_of(model(tokens), targets).backward()


class Collectives(TorchDispatchMode):
    """Counts those that torch starts."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operation = str(function)
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in operation and "_wrap_tensor" not in operation:
            self.calls += 1
        return function(*args, **(kwargs or {}))


class Counting(scripts.Record):
    """Collectives of every step but the first, which compares and learns; those of the program itself, too."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.before, self.counts = mode, None, []

    def calls(self, model):
        state = getattr(model, "_hyper_parallel_state", None)
        return self.mode.calls + (sum(calls for calls, _, _ in state.unit.counters().values()) if state else 0)

    def step(self, model, *arguments):
        if self.before is not None:
            self.counts.append(self.calls(model) - self.before)
        super().step(model, *arguments)
        self.before = self.calls(model)


def counts(rank, world, name, options):
    """Collectives of each step, FSDP2's and ours."""
    result, record = [], scripts.Record
    try:
        for api in (theirs, ours):
            with Collectives() as mode:
                counting = Counting(mode)
                scripts.Record = lambda: counting
                getattr(scripts, name)(api, rank, world, **options)
            result.append(counting.counts)
    finally:
        scripts.Record = record
    return result


# What is gathered ahead in vain: where a forward leaves the order of the one before, or fails.
@pytest.mark.parametrize("name,world,options,in_vain", [
    ("dense", 1, {}, []), ("dense", 2, {}, []), ("dense", 4, {"hybrid": 2}, []), ("dense", 2, {"dtype": torch.bfloat16}, []),
    ("accumulation", 2, {}, []), ("accumulation", 4, {"hybrid": 2, "by": "all_reduce"}, []), ("checkpointing", 2, {}, []),
    ("checkpointing", 2, {"where": "inside", "reentrant": True}, []), ("frozen", 2, {}, []), ("several_forwards", 2, {}, []),
    ("partial_use", 2, {}, [1]), ("exceptions", 2, {}, [1]), ("exceptions", 2, {"where": "backward"}, []), ("one_list", 2, {}, []),
    ("tensor_parallel", 2, {}, []), ("tensor_parallel", 4, {}, []), ("tensor_parallel", 4, {"hybrid": True}, [])])
def test_collectives_of_a_step(name, world, options, in_vain):
    for want, got in run_ranks(world, counts, name, options):
        assert len(want) == len(got) > 0
        for step, (limit, count) in enumerate(zip(want, got), start=1):
            assert (count > 0) == (limit > 0 and world > 1) and count <= limit + (step in in_vain), (step, want, got)


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


def calls_of(run):
    """Python functions that `run` calls, how often, in this thread and in those that begin now."""
    calls = collections.Counter()

    def note(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    run()
    sys.setprofile(None)
    threading.setprofile(None)
    return calls


def before(module, args, kwargs):
    pass


def after(module, args, result):
    pass


def frames(rank, world, kind):
    """A warm step calls what it calls on a plain model with empty hooks where units have ours, and nothing else."""
    dtype = torch.bfloat16 if kind == "bf16" else None
    tensors = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")) if kind == "tp" else None

    def prepare():
        model = build({"tp": Even, "checkpoint": Checkpointed}.get(kind, Net))
        for block in model.blocks if tensors else []:
            parallelize_module(block, tensors["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    plain, model = prepare(), prepare()
    for part in [*plain.blocks, plain.to(dtype)]:
        part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        part.register_forward_hook(after, always_call=True)
    mesh = tensors["dp_shard"] if tensors else mesh_of(world, 2 if kind == "hsdp" else 0)
    wrap(ours, model, mesh=mesh, mp_policy=policy(ours, dtype), reshard_after_forward=True)
    calls = []
    for each in (plain, model):
        for number in range(2):
            step(each, rank, number)
            each.zero_grad()
        calls.append(calls_of(lambda: step(each, rank, 2)))  # noqa: B023
    want, got = calls
    hooks = [(name, count) for (file, name), count in want.items() if file == __file__ and name in ("before", "after")]
    units = 1 + len(model.blocks)
    runs = units + (units - 1 if kind == "checkpoint" else 0)
    assert sorted(hooks) == [("after", runs), ("before", runs)]
    # DTensor's caches keep what this process saw first, and compare all others with that.
    more = {call: count for call, count in (got - want).items() if call[1].split(".")[-1] not in ("__eq__", "_check_equals")}
    assert not more, more


@pytest.mark.parametrize("world,kind", [(1, "fp32"), (2, "fp32"), (2, "bf16"), (4, "hsdp"), (2, "checkpoint"), (4, "tp")])
def test_a_step_calls_no_more_python_than_a_plain_module(world, kind):
    run_ranks(world, frames, kind)


def waiting(rank, world, path, what):
    """Rank 1 takes part when a thread of rank 0 says so, which it can only while rank 0 waits without the interpreter's lock."""
    model = hp.fully_shard(build(Block), mesh=mesh_of(world, 0), reshard_after_forward=what == "forward")
    optimizer = hp.optim.Muon(model)
    x = torch.ones(2, DIM)
    model(x).sum().backward()
    optimizer.step()
    begun, said = threading.Event(), pathlib.Path(path)

    def say():
        begun.wait()
        time.sleep(0.1)
        said.touch()

    def meet(wait, part=lambda: None):
        """`wait` waits for rank 1, and there for its `part`."""
        if rank == 0:
            assert not said.exists()
            thread = threading.Thread(target=say)
            thread.start()
            begun.set()
        else:
            while not said.exists():
                time.sleep(0.01)
            part()
        wait()
        assert said.exists()
        if rank == 0:
            thread.join()

    if what == "forward":
        meet(lambda: model(x))
    elif what == "backward":
        loss = model(x).sum()
        meet(loss.backward)
    elif what == "unshard":
        meet(model.unshard)
    elif what == "handle":
        handle = model.unshard(async_op=True) if rank == 0 else None
        meet(lambda: handle and handle.wait(), model.unshard)
    elif what == "sync":
        model.set_is_last_backward(False)
        loss = model(x).sum()
        if rank == 0:
            loss.backward()
        meet(hp.hsdp_sync_stream, loss.backward)
    elif what == "clip":
        meet(lambda: hp.clip_grad_norm_(model, 1.0))
    elif what == "muon":
        meet(optimizer.step)


@pytest.mark.parametrize("what", ["forward", "backward", "unshard", "handle", "sync", "clip", "muon"])
def test_waits_let_other_threads_run(what, tmp_path):
    run_ranks(2, waiting, str(tmp_path / "said"), what)


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
