"""Programs end cleanly, whether they take their process group down or not."""
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("exit_program.py")


@pytest.mark.parametrize("arguments", [[], ["destroy"]])
def test_programs_end_cleanly(arguments):
    for _ in range(3):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.count("trained") == 2
