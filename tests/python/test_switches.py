"""Switches of a sharded module and options of fully_shard at work: what is gathered and sent, in which order, and the numbers."""
import json
import os

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
from compare import compare
from models import DIM, Block, Net, batch, build
from ranks import run_ranks
from scripts import gradients, loss_on, mesh_of, train, whole, wrap
from steps import check_equal, reference_step, step


def unit_of(module):
    return module._hyper_parallel_state.unit


def gathered(model):
    return [unit_of(part).is_unsharded() for part in (model, *model.blocks)]


def collectives(model, run):
    def calls():
        return sum(calls for calls, _, _ in unit_of(model).counters().values())

    before = calls()
    run()
    return calls() - before


def spans(folder, run):
    """Names of what the engine does in `run`, in order."""
    hp.trace.start(f"{folder}/trace-%r.json")
    run()
    (path,) = hp.trace.stop()
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


# When parameters are freed.


def freed_after_forward(rank, world):
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    reference_step(plain, world, 0)

    def kept():
        model.zero_grad()
        loss = loss_on(model, rank, 0)
        result = gathered(model)
        loss.backward()
        check_equal(model, plain, lambda parameter: parameter.grad)
        assert gathered(model) == [False] * 4
        return result

    assert kept() == [True, False, False, False]
    model.set_reshard_after_forward(False)
    assert kept() == [True] * 4
    model.set_reshard_after_forward(True)
    assert kept() == [False] * 4
    model.set_reshard_after_forward(False, recurse=False)
    model.blocks[1].set_reshard_after_forward(False)
    assert kept() == [True, False, True, False]


def freed_after_backward(rank, world):
    """Whether a backward that completes no gradients keeps them for the next forward."""
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    model.set_requires_gradient_sync(False)

    def kept(number):
        step(model, rank, number)
        reference_step(plain, world, number)
        return gathered(model)

    assert kept(0) == [False] * 4
    model.set_reshard_after_backward(False, recurse=False)
    assert kept(1) == [True, False, False, False]
    model.blocks[1].set_reshard_after_backward(False)
    assert kept(2) == [True, False, True, False]
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    assert kept(3) == [True] * 4
    assert collectives(model, lambda: kept(4)) == 0
    with torch.no_grad():
        for part in (model, plain):
            part.blocks[1].scale.mul_(3)  # what was kept is older than the shards now
    kept(5)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    assert kept(6) == [False] * 4
    check_equal(model, plain, lambda parameter: parameter.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("freed", [freed_after_forward, freed_after_backward], ids=["forward", "backward"])
def test_when_parameters_are_freed(freed):
    run_ranks(2, freed)


class Table(nn.Embedding):
    """A subclass: nobody knows what its backward reads."""


def tables(rank, world, folder):
    """Gathers of an embedding in a step, with gradients as of one process."""
    plain = build()
    reference_step(plain, world, 0)

    def gathers(cls, *switch):
        model = build()
        model.embed.__class__ = cls
        ours.fully_shard(model.embed, mesh=mesh_of(world, 0))
        wrap(ours, model, mesh=mesh_of(world, 0))
        for value in switch:
            model.embed.set_unshard_in_backward(value)
        step(model, rank, 1)
        model.zero_grad()
        names = spans(folder, lambda: step(model, rank, 0))
        check_equal(model, plain, lambda parameter: parameter.grad)
        return names.count("start unshard embed")

    assert [gathers(Table), gathers(Table, False), gathers(Table, False, True)] == [2, 1, 2]
    assert [gathers(nn.Embedding), gathers(nn.Embedding, True)] == [1, 2]


def test_a_backward_that_reads_no_parameters(tmp_path):
    run_ranks(2, tables, str(tmp_path))


# What is gathered ahead.


def prefetched(rank, world, folder):
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0), reshard_after_forward=True), build()
    blocks = model.blocks
    reference_step(plain, world, 0)

    def ahead():
        """Blocks whose gather has begun when the forward of the first block runs, and the backward of the last one."""
        model.zero_grad()
        names = [name for name in spans(folder, lambda: step(model, rank, 0)) if "blocks" in name]
        check_equal(model, plain, lambda parameter: parameter.grad)
        turn = names.index("backward blocks.2")
        begun = names[:names.index("forward blocks.0")], names[turn - names[turn::-1].index("forward blocks.2"):turn]
        return [[int(name[-1]) for name in part if name.startswith("start unshard")] for part in begun]

    ahead()
    learned = ahead()
    assert learned == [[0, 1], [2, 1]]
    blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
    assert ahead() == [[0, 2, 1], [2, 1]]
    blocks[2].set_modules_to_backward_prefetch([blocks[0]])
    assert ahead() == [[0, 2, 1], [2, 0]]
    blocks[0].set_modules_to_forward_prefetch([])
    assert ahead() == [[0, 1], [2, 0]]
    blocks[2].set_modules_to_backward_prefetch([])
    assert ahead() == learned


