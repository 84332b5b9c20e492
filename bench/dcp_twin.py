#!/usr/bin/env python3
"""torch.distributed.checkpoint on the state of ckpt_bench: MB of float32 in 24 tensors, each cut along its first dimension.

torchrun --standalone --nproc-per-node 2 bench/dcp_twin.py MB FOLDER ROUNDS
Rank 0 prints one line of JSON: the best seconds of save and load over the rounds, of the slowest rank.
"""
import json
import os
import shutil
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

TENSORS = 24


def main():
    warnings.filterwarnings("ignore")
    megabytes, folder, rounds = int(sys.argv[1]), os.path.join(sys.argv[2], "dcp_twin_files"), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    rows = max(world, megabytes * (1 << 20) // 4 // TENSORS // 1024)
    local = -(-rows // world)
    mine = min(local, rows - rank * local)
    state = {f"layers.{i}.weight": DTensor.from_local(torch.rand(mine, 1024), mesh, [Shard(0)], shape=torch.Size((rows, 1024)), stride=(1024, 1))
             for i in range(TENSORS)}
    best = {}
    for one in range(rounds + 1):
        for name, call in (("save", lambda: dcp.save(state, checkpoint_id=folder)), ("load", lambda: dcp.load(state, checkpoint_id=folder))):
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if one > 0:
                best[name] = min(best.get(name, 1e9), seconds.item())
    if rank == 0:
        print(json.dumps(best), flush=True)
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
