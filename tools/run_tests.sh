#!/usr/bin/env bash
# run_tests.sh BUILD [ctest arguments]: runs the tests and ends with one line that says how they went.
set -uo pipefail
build=$1
shift
start=$(date +%s)
log=$build/Testing/last_run.txt
mkdir -p "$build/Testing"
ctest --test-dir "$build" --output-on-failure --no-tests=error "$@" </dev/null 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
awk -v seconds=$(($(date +%s) - start)) -v status="$status" '
  $1 ~ /^[0-9]+\/[0-9]+$/ && $2 == "Test" {
    total++
    if ($0 ~ / Passed +[0-9.]+ sec/) passed++
    else if ($0 ~ /\*\*\*Skipped/) skipped++
  }
  END { printf "TEST %s passed=%d failed=%d skipped=%d seconds=%d\n", status == 0 ? "ok" : "FAILED", passed, total - passed - skipped, skipped, seconds }
' "$log"
exit "$status"
