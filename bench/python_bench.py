#!/usr/bin/env python3
"""Runs one script with FSDP2's import and with ours, alternating, and compares them. `make bench-python` builds first.

python_bench.py --build BUILD [--rounds N] [--steps N]

Model, inputs and rules are those of bench/run.py; here both sides are the same Python program (baseline.py), so what differs is the library.
Last line: BENCH fp32=<ratio> bf16=<ratio> host=<ratio> host1024=<ratio> memory=<ratio>
  fp32, bf16      our tokens per second over FSDP2's, W = 2 (bf16: fp32 reduction)
  host, host1024  our host time of a tiny unit, forward and backward, over FSDP2's: a world of one, and a faked one of 1,024
  memory          our peak resident memory of a rank (VmHWM) over FSDP2's, fp32. Pages of the other rank that ours reads in place, its shards
                  and gradients, count in both ranks; what both sides cost the machine is in the line "PSS", from one more run of each: each
                  page once, the highest of samples every few milliseconds, summed over the ranks
"""
import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading

BENCH = pathlib.Path(__file__).resolve().parent
SIDES = ["torch", "ours"]
TIMEOUT_S = 300
FAKED = 1024


class PssPeak(threading.Thread):
    """The highest proportional set size of this process while it lives, from samples: the kernel keeps none."""

    def __init__(self):
        super().__init__(daemon=True)
        self.mib = 0.0
        self.done = threading.Event()

    def run(self):
        import baseline

        while not self.done.wait(0.005):
            self.mib = max(self.mib, baseline.proportional_mib())

    def take(self):
        self.done.set()
        self.join()
        return self.mib


def child(arguments):
    import torch
    import torch.distributed as dist

    import baseline

    if arguments.side == "ours":
        import hyper_parallel.fsdp as ours

        baseline.fully_shard, baseline.MixedPrecisionPolicy = ours.fully_shard, ours.MixedPrecisionPolicy
    torch.set_num_threads(1)
    if arguments.faked:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=arguments.faked, store=FakeStore())
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    arguments.mode = "fsdp2"
    sampler = PssPeak()
    if arguments.pss:
        sampler.start()
    mine = (baseline.tiny if arguments.tiny else baseline.train)(arguments, rank, world)
    if arguments.pss:
        mine["pss_peak_mib"] = sampler.take()
    ranks = [mine]
    if not arguments.faked:
        ranks = [None] * world
        dist.all_gather_object(ranks, mine)
    if rank == 0:
        print(json.dumps(ranks), flush=True)
    if not arguments.faked:
        dist.barrier()
    os._exit(0)  # torch's Gloo thread may drop the last collective's tensors while the interpreter ends, and aborts then


def start(build, side, world, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", __file__, "--side", side, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(build / "python"), str(BENCH)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{side}: exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def host_us(ranks):
    """What wrapping adds to a unit's forward and backward."""
    median = {key: statistics.median(values) for key, values in ranks[0].items()}
    return median["forward_us"] + median["backward_us"] - median["plain_forward_us"] - median["plain_backward_us"]


def check_losses(dtype, runs):
    a, b = (runs[side][0][0]["loss"] for side in SIDES)
    limit = 1e-4 if dtype == "fp32" else 2e-2
    if any(abs(x - y) > limit * abs(x) for x, y in zip(a[:5], b[:5])):
        raise SystemExit(f"{dtype}: the losses differ: {a[:5]} and {b[:5]}")


def measure(arguments):
    import shared_inputs
    from llama_twin import Shape

    build = pathlib.Path(arguments.build).resolve()
    shape = Shape()
    if arguments.quick:
        shape = dataclasses.replace(shape, dim=64, n_layers=2, n_heads=2, ffn_dim=128, vocab_size=256, seq_len=32)
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        shared_inputs.write(folder, shape, 2)
        for dtype in ["fp32", "bf16"]:
            runs = {side: [] for side in SIDES}
            for _ in range(arguments.rounds):
                for side in SIDES:
                    runs[side].append(start(build, side, 2, "--dtype", dtype, "--inputs", folder, "--steps", str(arguments.steps)))
            check_losses(dtype, runs)
            step = {s: statistics.median(ms for run in runs[s] for rank in run for ms in rank["step_ms"]) for s in SIDES}
            peak = {s: max(rank["peak_mib"] for run in runs[s] for rank in run) for s in SIDES}
            tokens = 2 * shape.batch_size * shape.seq_len
            for side in SIDES:
                print(f"{dtype} {side:5} {step[side]:8.1f} ms/step {tokens / step[side] * 1e3:8.0f} tokens/s peak {peak[side]:6.0f} MiB", flush=True)
            ratios[dtype] = step["torch"] / step["ours"]
            if dtype == "fp32":
                ratios["memory"] = peak["ours"] / peak["torch"]
                more = ["--dtype", dtype, "--inputs", folder, "--steps", str(arguments.steps), "--pss"]
                pss = {s: sum(rank["pss_peak_mib"] for rank in start(build, s, 2, *more)) for s in SIDES}
                ratio = pss["ours"] / pss["torch"]
                print(f"fp32 PSS of both ranks: torch {pss['torch']:.0f} MiB, ours {pss['ours']:.0f} MiB, {ratio:.2f}", flush=True)
    for name, more in [("host", []), (f"host{FAKED}", ["--faked", str(FAKED)])]:
        us = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side in SIDES:
                us[side].append(host_us(start(build, side, 1, "--tiny", "--steps", str(arguments.steps), *more)))
        us = {side: statistics.median(values) for side, values in us.items()}
        print(f"{name:8} torch {us['torch']:.0f} us, ours {us['ours']:.0f} us for a unit's forward and backward", flush=True)
        ratios[name] = us["ours"] / us["torch"]
    print("BENCH " + " ".join(f"{name}={ratios[name]:.2f}" for name in ["fp32", "bf16", "host", f"host{FAKED}", "memory"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a small model: only shows that it runs")
    for hidden, kind in [("side", str), ("inputs", str), ("dtype", str), ("faked", int)]:
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--pss", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(warmup=3, units=64)
    arguments = parser.parse_args()
    child(arguments) if arguments.side else measure(arguments)


if __name__ == "__main__":
    main()