def test_prefetch_lists(tmp_path):
    run_ranks(2, prefetched, str(tmp_path))


# What is reduced, and by how much.


class Aside(Net):
    """The second block runs, and the loss does not depend on it."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x) if i != 1 else x + 0 * block(x).detach()
        return self.head(self.norm(x))


def unused(rank, world):
    model, plain = wrap(ours, build(Aside), mesh=mesh_of(world, 0)), build(Aside)
    reference_step(plain, world, 0)

    def sent():
        model.zero_grad()
        calls = collectives(model, lambda: step(model, rank, 0))
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            assert (parameter.grad is None) == (other.grad is None) == name.startswith("blocks.1"), name
            torch.testing.assert_close(whole(parameter.grad), other.grad, msg=name)
        return calls

    sent()
    every = sent()
    model.set_reduce_scatter_unused_params(False, recurse=False)
    assert sent() == every
    model.set_reduce_scatter_unused_params(False)
    assert sent() == every - 1
    model.set_reduce_scatter_unused_params(True)
    assert sent() == every
    model.blocks[1].set_reduce_scatter_unused_params(False)
    assert sent() == every - 1


def test_units_without_gradients():
    run_ranks(2, unused)


def root_alone(api, rank, world, switch):
    """A first backward in which the root keeps its gradients back, and a second one."""
    model = wrap(api, build(), mesh=mesh_of(world, 2))
    steps = []
    for micro in range(2):
        getattr(model, switch)(micro == 1, recurse=False)
        loss = loss_on(model, rank, micro)
        loss.backward()
        steps.append({"loss": loss.detach(), **gradients(model)})
    kept = {name for name, value in steps[0].items() if value is None}
    assert kept == {name for name in steps[0] if name != "loss" and "blocks" not in name}
    return steps


@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_switches_of_one_unit(switch):
    compare(4, root_alone, switch=switch)


def divided(api, rank, world):
    """A factor of one block and of no other unit."""
    model = wrap(api, build(), mesh=mesh_of(world, 0))
    model.blocks[1].set_reduce_scatter_divide_factor(5.0)
    model.blocks[1].set_force_sum_reduction_for_comms(True)  # FSDP2's factors are none of Gloo's otherwise
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 2)


def test_reduce_scatter_divide_factor():
    compare(2, divided)


def factors(rank, world):
    """HyperParallel's, of one unit and of all below."""
    model, plain = build(), build()
    wrap(hp, model, mesh=mesh_of(world, 0))
    reference_step(plain, world, 0)

    def check(of_root, of_blocks):
        model.zero_grad()
        step(model, rank, 0)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
            factor = of_blocks if "blocks" in name else of_root
            torch.testing.assert_close(whole(parameter.grad), factor * other.grad, msg=name)

    model.set_reduce_op_type("sum", recurse=False)
    check(world, 1)
    model.set_reduce_op_type("sum")
    check(world, world)
    model.set_reduce_op_type("avg")
    model.set_gradient_divide_factor(world * 4.0)
    check(0.25, 1)
    model.set_gradient_divide_factor(world * 4.0, recurse=True)
    check(0.25, 0.25)
    seen = []
    model.set_all_reduce_hook(lambda reduced: seen.append(1))
    check(0.25, 0.25)
    assert len(seen) == 1


def test_factors_of_one_unit_and_of_all():
    run_ranks(2, factors)


class Event:
    def __init__(self, work):
        self.synchronize = work


def late_optimizer(rank, world):
    """The weights of a step are there when the event says so."""
    model, plain = wrap(ours, build(), mesh=mesh_of(world, 0)), build()
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    tokens, done = batch(0, 5)[0], []
    for number, part in enumerate([model, model.blocks[1]]):  # any unit, for the whole tree
        step(model, rank, number)
        reference_step(plain, world, number)
        part.set_post_optim_event(Event(lambda: (optimizer.step(), optimizer.zero_grad(), done.append(1))))
        reference.step(), reference.zero_grad()
        assert len(done) == number
        for _ in range(2):
            torch.testing.assert_close(model(tokens), plain(tokens))
            assert len(done) == number + 1
    model.set_post_optim_event(torch.Event("cpu"))
    torch.testing.assert_close(model(tokens), plain(tokens))


def test_post_optim_event():
    run_ranks(2, late_optimizer)


# Options.


