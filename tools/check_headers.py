#!/usr/bin/env python3
"""Checks what our files include: module order, and how dear a header each may pull in (the tiers of HACKING.md).

check_headers.py                      include graph of the whole tree
check_headers.py --compile BUILD DIR  additionally compile every public header of BUILD's compile commands alone (module DIR, or all)
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PREFIX = "hyper_parallel/"

# A module may include those on lower levels and itself. Modules of one level do not know each other.
LEVELS = [
    ["core"],
    ["mesh"],
    ["comm"],
    ["dtensor"],
    ["fsdp"],
    ["plan", "optim"],
    ["ckpt"],
    ["nn", "python", "hf"],
    ["parallel", "state"],
    ["train"],
]
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}
EVERYTHING = len(LEVELS)  # apps, examples, tests, bench and the umbrella header may include any module

# Highest tier of external includes, for public headers and for everything in src/.
PUBLIC_TIER = {"core": 0, "mesh": 0, "comm": 1, "dtensor": 2, "fsdp": 2, "plan": 2, "optim": 2, "ckpt": 2, "hf": 2, "nn": 5, "parallel": 5, "state": 5, "train": 5}
SOURCE_TIER = {"core": 0, "mesh": 0, "comm": 4, "dtensor": 3, "fsdp": 3, "plan": 3, "optim": 3, "ckpt": 3, "hf": 3, "nn": 5, "parallel": 5, "state": 5, "train": 6}
# Arithmetic that must stay testable without torch, wherever its module stands.
TORCH_FREE = ["fsdp/group_layout", "dtensor/placement", "dtensor/layout",
              *("ckpt/" + name for name in ("safetensors", "safetensors_file", "safetensors_header", "safetensors_set", "crc32c", "file", "plan", "runs", "slabs", "staging")),
              *("hf/" + name for name in ("config", "tokenizer", "tokenizer_json", "tokenizer_impl", "bpe", "regex", "unicode"))]
# Public options structs may name dtypes and devices, which costs nothing.
CHEAP = {"c10/core/Device.h", "c10/core/DeviceType.h", "c10/core/ScalarType.h", "c10/util/Exception.h", "c10/util/intrusive_ptr.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def tier(header):
    """Tier of an external include, or None when it is none of torch's."""
    if header in CHEAP:
        return 1
    if header == "ATen/core/Tensor.h" or header in ("ATen/core/TensorBase.h", "ATen/core/grad_mode.h"):
        return 2
    if header.startswith("torch/csrc/distributed/"):
        return 4
    if header == "torch/torch.h" or header in ("torch/all.h", "torch/extension.h"):
        return 6
    if header.startswith(("torch/nn", "torch/optim", "torch/serialize", "torch/data", "torch/utils", "torch/types")):
        return 5
    if header in ("ATen/ATen.h", "ATen/Functions.h"):
        return 6
    if header.startswith(("ATen/", "c10/", "torch/csrc/autograd/", "torch/csrc/utils/", "torch/library", "torch/csrc/")):
        return 3
    return None


def module_of(path):
    """Module of one of our files, given relative to the root; "" for the umbrella header and the outer rings."""
    parts = path.parts
    if parts[0] == "include":
        return parts[2] if len(parts) > 3 else ""
    if parts[0] == "src":
        return parts[1]
    return ""


def allowed_tier(path, module):
    if not module:
        return 6
    stem = "/".join((module, path.name.split(".")[0]))
    if stem in TORCH_FREE:
        return 0
    table = PUBLIC_TIER if path.parts[0] == "include" else SOURCE_TIER
    return table.get(module, 6)


def included_module(header, path):
    """Module that a quoted or angled include of ours belongs to, or None when it is no file of ours."""
    if header.startswith(PREFIX):
        rest = header[len(PREFIX):].split("/")
        return rest[0] if len(rest) > 1 else ""
    if (ROOT / "src" / header).exists():
        return header.split("/")[0]
    if (ROOT / path.parent / header).exists():
        return module_of(path)
    return None


