"""The same script with both imports, on the same ranks, step by step."""
import torch
import torch.distributed.fsdp as theirs

import hyper_parallel.fsdp as ours
from ranks import run_ranks


# Both have given equal bits at W = 1, 2, 4. A gradient that is rounded to bf16 once more differs by a thousand times this bound;
# fp32 sums of four ranks in another order stay below it.
EQUAL = {"atol": 0.0, "rtol": 1e-6, "of_largest": 1e-6}
BF16 = {"dtype": torch.bfloat16, **EQUAL}


def check_steps(got, want, atol, rtol, of_largest=0.0):
    """:param of_largest: allowed difference, as a part of the largest value of a tensor"""
    assert len(got) == len(want)
    for step, (a, b) in enumerate(zip(got, want)):
        assert a.keys() == b.keys(), f"step {step}: {sorted(a.keys() ^ b.keys())}"
        for name in b:
            if b[name] is None or a[name] is None:
                assert (a[name] is None) == (b[name] is None), f"step {step}, {name}: {a[name]}, want {b[name]}"
                continue
            assert a[name].dtype == b[name].dtype, f"step {step}, {name}: {a[name].dtype}, want {b[name].dtype}"
            message = lambda text: f"step {step}, {name}: {text}"  # noqa: B023
            allowed = atol + (of_largest * b[name].abs().max().item() if b[name].is_floating_point() else 0.0)
            torch.testing.assert_close(a[name], b[name], atol=allowed, rtol=rtol, msg=message)


def both(rank, world, script, options, *tolerance):
    want = script(theirs, rank, world, **options)
    got = script(ours, rank, world, **options)
    assert got, "the script recorded nothing"
    check_steps(got, want, *tolerance)
    return len(got)


def compare(world, script, atol=1e-5, rtol=1e-5, of_largest=0.0, **options):
    steps = run_ranks(world, both, script, options, atol, rtol, of_largest)
    assert all(n > 0 for n in steps)
