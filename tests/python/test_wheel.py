"""The wheel that pip builds: complete, and it runs from wherever pip puts it."""
import os
import pathlib
import subprocess
import sys
import zipfile

SOURCE = pathlib.Path(os.environ["HP_SOURCE"])
PACKAGE = SOURCE / "python" / "hyper_parallel"
PROGRAM = """
import pathlib, sys
import hyper_parallel
assert pathlib.Path(hyper_parallel.__file__).is_relative_to(sys.argv[1]), hyper_parallel.__file__
maps = pathlib.Path("/proc/self/maps").read_text()
libraries = ("libhyper_parallel.so", "hyper_parallel/_C.")
ours = {line.split()[-1] for line in maps.splitlines() if any(name in line for name in libraries)}
assert len(ours) == 2 and all(pathlib.Path(path).is_relative_to(sys.argv[1]) for path in ours), ours
import torch
print("torch", torch.__file__)
"""


def pip(*arguments, **environment):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *map(str, arguments)]
    result = subprocess.run(command, cwd=SOURCE, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1700)
    assert result.returncode == 0, result.stdout + result.stderr


def test_wheel(tmp_path):
    # In a folder that is kept, and with the compiler and the warnings of the build: ccache has everything then.
    settings = [f"build-dir={os.environ['HP_WHEEL_BUILD']}", f"cmake.define.CMAKE_CXX_COMPILER={os.environ['HP_CXX']}",
                "cmake.define.HP_WERROR=ON"]
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", tmp_path, *(f"-C{each}" for each in settings), ".")
    (wheel,) = tmp_path.glob("hyper_parallel-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        assert "Requires-Dist: torch==2.13.*" in archive.read(metadata).decode()
    files = [path for pattern in ("*.py", "*.pyi", "py.typed") for path in PACKAGE.rglob(pattern)]
    wanted = {f"hyper_parallel/{path.relative_to(PACKAGE)}" for path in files}
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert not [name for name in names if name.startswith(("src/", "tests/", "include/"))]

    target = tmp_path / "installed"
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    (tmp_path / "where.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = [[sys.executable, str(tmp_path / "where.py"), str(target)]]
    commands += [[*torchrun, str(SOURCE / "examples" / "python" / name)] for name in ("01_from_fsdp2.py", "02_hyper_parallel.py")]
    for command, text in zip(commands, ("torch", "loss", "loss")):
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert result.returncode == 0 and text in result.stdout, result.stdout + result.stderr
