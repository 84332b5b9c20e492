#!/usr/bin/env python3
"""Runs PyTorch's FSDP2 and hyper_parallel on the same training steps, alternating, and compares them. See bench/README.md."""
import argparse
import json
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import columns as plan
import report
import torch

from llama_twin import Shape
import shared_inputs

BENCH = pathlib.Path(__file__).resolve().parent
WORLD = 2
RUN_TIMEOUT_S = 300
OTHER_CORES_LIMIT = 0.1
RESULT_START, RESULT_END = "<!-- result of run.py --readme -->", "<!-- end of the result -->"


class BenchError(Exception):
    pass


def busy_seconds():
    """CPU time that the whole machine has spent so far."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def children_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Runner:
    def __init__(self, build, inputs):
        self.programs = {"torch": [str(BENCH / "baseline.py")], "ours": ["--no-python", str(build / "bench" / "step_bench")]}
        self.inputs = inputs
        if not (build / "bench" / "step_bench").exists():
            raise BenchError(f"{build}/bench/step_bench does not exist: run `make build` first")

    def command(self, column, world, warmup, steps):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        arguments = [*column.arguments, "--warmup", str(warmup), "--steps", str(steps)]
        if "--tiny" not in arguments:
            arguments += ["--inputs", str(self.inputs)]
        return launcher + self.programs[column.side] + arguments

    def run(self, column, world, warmup, steps):
        """One start of one column. Also says how busy the machine was with other things."""
        command = self.command(column, world, warmup, steps)
        environment = {k: v for k, v in os.environ.items() if k != "HP_SAMEHOST"} | {"OMP_NUM_THREADS": "1"} | dict(column.environment)
        start, busy, own = time.monotonic(), busy_seconds(), children_seconds()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as expired:
            raise BenchError(f"{column.title}: no result after {RUN_TIMEOUT_S} s: {' '.join(command)}") from expired
        wall = time.monotonic() - start
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        # FSDP2 over Gloo may abort after its figures are out; our side has no such excuse.
        if not lines or (column.side == "ours" and done.returncode != 0):
            raise BenchError(f"{column.title}: exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-4000:]}")
        result = json.loads(lines[-1])
        result["other_cores"] = max(busy_seconds() - busy - (children_seconds() - own), 0.0) / wall
        return result


def show(text):
    print(f"[bench] {text}", flush=True)


def measure_training(runner, lists, rounds, warmup, steps):
    """Runs of each column by dtype. The reference and ours alternate in every round; the other columns are dealt out over the rounds."""
    runs = {dtype: {column.key: [] for column in columns} for dtype, columns in lists.items()}
    singles = [(dtype, column) for dtype, columns in lists.items() for column in columns if not column.every_round]
    for number in range(rounds):
        todo = [(dtype, column) for dtype, columns in lists.items() for column in columns if column.every_round]
        for dtype, column in todo + singles[number::rounds]:
            result = runner.run(column, WORLD, warmup, steps)
            runs[dtype][column.key].append(result)
            milliseconds = report.statistics.median(report.step_means(result, "step_ms"))
            show(f"round {number + 1}/{rounds}  {dtype}  {column.title:26s} {milliseconds:7.1f} ms/step  "
                 f"(other load {result['other_cores']:.2f} cores)")
    return runs


def measure_host(runner, columns, quick):
    warmup, steps = (5, 20) if quick else (30, 150)
    host = {}
    for world in (1,) if quick else (1, WORLD):
        host[str(world)] = {}
        for column in columns:
            summary = report.host_summary(runner.run(column, world, warmup, steps))
            host[str(world)][column.key] = summary
            show(f"host time, W={world}  {column.title:26s} {summary['total']:8.2f} us per unit  "
                 f"(other load {summary['other_cores']:.2f} cores)")
    return host


def machine():
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}


def update_readme(table, last_line):
    """Puts the result where README.md shows the latest one."""
    path = BENCH / "README.md"
    before, rest = path.read_text().split(RESULT_START)
    after = rest.split(RESULT_END)[1]
    path.write_text(f"{before}{RESULT_START}\n{table}\n```\n{last_line}\n```\n{RESULT_END}{after}")


def compare(arguments, shape, runner):
    started = time.monotonic()
    lists = {dtype: plan.training_columns(dtype, arguments.quick) for dtype in ("fp32", "bf16")}
    runs = measure_training(runner, lists, arguments.rounds, arguments.warmup, arguments.steps)
    host_columns = plan.host_columns(arguments.quick)
    host = measure_host(runner, host_columns, arguments.quick)
    tokens = WORLD * shape.batch_size * shape.seq_len
    training = {dtype: {key: report.summarise(runs_, tokens) for key, runs_ in by_key.items()} for dtype, by_key in runs.items()}
    values = report.ratios(training, host)
    problems = [problem for dtype in lists for problem in report.check_losses(dtype, lists[dtype], runs[dtype])]
    loads = [s["other_cores"] for by_key in (*training.values(), *host.values()) for s in by_key.values()]

    about = machine()
    parts = [f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}; W = {WORLD} processes of one thread; {arguments.rounds} "
             f"rounds of {arguments.steps} steps after {arguments.warmup}; dim {shape.dim}, {shape.n_layers} layers, "
             f"{shape.n_heads} heads, ffn {shape.ffn_dim}, vocabulary {shape.vocab_size}, sequence {shape.seq_len}, "
             f"batch {shape.batch_size} a rank."]
    parts += [report.training_table(dtype, lists[dtype], training[dtype]) for dtype in lists]
    if not arguments.quick:
        parts += [report.breakdown_table(training)]
    parts += [report.host_table(host_columns, host)]
    parts += [report.loss_table(dtype, lists[dtype], training[dtype]) for dtype in lists]
    parts += ["A small model and few steps: these figures mean nothing." if arguments.quick else report.target_lines(values)]
    if max(loads) > OTHER_CORES_LIMIT:
        parts.append(f"Other processes used up to {max(loads):.2f} cores during a run: repeat this on a quiet machine.")
    table = "\n\n".join(parts) + "\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(table)
    figures = {"machine": about, "shape": vars(shape), "ratios": values, "training": training, "host": host, "problems": problems}
    (arguments.out / "bench.json").write_text(json.dumps(figures, indent=1))
    if arguments.readme:
        update_readme(table, report.last_line(values))
    print("\n" + table)
    show(f"{time.monotonic() - started:.0f} s; all figures in {arguments.out}/bench.json, the table in {arguments.out}/table.md")
    for problem in problems:
        show(f"error: {problem}")
    print(report.last_line(values), flush=True)
    return 1 if problems else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="build folder")
    parser.add_argument("--out", type=pathlib.Path, default=BENCH / "out")
    parser.add_argument("--readme", action="store_true", help="also put the result into bench/README.md")
    parser.add_argument("--quick", action="store_true", default=os.environ.get("BENCH_QUICK", "0") not in ("", "0"),
                        help="a small model and few steps: only to see that it runs (BENCH_QUICK=1)")
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("BENCH_ROUNDS", "0")),
                        help="times that every side is started (BENCH_ROUNDS; default 3)")
    parser.add_argument("--steps", type=int, default=int(os.environ.get("BENCH_STEPS", "0")),
                        help="timed steps of one start (BENCH_STEPS; default 10)")
    parser.add_argument("--warmup", type=int, default=3)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    arguments.steps = arguments.steps or (3 if arguments.quick else 10)
    shape = Shape(dim=64, n_layers=2, n_heads=4, ffn_dim=176, vocab_size=512) if arguments.quick else Shape()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hp_bench_"))
    try:
        shared_inputs.write(folder, shape, WORLD)
        return compare(arguments, shape, Runner(arguments.build.resolve(), folder))
    except BenchError as error:
        show(f"error: {error}")
        return 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
