#!/usr/bin/env python3
"""Checks README.md, HACKING.md and docs/: links and anchors exist, named make targets exist, marked C++ blocks are programs that the tests build.

check_docs.py                  check
check_docs.py --extract DIR    also write the C++ blocks of README.md and docs/guide to DIR as sources; prints their names

Every ```cpp block of README.md and docs/guide is compiled by a test. One that shows only a part of a program starts its fence with
```cpp fragment and is compiled inside a function, after the includes that every block gets.
"""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
PROLOGUE = "#include <torch/torch.h>\n\n#include <hyper_parallel/hyper_parallel.h>\n\n"


def documents():
    top = [ROOT / name for name in ("README.md", "HACKING.md", "CHANGELOG.md")]
    return [path for path in top if path.exists()] + sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "bench").glob("*.md"))


def compiled_documents():
    return [ROOT / "README.md"] + sorted((ROOT / "docs" / "guide").glob("*.md"))


def anchor(heading):
    text = re.sub(r"[`*]", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def make_targets():
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z_-]*):", text, re.MULTILINE))


def without_fences(text):
    return FENCE.sub("", text)


def check(path, targets):
    problems = []
    text = path.read_text()
    name = path.relative_to(ROOT)
    for link in LINK.findall(without_fences(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (path.parent / file) if file else path
        if not target.exists():
            problems.append(f"{name}: link to {link}, which does not exist")
        elif fragment and target.suffix == ".md" and fragment not in {anchor(h) for h in HEADING.findall(without_fences(target.read_text()))}:
            problems.append(f"{name}: no heading for {link}")
    for language, _, body in FENCE.findall(text):
        if language in ("sh", "bash", "console"):
            for line in body.splitlines():
                command = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*make ((?:[A-Za-z_]+=\S+ )*)([a-z][a-z_-]*)", line)
                if command and command.group(2) not in targets:
                    problems.append(f"{name}: make {command.group(2)} is no target of the Makefile")
    if "<!-- OUTPUT" in text:
        problems.append(f"{name}: an output is still to be filled in")
    return problems


def program(kind, body):
    if kind.strip() == "fragment":
        return PROLOGUE + "namespace hp = hyper_parallel;\n\nvoid fragment();\nvoid fragment() {\n" + body + "}\n"
    return body if "#include <torch/torch.h>" in body else PROLOGUE + body


def extract(directory):
    """Writes the blocks; a file is touched only when its text changes, so that nothing is compiled twice."""
    directory.mkdir(parents=True, exist_ok=True)
    names = []
    for path in compiled_documents():
        if not path.exists():
            continue
        blocks = [(kind, body) for language, kind, body in FENCE.findall(path.read_text()) if language == "cpp"]
        for index, (kind, body) in enumerate(blocks, start=1):
            source = directory / f"{re.sub('[^a-z0-9]', '_', path.stem.lower())}_{index}.cpp"
            text = f"// From {path.relative_to(ROOT)}\n{program(kind, body)}"
            if not source.exists() or source.read_text() != text:
                source.write_text(text)
            names.append(str(source))
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extract", type=pathlib.Path, metavar="DIR")
    options = parser.parse_args()
    if options.extract:
        print(";".join(extract(options.extract)), end="")
        return 0
    targets = make_targets()
    files = documents()
    problems = [problem for path in files for problem in check(path, targets)]
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(files)} documents, {len(problems)} problems")
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