def check_file(path):
    problems = []
    text = (ROOT / path).read_text()
    module = module_of(path)
    level = LEVEL.get(module, EVERYTHING)
    limit = allowed_tier(path, module)
    public = path.parts[0] == "include"
    if public and "#pragma once" not in text:
        problems.append(f"{path}: no #pragma once")
    if path.parts[0] in ("include", "src") and module and module not in LEVEL:
        problems.append(f"{path}: module '{module}' is not in the order of tools/check_headers.py")
    for match in INCLUDE.finditer(text):
        header = match.group(2)
        line = text.count("\n", 0, match.start(2)) + 1
        where = f"{path}:{line}"
        target = included_module(header, path)
        if target is not None:
            if header.startswith(PREFIX) and not (ROOT / "include" / header).exists():
                problems.append(f"{where}: {header} does not exist")
            if target == "" and module:
                problems.append(f"{where}: {module} includes the umbrella header")
            elif target != module and LEVEL.get(target, -1) >= level:
                problems.append(f"{where}: {module} may not include {target} ({header})")
            elif public and not header.startswith(PREFIX):
                problems.append(f"{where}: a public header includes the private {header}")
            continue
        cost = tier(header)
        if cost is not None and cost > limit:
            problems.append(f"{where}: {header} is tier {cost}, {module} may use {limit} here")
        elif cost is None and public and module and match.group(1) == "<" and "/" in header:
            problems.append(f"{where}: a public header includes the third-party {header}")
    return problems


def check_installed(files):
    """Every public header outside train is in cmake/HpHeaders.cmake, and nothing else is."""
    listed = set(re.findall(r"\}/(include/\S+\.h)", (ROOT / "cmake" / "HpHeaders.cmake").read_text()))
    present = {str(path) for path in files if path.parts[0] == "include" and module_of(path) != "train"}
    return [f"{header}: not in cmake/HpHeaders.cmake, so it would not be installed" for header in sorted(present - listed)] + [
        f"cmake/HpHeaders.cmake: {header} does not exist" for header in sorted(listed - present)]


def our_files():
    suffixes = {".h", ".cpp", ".hpp", ".cc"}
    for top in ("include", "src", "apps", "examples", "tests", "bench"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in suffixes and "build" not in path.relative_to(ROOT).parts:
                yield path.relative_to(ROOT)


def library_flags(build):
    """Compiler and flags with which `build` compiles a source of the library."""
    with open(os.path.join(build, "compile_commands.json")) as commands:
        for entry in json.load(commands):
            if "/hyper_parallel.dir/" in entry.get("command", ""):
                words = shlex.split(entry["command"])
                if "ccache" in os.path.basename(words[0]) or os.path.basename(words[1]).endswith(("c++", "g++", "clang++")):
                    words = words[1:]
                keep = [words[0]]
                skip = False
                for word in words[1:]:
                    if skip:
                        skip = False
                    elif word in ("-o", "-c", "-MF", "-MT"):
                        skip = True
                    elif word not in ("-MD", "-O3", "-O2") and not word.endswith(".cpp"):
                        keep.append(word)
                return keep
    raise SystemExit(f"no source of the library in {build}/compile_commands.json")


def compile_alone(flags, header):
    result = subprocess.run(flags + ["-fsyntax-only", "-x", "c++", "-"], input=f"#include <{header}>\n#include <{header}>\n",
                            capture_output=True, text=True)
    return [] if result.returncode == 0 else [f"{header} does not compile alone:\n{result.stderr[:3000]}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", metavar="BUILD")
    parser.add_argument("module", nargs="?")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()

    files = list(our_files())
    problems = [problem for path in files for problem in check_file(path)] + check_installed(files)
    compiled = 0
    if options.compile:
        flags = library_flags(options.compile)
        headers = [str(path.relative_to("include")) for path in files
                   if path.parts[0] == "include" and options.module in (None, module_of(path))]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for found in pool.map(lambda header: compile_alone(flags, header), headers):
                problems += found
        compiled = len(headers)
    for problem in problems:
        print(problem)
    print(f"check_headers: {len(files)} files, {compiled} public headers compiled alone, {len(problems)} problems")
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
