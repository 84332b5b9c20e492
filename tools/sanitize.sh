#!/usr/bin/env bash
# sanitize.sh asan|tsan [ctest arguments]: builds the tests that run under these sanitizers, and runs them. See HACKING.md.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift

comm="comm_reduce comm_rows comm_collectives comm_failure comm_samehost fsdp_map"
case $preset in
  asan)
    tests="$comm mesh_groups fsdp_equivalence fsdp_switches fsdp_changes fsdp_options fsdp_contract fsdp_field fsdp_meta fsdp_load
      fsdp_convert nn_hooks nn_checkpoint optim optim_flat optim_clip optim_muon optim_scaler optim_schedule optim_ema"
    ;;
  tsan) tests="$comm fsdp_switches nn_hooks" ;;
  *)
    echo "sanitize.sh: unknown preset '$preset', want asan or tsan" >&2
    exit 2
    ;;
esac

cmake --preset "$preset" --log-level=WARNING
# shellcheck disable=SC2086
cmake --build --preset "$preset" -j "${JOBS:-$(tools/jobs.sh)}" --target $(printf '%s_test ' $tests)
# Also the runs of the same programs over Gloo and between processes.
ctest --preset "$preset" --no-tests=error -R "^($(printf '%s|' $tests | sed 's/|$//'))(_gloo|_processes)?_test\$" "$@"
