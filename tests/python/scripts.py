"""Training scripts that know the library only as `api`: torch.distributed.fsdp or hyper_parallel.fsdp."""
import contextlib

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from models import DIM, Block, Net, batch, build, loss_of


def whole(tensor):
    """The value of a DTensor or tensor, on every rank; None of None."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model):
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def weights(model):
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def layouts(model, of=lambda parameter: parameter):
    """Where parameters are, or their gradients, as tensors: what comparisons know."""
    dtensors = {name: of(parameter) for name, parameter in model.named_parameters()}
    texts = {name: f"{p.device_mesh.mesh_dim_names} {p.placements} {tuple(p.to_local().shape)}" for name, p in dtensors.items()}
    return {name: torch.tensor(list(text.encode())) for name, text in texts.items()}


def mesh_of(world, hybrid):
    if hybrid:
        return init_device_mesh("cpu", (hybrid, world // hybrid), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (world,))


def wrap(api, model, **options):
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def policy(api, dtype):
    if dtype is None:
        return api.MixedPrecisionPolicy()
    return api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


class Record:
    """What every step gave: losses, gradients, weights."""

    def __init__(self):
        self.steps = []

    def step(self, model, optimizer, loss, max_norm=None):
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm) if max_norm else None
        entry = {"loss": loss.detach().clone(), "norm": whole(norm), **{f"grad {k}": v for k, v in gradients(model).items()}}
        optimizer.step()
        optimizer.zero_grad()
        entry.update({f"weight {k}": v for k, v in weights(model).items()})
        self.steps.append(entry)


def loss_on(model, rank, step, **options):
    tokens, targets = batch(rank, step)
    return loss_of(model(tokens, **options), targets)


def train(model, optimizer, rank, steps=3, clip=None, losses=None):
    """What each step gives. `losses(step)` yields the losses of a step, for one backward each; by default one of one batch."""
    record = Record()
    for step in range(steps):
        for loss in losses(step) if losses is not None else [loss_on(model, rank, step)]:
            loss.backward()
        record.step(model, optimizer, loss, clip)
    return record.steps


def dense(api, rank, world, hybrid=0, dtype=None, tied=False, steps=3, reshard=None, clip=None, optimizer_type=torch.optim.AdamW, **extra):
    model = build(tied=tied)
    wrap(api, model, mesh=mesh_of(world, hybrid), mp_policy=policy(api, dtype), reshard_after_forward=reshard)
    return train(model, optimizer_type(model.parameters(), lr=1e-2, **extra), rank, steps, clip)


def all_optimizers(api, rank, world, **options):
    """One after the other, foreach, fused or neither."""
    steps, fused = [], options.get("fused")
    for optimizer, more in ((torch.optim.AdamW, {}), (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
                            (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {"lr_decay": 0.1})):
        if fused and optimizer in (torch.optim.SGD, torch.optim.Adagrad):
            try:
                dense(api, rank, world, optimizer_type=optimizer, **more, **options)
            except NotImplementedError as error:  # torch has no rule for these kernels on DTensors
                assert "sharding strategy" in str(error)
            else:
                raise AssertionError("torch has learned it: compare it like the others")
        else:
            steps += dense(api, rank, world, optimizer_type=optimizer, **more, **options)
    return steps


def loader_schedule_and_scaler(api, rank, world):
    """A DataLoader with a DistributedSampler, a SequentialLR, autocast and a GradScaler."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*batch(0, 0, rows=11))
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=5)
    model = wrap(api, build(), mesh=mesh_of(world, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=2)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[2])
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    record = Record()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, targets in DataLoader(data, batch_size=2, sampler=sampler, drop_last=False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=epoch == 1):
                loss = loss_of(model(tokens), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            entry = {f"grad {name}": value for name, value in gradients(model).items()}
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            entry.update({f"weight {name}": value for name, value in weights(model).items()})
            record.steps.append({"loss": loss.detach().clone(), "lr": torch.tensor(schedule.get_last_lr()), **entry})
    return record.steps


def accumulation(api, rank, world, hybrid=0, dtype=None, by="sync"):
    model = build()
    wrap(api, model, mesh=mesh_of(world, hybrid), mp_policy=policy(api, dtype))
    switch = {"sync": model.set_requires_gradient_sync, "all_reduce": model.set_requires_all_reduce, "last": model.set_is_last_backward}[by]

    def losses(step):
        for micro in range(3):
            switch(micro == 2)
            yield loss_on(model, rank, 10 * step + micro)

    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, 2, losses=losses)


