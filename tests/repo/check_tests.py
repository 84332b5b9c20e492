#!/usr/bin/env python3
"""check_tests.py CTEST BUILD: every registered test has one of our labels and a timeout."""
import json
import subprocess
import sys

LABELS = {"unit", "dist", "proc", "golden", "slow"}


def main():
    ctest, build = sys.argv[1:]
    listing = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    tests = json.loads(listing.stdout)["tests"]
    problems = []
    for test in tests:
        properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
        labels = set(properties.get("LABELS", []))
        if not labels & LABELS:
            problems.append(f"{test['name']}: labels {sorted(labels)}, want one of {sorted(LABELS)}")
        if not properties.get("TIMEOUT"):
            problems.append(f"{test['name']}: no timeout")
        if "command" not in test:
            problems.append(f"{test['name']}: its program is not built")
    for problem in problems:
        print(problem)
    print(f"check_tests: {len(tests)} tests, {len(problems)} problems")
    return 1 if problems or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
