#!/usr/bin/env python3
"""Checks README.md, HACKING.md and docs/: links and anchors exist, named make targets exist, marked C++ blocks are programs that the tests build,
the tests that a table of docs/reference names exist, and docs/guide/hp_train.md names every setting.

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


def test_sources():
    """Text of the sources of each test program, by its name without _test, and of the files of pytest."""
    sources = {}
    for lists in sorted((ROOT / "tests").glob("*/CMakeLists.txt")):
        for name, arguments in re.findall(r"hp_add_test\((\w+)_test\b([^)]*)\)", lists.read_text()):
            files = re.search(r"\bSOURCES((?: +[\w/.]+\.cpp)+)", arguments)
            sources[name] = "".join((lists.parent / file).read_text() for file in files.group(1).split()) if files else ""
    for file in (ROOT / "tests" / "python").glob("test_*.py"):
        sources[file.stem] = file.read_text()
    return sources


def test_exists(pattern, text):
    """A pattern is Suite.Name or Name, with * or … for what is left out; parts of generated names are literals of the source."""
    regex = re.compile("".join(".*" if part in "*…" else re.escape(part) for part in re.split(r"([*…])", pattern) if part))
    tests = re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", text, re.MULTILINE)
    tests += [("", name) for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)]
    if "." in pattern:
        return any(regex.fullmatch(f"{suite}.{name}") for suite, name in tests)
    return any(regex.fullmatch(name) for _, name in tests) or any(regex.fullmatch(word) for word in re.findall(r'"(\w+)"', text))


def missing_tests(cell, short, sources):
    """What a cell names and the tests do not have. It holds, between semicolons, programs as `name` or *abbreviation*, and behind
    them the tests that each of them has."""
    missing = []
    for part in cell.split(";"):
        programs, tests_follow = [], False
        for abbreviation, word in re.findall(r"\*(\w+)\*|`([^`]+)`", part):
            program = short.get(abbreviation) if abbreviation else word
            if program in sources or (ROOT / "tests" / str(program)).is_dir():
                programs, tests_follow = ([] if tests_follow else programs) + [program], False
            elif abbreviation:
                missing.append(f"*{abbreviation}* stands for no test program")
            else:
                tests_follow = True
                missing += [f"no test {word} in {each}" for each in programs if not test_exists(word, sources.get(each, ""))]
                if not programs:
                    missing.append(f"{word} is no test program")
    return missing


def check_named_tests(path, sources):
    """Every test exists that a column headed "test" names."""
    name, text = path.relative_to(ROOT), path.read_text()
    short = dict(re.findall(r"\*(\w+)\* =\s+`(\w+)`", text))
    problems, column = [], None
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if not cells or set(cells[0]) <= set("-: "):
            column = column if cells else None
            continue
        if column is None:
            column = cells.index("test") if "test" in cells else -1
            continue
        if column < 0:
            continue
        if not cells[column]:
            problems.append(f"{name}:{number}: no test is named")
        problems += [f"{name}:{number}: {what}" for what in missing_tests(cells[column], short, sources)]
    return problems


def check_settings():
    """Every key of hp-train's configuration is in its guide."""
    keys = re.findall(r'\{\s*"(\w+)",\s*"(\w+)",\s*&', (ROOT / "src/train/config_fields.cpp").read_text())
    guide = (ROOT / "docs/guide/hp_train.md").read_text()
    missing = [f"docs/guide/hp_train.md: {section}.{key} is missing" for section, key in keys if f"`{key}`" not in guide]
    return missing if keys else ["src/train/config_fields.cpp: no settings found"]


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
    sources = test_sources()
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        problems += check_named_tests(path, sources)
    problems += check_settings()
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(files)} documents, {len(problems)} problems")
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
