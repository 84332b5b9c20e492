"""From the runs' figures to the table, the JSON file and the last line."""
import statistics

from columns import DDP, GLOO, LIMIT, OURS, REFERENCE

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative; the two sides sum gradients in different orders
LOSS_STEPS = 5
MEDIANS = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
MEANS = ("sent_mb_per_step", "faults_per_step", "system_ms_per_step", "user_ms_per_step", "start_mib")
TARGETS = {"fp32": (">=", 1.4), "bf16": (">=", 1.7), "host": ("<=", 0.05), "memory": ("<=", 0.8), "ddp": ("<=", 1.05),
           "samehost_fp32": (">=", 1.7), "samehost_bf16": (">=", 2.3), "limit_fp32": ("<=", 1.05), "limit_bf16": ("<=", 1.12),
           "dense_memory": ("<=", 0.75), "host_2": ("<=", 10.0)}


def step_means(run, key):
    """One number per step: the mean over the ranks, which wait for each other in every step."""
    return [statistics.fmean(values) for values in zip(*(rank[key] for rank in run["ranks"]))]


def summarise(runs, tokens_per_step):
    """Medians over the steps of all rounds."""
    median = {key: statistics.median(x for run in runs for x in step_means(run, key)) for key in MEDIANS}
    ranks = [rank for run in runs for rank in run["ranks"]]
    mean = {key: statistics.fmean(rank[key] for rank in ranks) for key in MEANS}
    if "counted_mb_per_step" in ranks[0]:
        mean["counted_mb_per_step"] = statistics.fmean(rank["counted_mb_per_step"] for rank in ranks)
        mean["mapped_mb_per_step"] = statistics.fmean(rank["mapped_mb_per_step"] for rank in ranks)
        mean["engine_mib"] = ranks[0]["engine_mib"]
    return median | mean | {
        "round_step_ms": [statistics.median(step_means(run, "step_ms")) for run in runs],
        "tokens_per_s": tokens_per_step / median["step_ms"] * 1e3,
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        "pss_mib": statistics.fmean(sum(rank["pss_mib"] for rank in run["ranks"]) for run in runs),
        "setup_peak_mib": max(rank["setup_peak_mib"] for rank in ranks),
        "loss": step_means(runs[0], "loss"),
        "other_cores": max(run["other_cores"] for run in runs),
    }


def check_losses(dtype, columns, runs):
    """Names what differs: a column from the reference, or one of our runs from its repetition."""
    problems = []
    reference = step_means(runs[REFERENCE][0], "loss")
    for column in columns:
        steps = LOSS_STEPS if column.loss_steps is None else column.loss_steps
        for run in runs[column.key]:
            losses = step_means(run, "loss")
            for step, (got, want) in enumerate(zip(losses[:steps], reference)):
                if not abs(got - want) <= LOSS_TOLERANCE[dtype] * abs(want):
                    problems.append(f"{dtype}, {column.title}, step {step + 1}: loss {got:.6f}, the reference's {want:.6f}")
            if column.side == "ours" and losses != step_means(runs[column.key][0], "loss"):
                problems.append(f"{dtype}, {column.title}: losses differ between two equal runs")
    return problems


def host_summary(run):
    """Microseconds per unit: the wrapped loop less the plain one, of the slowest rank."""
    def net(rank, part):
        return statistics.median(rank[part + "_us"]) - statistics.median(rank["plain_" + part + "_us"])
    parts = {part: max(net(rank, part) for rank in run["ranks"]) for part in ("forward", "backward")}
    first = run["ranks"][0]
    plain = {"plain_" + part: statistics.median(first["plain_" + part + "_us"]) for part in ("forward", "backward")}
    return parts | plain | {"total": parts["forward"] + parts["backward"], "other_cores": run["other_cores"]}


def ratios(training, host):
    """Ours over FSDP2's: speed (more is better), host time and memory (less is better). limit: our step time over the one without
    any communication; dense_memory: what all ranks occupy together, each page once, over what they do on the Gloo path. host_2 is
    no ratio: microseconds, W=2."""
    speed = {dtype: columns[REFERENCE]["step_ms"] / columns[OURS]["step_ms"] for dtype, columns in training.items()}
    fp32 = training["fp32"]
    return speed | {
        # Timing noise can make the net time negative; that is no time, not a gain.
        "host": max(host["1"][OURS]["total"], 0.0) / host["1"][REFERENCE]["total"],
        "memory": fp32[OURS]["peak_mib"] / fp32[REFERENCE]["peak_mib"],
        "ddp": fp32[OURS]["step_ms"] / fp32[DDP]["step_ms"],
        **{f"samehost_{dtype}": value for dtype, value in speed.items()},
        **{f"limit_{dtype}": columns[OURS]["step_ms"] / columns[LIMIT]["step_ms"] for dtype, columns in training.items()},
        "dense_memory": fp32[OURS]["pss_mib"] / fp32[GLOO]["pss_mib"],
        **{f"host_{world}": summary[OURS]["total"] for world, summary in host.items() if world != "1"},
    }


