#!/usr/bin/env python3
"""Checks the layout of our C++ files with clang-format 14, and that no file is longer than 500 lines. --fix formats them."""
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_LINES = 500
SOURCES = {".h", ".cpp"}
COUNTED = SOURCES | {".py", ".sh", ".cmake"}


def our_files():
    folders = ("include", "src", "apps", "examples", "tests", "bench", "python", "cmake", "tools")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and "build" not in path.parts]


def main():
    formatter = shutil.which("clang-format-14")
    if not formatter:
        print("check_format: clang-format-14 is not installed (tools/setup.sh installs it)")
        return 1
    files = our_files()
    sources = [path for path in files if path.suffix in SOURCES]
    if "--fix" in sys.argv[1:]:
        subprocess.run([formatter, "-i", *sources], check=True)
    problems = []
    for path in files:
        if path.suffix in COUNTED:
            lines = path.read_bytes().count(b"\n")
            if lines > MAX_LINES:
                problems.append(f"{path.relative_to(ROOT)}: {lines} lines, want at most {MAX_LINES}")
    for path in sources:
        formatted = subprocess.run([formatter, path], capture_output=True, check=True).stdout
        if formatted != path.read_bytes():
            problems.append(f"{path.relative_to(ROOT)}: not formatted (make format)")
    for problem in problems:
        print(problem)
    print(f"check_format: {len(sources)} sources, {len(problems)} problems")
    return 1 if problems or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
