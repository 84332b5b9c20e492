"""The same script with both imports, on the same ranks, step by step."""
import torch
import torch.distributed.fsdp as theirs

import hyper_parallel.fsdp as ours
from ranks import run_ranks


def check_steps(got, want, atol, rtol):
    assert len(got) == len(want)
    for step, (a, b) in enumerate(zip(got, want)):
        assert a.keys() == b.keys(), f"step {step}: {sorted(a.keys() ^ b.keys())}"
        for name in b:
            if b[name] is None or a[name] is None:
                assert (a[name] is None) == (b[name] is None), f"step {step}, {name}: {a[name]}, want {b[name]}"
                continue
            assert a[name].dtype == b[name].dtype, f"step {step}, {name}: {a[name].dtype}, want {b[name].dtype}"
            message = lambda text: f"step {step}, {name}: {text}"  # noqa: B023
            torch.testing.assert_close(a[name], b[name], atol=atol, rtol=rtol, msg=message)


def both(rank, world, script, options, atol, rtol):
    want = script(theirs, rank, world, **options)
    got = script(ours, rank, world, **options)
    assert got, "the script recorded nothing"
    check_steps(got, want, atol, rtol)
    return len(got)


def compare(world, script, atol=1e-5, rtol=1e-5, **options):
    steps = run_ranks(world, both, script, options, atol, rtol)
    assert all(n > 0 for n in steps)
