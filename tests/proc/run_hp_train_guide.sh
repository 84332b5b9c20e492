#!/usr/bin/env bash
# Runs each line of the shell blocks of docs/guide/hp_train.md against the build folder $1, for a few steps on a small text.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=$1
work=$build/guide_test
mkdir -p "$work"
for i in $(seq 1 2000); do echo "line $i of a text for the guide"; done >"$work/text.txt"
mapfile -t commands < <(sed -n '/^```sh$/,/^```$/p' docs/guide/hp_train.md | grep -v '^```')
[ ${#commands[@]} -ge 2 ] || { echo "found ${#commands[@]} commands in the guide, want at least 2"; exit 1; }
for command in "${commands[@]}"; do
  echo "\$ $command"
  rm -f "$work/run/result.txt"
  bash -euc "${command//build\/bin/$build/bin} --train.max_steps=3 --data.path=$work/text.txt --log.dir=$work --log.name=run \
    --train.eval_windows=2 --sample.tokens=3" </dev/null
  grep -q '^world=[124] val_loss_start=' "$work/run/result.txt"
done