class Seen(Block):
    def forward(self, x):
        self.dtype = x.dtype
        return super().forward(x.to(self.scale.dtype))


def policies(rank, world):
    """Policies of both classes with all fields, in both functions, give the same bits; and dtypes are FSDP2's."""
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(rank))

    def run(shard, classes, cast):
        model = build(Seen)
        mixed = classes.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, cast)
        shard(model, mesh=mesh_of(world, 0), mp_policy=mixed)
        y = model(x)
        y.sum().backward()
        return model.dtype, y.detach(), [whole(parameter.grad) for parameter in model.parameters()]

    for cast in (True, False):
        dtype, y, grads = run(ours.fully_shard, ours, cast)
        assert dtype == (torch.bfloat16 if cast else torch.float32)
        want = run(theirs.fully_shard, theirs, cast)
        assert (dtype, y.dtype) == (want[0], want[1].dtype)
        torch.testing.assert_close((y, grads), want[1:], atol=2e-2, rtol=2e-2)
        for api, classes in [(ours, theirs), (hp, theirs), (hp, hp), (ours, hp)]:
            other = run(api.fully_shard, classes, cast)
            assert other[0] == dtype and torch.equal(other[1], y) and y.dtype == torch.float64
            assert all(torch.equal(a, b) for a, b in zip(other[2], grads))


def test_fields_of_policies():
    run_ranks(2, policies)


def offloaded(api, rank, world, other, kind):
    """Policies of both packages in ours; pinned memory, which FSDP2 has only with an accelerator."""
    classes = theirs if other or api is theirs else ours
    fields = {"pin_memory": False} if kind == "CPUOffloadPolicy" and api is theirs else {}
    model = wrap(api, build(), mesh=mesh_of(world, 0), offload_policy=getattr(classes, kind)(**fields))
    assert all(parameter.to_local().device.type == "cpu" for parameter in model.parameters())
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, 2)


@pytest.mark.parametrize("other", [False, True], ids=["ours", "torch"])
@pytest.mark.parametrize("kind", ["OffloadPolicy", "CPUOffloadPolicy"])
def test_offload_policies(kind, other):
    compare(2, offloaded, kind=kind, other=other)


def fusion(rank, world):
    plain = build()
    reference_step(plain, world, 0)

    def calls(**options):
        model = build()
        for part in [*model.blocks, model]:
            hp.fully_shard(part, mesh=mesh_of(world, 0), reshard_after_forward=False, **options)
        step(model, rank, 0)
        check_equal(model, plain, lambda parameter: parameter.grad)
        return collectives(model, lambda: step(model, rank, 0))

    units, parameters = 4, len(list(plain.parameters()))
    assert calls() == calls(comm_fusion_zero_copy=True) == calls(comm_fusion_zero_copy=False) == 2 * units
    assert calls(comm_fusion=False, comm_fusion_zero_copy=False) == 2 * parameters


def test_fusion():
    run_ranks(2, fusion)


def kept_over_an_update(rank, world, where):
    """What stayed gathered is older than what an optimizer has written since."""
    model = ours.fully_shard(nn.Linear(3, 3, bias=False), mesh=mesh_of(world, 0))
    if where == "backward":
        model.set_reshard_after_backward(False)
    (shard,) = model.parameters()
    loss = model(torch.ones(1, 3)).sum()
    if where == "backward":
        loss.backward()
    with torch.no_grad():
        shard.fill_(7.0)
    model.unshard()
    assert torch.equal(model.weight, torch.full((3, 3), 7.0))
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 3), 21.0))
    model.reshard()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_unshard_gathers_what_is_there_now(where):
    run_ranks(2, kept_over_an_update, where)


class Mixture(nn.Module):
    """Frozen and trained parameters of two dtypes in one unit."""

    def __init__(self):
        super().__init__()
        for size, dtype, trains in ((30001, torch.float32, False), (15001, torch.float64, False), (11, torch.float32, True)):
            self.register_parameter(f"p{size}", nn.Parameter(torch.randn(size).to(dtype), requires_grad=trains))

    def forward(self, x):
        return sum((parameter * parameter * x.sum()).mean().float() for parameter in self.parameters())


def planned_pool(rank, world, path):
    os.environ["HP_SAMEHOST"] = path
    model = hp.fully_shard(Mixture(), mesh=mesh_of(world, 0))
    planned = model.plan_memory()
    for _ in range(3):
        model(torch.ones(3)).backward()
        model.zero_grad()
    assert model.memory_use() == planned


@pytest.mark.parametrize("path", ["0", "1"])
def test_memory_of_units_that_gather_several_groups_is_as_planned(path):
    run_ranks(2, planned_pool, path, alone=True)
