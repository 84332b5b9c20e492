"""What pip builds: complete, with the torch of the python that installs it, and it runs from wherever pip puts it."""
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
    # In a folder that is kept, and with the compiler and the warnings of the build: ccache has everything then.
    settings = [f"build-dir={os.environ['HP_WHEEL_BUILD']}", f"cmake.define.CMAKE_CXX_COMPILER={os.environ['HP_CXX']}",
                "cmake.define.HP_WERROR=ON"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *map(str, arguments),
               "--no-build-isolation", "--no-deps", "--no-index", *(f"--config-settings={each}" for each in settings), "."]
    result = subprocess.run(command, cwd=SOURCE, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1700)
    assert result.returncode == 0, result.stdout + result.stderr


def test_wheel(tmp_path):
    pip("wheel", "--wheel-dir", tmp_path)
    (wheel,) = tmp_path.glob("hyper_parallel-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        assert "Requires-Dist: torch==2.13.*" in archive.read(metadata).decode()
    files = [path for pattern in ("*.py", "*.pyi", "py.typed") for path in PACKAGE.rglob(pattern)]
    wanted = {f"hyper_parallel/{path.relative_to(PACKAGE)}" for path in files}
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert not [name for name in names if name.startswith(("src/", "tests/", "include/"))]


def test_installed_from_the_source_folder(tmp_path):
    target = tmp_path / "installed"
    pip("install", "--target", target)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    (tmp_path / "where.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = [[sys.executable, str(tmp_path / "where.py"), str(target)]]
    commands += [[*torchrun, str(SOURCE / "examples" / "python" / name)] for name in ("01_from_fsdp2.py", "02_hyper_parallel.py")]
    for command, text in zip(commands, ("torch", "loss", "loss")):
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert result.returncode == 0 and text in result.stdout, result.stdout + result.stderr


def configured(folder, python, **environment):
    """What CMake says that looks for torch as in a build of pip's."""
    folder.mkdir()
    lines = ["cmake_minimum_required(VERSION 3.25)", "project(probe LANGUAGES CXX)", "set(HP_TORCH_HINTS /nowhere)",
             f"include({SOURCE}/cmake/HpTorch.cmake)", 'message(STATUS "found ${HP_TORCH_FOLDER}")']
    (folder / "CMakeLists.txt").write_text("\n".join(lines))
    command = [os.environ["HP_CMAKE"], "-S", folder, "-B", folder / "build", "-DSKBUILD=2",
               "-DSKBUILD_PROJECT_NAME=hyper_parallel", f"-DPython_EXECUTABLE={python}",
               f"-DCMAKE_CXX_COMPILER={os.environ['HP_CXX']}"]
    kept = {name: value for name, value in os.environ.items() if name not in ("HP_TORCH", "PYTHONPATH")}
    result = subprocess.run([*map(str, command)], env={**kept, **environment}, capture_output=True, text=True, timeout=120)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_torch_is_that_of_the_python_that_installs(tmp_path):
    import torch

    mine = str(pathlib.Path(torch.__file__).parent)
    # What pip's isolated build does to the python.
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    hide = "import sys\nsys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
    (hiding / "sitecustomize.py").write_text(hide)
    hidden = {"PYTHONPATH": str(hiding), "PYTHONNOUSERSITE": "1"}
    found = subprocess.run([sys.executable, "-c", "import torch"], env={**os.environ, **hidden}, capture_output=True)
    assert found.returncode != 0, "torch is not hidden: this tests nothing"
    code, text = configured(tmp_path / "isolated", sys.executable, **hidden)
    assert code == 0 and f"found {mine}" in text, text

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = tmp_path / "bare" / "bin" / "python"
    code, text = configured(tmp_path / "none", bare)
    assert code != 0 and f"needs torch 2.13 where pip installs it, and {bare} has none. Install torch there first" in text, text
    old = tmp_path / "old" / "torch"
    (old / "share" / "cmake" / "Torch").mkdir(parents=True)
    files = {"share/cmake/Torch/TorchConfig.cmake": "", "__init__.py": "", "version.py": "__version__ = '2.12.1+cpu'\n"}
    for name, content in files.items():
        (old / name).write_text(content)
    code, text = configured(tmp_path / "other", bare, PYTHONPATH=str(old.parent))
    assert code != 0 and f"has 2.12.1+cpu in {old}" in text, text
    code, text = configured(tmp_path / "said", bare, HP_TORCH=sys.executable)
    assert code == 0 and f"found {mine}" in text, text
