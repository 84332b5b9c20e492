"""Annotations of the package and of the examples, and the stub of the built module."""
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
SOURCE = pathlib.Path(os.environ["HP_SOURCE"])


def run(*command):
    result = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=SOURCE, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_package_and_examples():
    # What mypy learned of torch is kept in the build tree.
    cache = os.environ.get("HP_MYPY_CACHE", os.devnull)
    examples = sorted((SOURCE / "examples" / "python").glob("*.py"))
    out = run("mypy", "--cache-dir", cache, SOURCE / "python" / "hyper_parallel", *examples)
    assert "no issues found" in out


def test_stub_of_the_built_module():
    out = run("mypy.stubtest", "hyper_parallel._C", "--mypy-config-file", HERE / "stubtest.ini",
              "--allowlist", HERE / "stubtest_allowed.txt")
    assert "no issues found in 1 module" in out
