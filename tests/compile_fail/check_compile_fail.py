#!/usr/bin/env python3
"""check_compile_fail.py BUILD CASE.cpp: CASE compiles as it is, and with -DHP_MISTAKE fails with the error named on its first line.

The first line of a case reads `// want: <regular expression>`; it is searched in the compiler's `error:` lines only.
"""
import json
import os
import re
import shlex
import subprocess
import sys


def compile_command(build, case):
    with open(os.path.join(build, "compile_commands.json")) as commands:
        for entry in json.load(commands):
            if os.path.samefile(entry["file"], case):
                words = shlex.split(entry["command"])
                break
        else:
            raise SystemExit(f"{case} is not in {build}/compile_commands.json")
    # A launcher such as ccache stands before the compiler.
    start = next(i for i, word in enumerate(words) if word == "-c" or word.startswith("-"))
    compiler, flags = words[start - 1], words[start:]
    kept, skip = [], False
    for word in flags:
        if skip:
            skip = False
        elif word in ("-o", "-MF", "-MT"):
            skip = True
        elif word not in ("-c", "-MD", "-fpch-preprocess"):
            kept.append(word)
    return [compiler, *kept, "-fsyntax-only"], entry["directory"]


def run(command, directory):
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})


def main():
    build, case = sys.argv[1:]
    with open(case) as source:
        first = source.readline()
    if not first.startswith("// want: "):
        raise SystemExit(f"{case}: the first line must be '// want: <regular expression>'")
    want = first[len("// want: "):].strip()
    command, directory = compile_command(build, case)

    control = run(command, directory)
    if control.returncode != 0:
        raise SystemExit(f"the control of {case} does not compile:\n{control.stderr[:4000]}")
    mistake = run([*command, "-DHP_MISTAKE"], directory)
    if mistake.returncode == 0:
        raise SystemExit(f"{case} compiles with the mistake in it")
    errors = [line for line in mistake.stderr.splitlines() if "error:" in line]
    if not any(re.search(want, line) for line in errors):
        raise SystemExit(f"{case} fails to compile, but no error matches '{want}':\n" + "\n".join(errors[:20]))
    print(f"{os.path.basename(case)}: fails with '{want}', as it must")


if __name__ == "__main__":
    main()
