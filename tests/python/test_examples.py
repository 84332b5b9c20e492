"""The programs in examples/python, as their first lines say how to run them."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(os.environ["HP_SOURCE"]) / "examples" / "python").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    ranks = re.search(r"--nproc-per-node[= ](\d+)", example.read_text())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks.group(1)}", str(example)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"loss \d+\.\d+ -> \d+\.\d+", result.stdout), result.stdout
