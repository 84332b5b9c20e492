"""Trains a few steps under torchrun and lets the interpreter end by itself."""
import sys

import torch
import torch.distributed as dist

import hyper_parallel.fsdp as fsdp
from models import batch, build, loss_of

dist.init_process_group("gloo")
model = build()
for block in model.blocks:
    fsdp.fully_shard(block)
fsdp.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    tokens, targets = batch(dist.get_rank(), step)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
if "destroy" in sys.argv:
    dist.destroy_process_group()
print("trained", flush=True)
