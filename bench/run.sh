#!/usr/bin/env bash
# `make bench`. BENCH_ROUNDS, BENCH_STEPS: how long; BENCH_QUICK=1: one round of a few steps, to see that it runs. BUILD: the build folder.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "$root/.venv/bin/python" "$root/bench/run.py" --build "$root/${BUILD:-build}" "$@"
