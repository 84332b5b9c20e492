"""PyTorch's side of the comparison; bench/run.py starts it with torchrun. Rank 0 prints one line of JSON.

Modes: fsdp2             fully_shard on the embedding, each block, the last norm with the head, and the root
       fsdp2-no-reshard  the same, parameters stay gathered between forward and backward
       ddp               DistributedDataParallel
       none              every rank alone, no communication: the limit
With bf16, fsdp2 keeps fp32 shards, computes in bf16 and reduces in fp32. ddp and none compute on a bf16 copy of fp32 weights that the
optimizer updates; ddp then reduces in bf16, which is less exact and half the bytes.
"""
import argparse
import errno
import json
import os
import resource
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from llama_twin import Llama, next_token_loss
from shared_inputs import Inputs

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def status_mib(key):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024
    raise KeyError(key)


def proportional_mib():
    """Resident memory, pages that several processes use in equal parts."""
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    raise KeyError("Pss")


def clear_peak():
    """Makes VmHWM start again from the memory in use now. False where /proc is read-only, as in some containers."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return False
    return True


def sent_bytes():
    """Bytes that the peers of this process's TCP connections have acknowledged, over its whole life."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
        except OSError:
            continue  # closed meanwhile
    return total


class Wrapped:
    """A model and its optimizer, ready for steps."""

    def __init__(self, model, mode, dtype):
        self.masters = None
        bf16 = dtype == "bf16"
        if mode.startswith("fsdp2"):
            self.shard(model, bf16, reshard=mode == "fsdp2")
        elif bf16:
            self.masters = [p.detach().clone() for p in model.parameters()]
            model.to(torch.bfloat16)
        if mode == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.model = model
        self.parameters = list(model.parameters())
        if self.masters:
            for master in self.masters:
                master.grad = torch.zeros_like(master)
            self.master_grads = [master.grad for master in self.masters]
        self.optimizer = torch.optim.AdamW(self.masters or self.parameters, **ADAMW)

    @staticmethod
    def shard(model, bf16, reshard):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        fully_shard(model.embed_tokens, mp_policy=policy, reshard_after_forward=reshard)
        # The backward of a look-up does not read the table.
        model.embed_tokens.set_unshard_in_backward(False)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
        # Its backward follows at once, so resharding it would only cost a second gather.
        fully_shard([model.norm, model.lm_head], mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)

    @torch.no_grad()
    def update(self):
        if not self.masters:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        torch._foreach_copy_(self.master_grads, [p.grad for p in self.parameters])
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        self.model.zero_grad()


def train(arguments, rank, world):
    inputs = Inputs(arguments.inputs)
    rss_start = status_mib("VmRSS")
    model = Llama(inputs.shape)
    inputs.load_weights(model)
    wrapped = Wrapped(model, arguments.mode, arguments.dtype)
    del model
    batches = [inputs.batch(step, rank) for step in range(inputs.steps)]
    dist.barrier()
    setup_peak = status_mib("VmHWM")
    cleared = clear_peak()
    rows = {"step_ms": [], "forward_ms": [], "backward_ms": [], "optimizer_ms": [], "loss": []}
    for step in range(arguments.warmup + arguments.steps):
        if step == arguments.warmup:
            usage, sent = resource.getrusage(resource.RUSAGE_SELF), sent_bytes()
        tokens, targets = batches[step % inputs.steps]
        start = time.perf_counter()
        loss = next_token_loss(wrapped.model(tokens), targets)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        wrapped.update()
        end = time.perf_counter()
        rows["loss"].append(loss.item())
        del loss
        if step >= arguments.warmup:
            rows["step_ms"].append((end - start) * 1e3)
            rows["forward_ms"].append((forward - start) * 1e3)
            rows["backward_ms"].append((backward - forward) * 1e3)
            rows["optimizer_ms"].append((end - backward) * 1e3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    rows["pss_mib"] = proportional_mib()
    dist.barrier()
    steps = arguments.steps
    peak = status_mib("VmHWM")
    if not cleared and peak <= setup_peak:
        raise RuntimeError(f"set-up took {setup_peak:.0f} MiB and training no more; only a writable /proc/self/clear_refs tells them apart")
    return rows | {
        "peak_mib": peak,
        "setup_peak_mib": setup_peak,
        "start_mib": rss_start,
        "sent_mb_per_step": (sent_bytes() - sent) / steps / 1e6,
        "faults_per_step": (after.ru_minflt - usage.ru_minflt) / steps,
        "system_ms_per_step": (after.ru_stime - usage.ru_stime) / steps * 1e3,
        "user_ms_per_step": (after.ru_utime - usage.ru_utime) / steps * 1e3,
    }


class Tiny(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(units))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def time_tiny(arguments, wrap):
    """Microseconds per unit of each step's forward and backward."""
    model = Tiny(arguments.units)
    if wrap:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    x = torch.randn(1, 8)
    forward, backward = [], []
    for step in range(arguments.warmup + arguments.steps):
        start = time.perf_counter()
        loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        model.zero_grad()
        if step >= arguments.warmup:
            forward.append((middle - start) / arguments.units * 1e6)
            backward.append((end - middle) / arguments.units * 1e6)
    return forward, backward


def tiny(arguments, rank, world):
    plain, wrapped = time_tiny(arguments, False), time_tiny(arguments, True)
    return {"plain_forward_us": plain[0], "plain_backward_us": plain[1], "forward_us": wrapped[0], "backward_us": wrapped[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["fsdp2", "fsdp2-no-reshard", "ddp", "none"], default="fsdp2")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--inputs", help="folder that shared_inputs.write made")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="host time of tiny units instead of training")
    parser.add_argument("--units", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = (tiny if arguments.tiny else train)(arguments, rank, world)
    ranks = [None] * world
    dist.all_gather_object(ranks, mine)
    if rank == 0:
        result = {"side": "torch", "mode": arguments.mode, "dtype": arguments.dtype, "world": world, "ranks": ranks}
        print(json.dumps(result), flush=True)
    dist.barrier()
    sys.stdout.flush()
    # Orderly shutdown of FSDP2 over Gloo aborts now and then; all figures are out by now.
    os._exit(0)


if __name__ == "__main__":
    main()
