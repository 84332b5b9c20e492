"""Annotations of the package and of the examples, the stub of the built module, and what every public name says of itself."""
import inspect
import os
import pathlib
import subprocess
import sys

import hyper_parallel
import hyper_parallel.fsdp

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


def undocumented(name, value):
    """Names of ours without a docstring of their own: dataclasses write one, and methods inherit theirs."""
    if not (getattr(value, "__module__", None) or "").startswith("hyper_parallel") and not inspect.ismodule(value):
        return
    text = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    if not text.strip() or text.startswith(f"{name.split('.')[-1]}("):
        yield name
    if inspect.isclass(value):
        for member, each in vars(value).items():
            function = each.fget if isinstance(each, property) else each
            if not member.startswith("_") and inspect.isroutine(function) and not (function.__doc__ or "").strip():
                yield f"{name}.{member}"


def test_public_names_have_docstrings():
    modules = [hyper_parallel, hyper_parallel.fsdp, hyper_parallel.optim, hyper_parallel.trace]
    names = [(f"{module.__name__}.{name}", getattr(module, name)) for module in modules for name in module.__all__]
    assert len(names) > 60
    missing = {each for name, value in names for each in undocumented(name, value)}
    assert not missing, sorted(missing)
