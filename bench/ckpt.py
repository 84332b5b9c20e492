#!/usr/bin/env python3
"""`make bench-ckpt`: our checkpoints and torch.distributed.checkpoint's in turns, and the best of each.

bench/ckpt.py [--build BUILD] [--mb 500] [--turns 3] [--rounds 3] [--folder DIR]
Ends with a line of ratios: save and load against plain write with fsync and plain read of the same bytes, the stall of an asynchronous save
against a synchronous one.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def last_json(command):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, cwd=ROOT)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"[bench-ckpt] error: {command[0]} printed no result (exit code {result.returncode})\n{result.stderr[-2000:]}")
    return json.loads(lines[-1])


def merge(best, values, prefix=""):
    for name, seconds in values.items():
        best[prefix + name] = min(best.get(prefix + name, 1e9), seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the files are written (default: the build folder)")
    options = parser.parse_args()
    best = {}
    with tempfile.TemporaryDirectory(dir=options.folder or ROOT / options.build) as folder:
        for _ in range(options.turns):
            arguments = [options.mb, folder, options.rounds]
            merge(best, last_json([ROOT / options.build / "bench" / "ckpt_bench", *arguments]))
            merge(best, last_json([ROOT / ".venv/bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                   ROOT / "bench/dcp_twin.py", *arguments]), "dcp_")
    rows = [("plain write and fsync", "plain_write", "plain_write"), ("ckpt::save", "save", "plain_write"),
            ("torch.distributed.checkpoint.save", "dcp_save", "plain_write"), ("save_async until it returns", "stall", "save"),
            ("plain read", "plain_read", "plain_read"), ("ckpt::load", "load", "plain_read"),
            ("torch.distributed.checkpoint.load", "dcp_load", "plain_read")]
    print(f"{options.mb} MB, 2 ranks, best of {options.turns} turns of {options.rounds} rounds\n")
    print("| | seconds | MB/s | ratio |\n|---|---:|---:|---:|")
    for title, name, against in rows:
        print(f"| {title} | {best[name]:.3f} | {options.mb / best[name]:.0f} | {best[name] / best[against]:.2f} of {against} |")
    print(f"\nCKPT save={best['save'] / best['plain_write']:.2f} load={best['load'] / best['plain_read']:.2f} "
          f"async_stall={best['stall'] / best['save']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