def markdown(rows):
    head, *body = [[str(cell) for cell in row] for row in rows]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)] + body
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    padded = [[line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def training_table(dtype, columns, summary):
    reference = summary[REFERENCE]
    rows = [[dtype, "ms/step", "by round", "tokens/s", "speed", "forward", "backward", "optimizer", "system ms", "faults", "sent MB",
             "mapped MB", "peak MiB", "PSS MiB"]]
    for column in columns:
        s = summary[column.key]
        by_round = " ".join(f"{x:.0f}" for x in s["round_step_ms"])
        whole = ("forward_ms", "backward_ms", "optimizer_ms", "system_ms_per_step", "faults_per_step")
        rows.append([column.title, f"{s['step_ms']:.0f}", by_round, f"{s['tokens_per_s']:.0f}",
                     f"{reference['step_ms'] / s['step_ms']:.2f}", *(f"{s[key]:.0f}" for key in whole),
                     f"{s['sent_mb_per_step']:.1f}", f"{s.get('mapped_mb_per_step', 0):.1f}", f"{s['peak_mib']:.0f}",
                     f"{s['pss_mib']:.0f}"])
    return markdown(rows)


def breakdown_table(training):
    """What our step consists of: the limit, what the engine adds when nothing is sent, and what sending adds to that."""
    rows = [["where our step goes, ms", "step", "compute and optimizer", "engine and its copies", "messages and waiting",
             "FSDP2 above the limit"]]
    for dtype, summary in training.items():
        ours, faked, limit = (summary[key]["step_ms"] for key in (OURS, "ours-faked-peers", LIMIT))
        rows.append([dtype] + [f"{x:.0f}" for x in (ours, limit, faked - limit, ours - faked, summary[REFERENCE]["step_ms"] - limit)])
    return markdown(rows)


def loss_table(dtype, columns, summary):
    steps = min(LOSS_STEPS, min(len(s["loss"]) for s in summary.values()))
    rows = [[f"loss, {dtype}"] + [f"step {i + 1}" for i in range(steps)]]
    for column in columns:
        if column.loss_steps != 0:
            rows.append([column.title] + [f"{x:.6f}" for x in summary[column.key]["loss"][:steps]])
    return markdown(rows)


def host_table(columns, host):
    rows = [["host time, us per tiny unit", "W", "forward", "backward", "sum", "over FSDP2"]]
    for world, summary in host.items():
        for column in columns:
            s = summary[column.key]
            rows.append([column.title, world, *(f"{s[key]:.2f}" for key in ("forward", "backward", "total")),
                         f"{s['total'] / summary[REFERENCE]['total']:.4f}"])
    return markdown(rows)


def target_lines(values):
    names = {"fp32": "fp32, our speed over FSDP2's", "bf16": "bf16, our speed over FSDP2's", "host": "host time over FSDP2's, W=1",
             "memory": "peak memory over FSDP2's", "ddp": "fp32, our step time over DDP's",
             "samehost_fp32": "fp32, our speed with shared memory over FSDP2's", "samehost_bf16": "bf16, the same",
             "limit_fp32": "fp32, our step time over that without communication", "limit_bf16": "bf16, the same",
             "dense_memory": "memory of all ranks (PSS) over that of the Gloo path",
             "host_2": "host time for a tiny unit, us, W=2"}
    lines = []
    for key, (relation, limit) in TARGETS.items():
        met = values[key] >= limit if relation == ">=" else values[key] <= limit
        lines.append(f"- {names[key]}: {values[key]:.3f}, wanted {relation} {limit}: {'met' if met else 'NOT MET'}")
    return "\n".join(lines)


def last_line(values):
    line = f"BENCH fp32={values['fp32']:.2f} bf16={values['bf16']:.2f} host={values['host']:.4f} memory={values['memory']:.2f}"
    more = ("samehost_fp32", "samehost_bf16", "limit_fp32", "limit_bf16", "dense_memory")
    return " ".join([line] + [f"{key}={values[key]:.2f}" for key in more])