class Checkpointed(Net):
    """Checkpoints around blocks, or inside of them, or both."""

    reentrant, where = False, "around"

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.where != "inside" else block(x)
        return self.head(self.norm(x))


class InsideBlock(Block):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def checkpointing(api, rank, world, reentrant=False, where="around", hybrid=0):
    model = build(Checkpointed)
    model.reentrant, model.where = reentrant, where
    if where != "around":
        for block in model.blocks:
            block.__class__ = InsideBlock
            block.reentrant = reentrant
    wrap(api, model, mesh=mesh_of(world, hybrid))
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank)


def frozen(api, rank, world, dtype=None):
    """The first block and the embedding are frozen; later they train."""
    model = build()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    # FSDP2 wants one dtype of gradient in a unit and takes no unit in which some train.
    wrap(api, model, mesh=mesh_of(world, 0), mp_policy=policy(api, dtype))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def several_forwards(api, rank, world):
    """Two forwards of the model and one without gradients, then one backward."""
    model = build()
    wrap(api, model, mesh=mesh_of(world, 0))

    def losses(step):
        with torch.no_grad():
            loss_on(model, rank, step)
        yield loss_on(model, rank, step) + loss_on(model, rank, step + 50)

    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, losses=losses)


class Skipping(Net):
    def forward(self, tokens, skip=()):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x)
        return self.head(self.norm(x))


def partial_use(api, rank, world):
    """A block that does not run in some steps, on all ranks alike."""
    model = build(Skipping)
    wrap(api, model, mesh=mesh_of(world, 0))
    skips = [(), (1,), (0, 2), ()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, optimizer, rank, len(skips), losses=lambda step: [loss_on(model, rank, step, skip=skips[step])])


class Failing(Net):
    """Fails at one block, in forward or in backward."""

    fail, where = None, "forward"

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.fail == i and self.where == "forward":
                raise KeyError("on purpose")
            if self.fail == i:
                x.register_hook(self.fail_in_backward)
        return self.head(self.norm(x))

    def fail_in_backward(self, gradient):
        raise KeyError("on purpose")


def exceptions(api, rank, world, where="forward"):
    """One step fails half way on all ranks, then steps as if nothing had been."""
    model = build(Failing)
    model.where = where
    wrap(api, model, mesh=mesh_of(world, 0))

    def losses(step):
        if step == 1:
            model.fail = 1
            # What a hook raises has another type when it comes through the engine of autograd.
            with contextlib.suppress(KeyError, RuntimeError):
                loss_on(model, rank, step).backward()
                raise AssertionError("it did not fail")
            model.fail = None
            model.reset_iter_state()
            model.zero_grad()
        yield loss_on(model, rank, step)

    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, losses=losses)


def one_list(api, rank, world):
    """The last norm and the head as one unit, prefetch lists, a dimension of choice."""
    from torch.distributed.tensor import Shard

    model = build()
    mesh = mesh_of(world, 0)
    # FSDP2 wants sizes that divide on other dimensions than 0.
    choose = lambda parameter: Shard(1) if parameter.dim() == 2 and parameter.shape[1] == DIM else None
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, shard_placement_fn=choose)
    api.fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    api.fully_shard(model, mesh=mesh)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank)


def tensor_parallel(api, rank, world, dtype=None, hybrid=False):
    """Blocks cut by columns and rows over two ranks, then sharded over the others."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parts = min(world, 2)
    shape, names = ((2, 1, 2), ("dp_replicate", "dp_shard", "tp")) if hybrid else ((world // parts, parts), ("dp_shard", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build(Even)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrap(api, model, mesh=mesh[names[:-1]] if hybrid else mesh["dp_shard"], mp_policy=policy(api, dtype))
    began = layouts(model)
    steps = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), rank // parts)
    loss_on(model, rank // parts, len(steps)).backward()
    return [began, *steps, layouts(model, lambda parameter: parameter.grad)]


class Even(Net):
    """Sizes that both meshes divide."""

    def __init__(self):
        super().__init__(blocks=2)
        for block in self.blocks:
            block.up, block.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
