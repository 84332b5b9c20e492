#!/usr/bin/env bash
# Brings a Debian or Ubuntu machine to the point where this repository builds: system packages, a virtual environment in .venv, torch.
# Does only what is missing and says how long each part takes.
#
#   HP_TORCH=<path>    use a torch that is already there: a python that can import it, its site-packages, or its torch folder
#   HP_PYTHON=<python> interpreter for .venv (default: python3)
#   HP_SKIP_APT=1      leave the system packages to you
set -euo pipefail

readonly torch_version=2.13.0
readonly cmake_minimum=3.25
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root venv=$root/.venv

# Without one of these the build or the tests fail.
readonly required=(
  g++ make git ninja-build pkg-config
  libgloo-dev nlohmann-json3-dev libspdlog-dev libfmt-dev libcli11-dev libtomlplusplus-dev
  libonig-dev libutf8proc-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  bible-kjv
)
# Quicker builds and the format check; not every release has them.
readonly wanted=(ccache clang-format-14)

say() { printf '[setup] %s\n' "$*"; }
die() {
  printf '[setup] error: %s\n' "$*" >&2
  exit 1
}
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f s", b - a }'; }

version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]; }

cmake_ok() {
  local have
  have=$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }')
  [ -n "$have" ] && version_at_least "$have" "$cmake_minimum"
}

# Prints those of its arguments that dpkg does not know as installed.
not_installed() {
  dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "$@" 2>/dev/null | awk '$1 == "ii" { print $2 }' |
    sort -u | comm -13 - <(printf '%s\n' "$@" | sort -u)
}

install_packages() {
  local start missing optional candidates=() runner=()
  start=$(now)
  if [ "${HP_SKIP_APT:-0}" = 1 ]; then
    say "system packages: left to you (HP_SKIP_APT=1)"
    return
  fi
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    die "this is not Debian or Ubuntu: install the equivalents of '${required[*]} cmake>=$cmake_minimum python3-venv', then run again with HP_SKIP_APT=1"
  fi
  mapfile -t missing < <(not_installed "${required[@]}")
  mapfile -t optional < <(not_installed "${wanted[@]}")
  cmake_ok || missing+=(cmake)
  "${HP_PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || [ -x "$venv/bin/python" ] || missing+=(python3 python3-venv)
  # The Python package needs Python.h of the python that .venv is made from.
  "${HP_PYTHON:-python3}" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null ||
    missing+=(python3-dev)
  if [ ${#missing[@]} -eq 0 ] && { [ ${#optional[@]} -eq 0 ] || [ -e "$venv/.hp_optional_packages_tried" ]; }; then
    say "system packages: all there ($(since "$start"))"
    return
  fi
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
      runner=(sudo)
    elif [ ${#missing[@]} -eq 0 ]; then
      say "system packages: all that is required is there; not installed: ${optional[*]} ($(since "$start"))"
      return
    else
      die "missing packages: ${missing[*]}
[setup] this account is neither root nor may use sudo; ask an administrator to run
[setup]   apt-get update && apt-get install -y --no-install-recommends ${missing[*]} ${optional[*]}"
    fi
  fi
  say "system packages: installing ${missing[*]} ${optional[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${runner[@]}" apt-get update -qq </dev/null || say "apt-get update had errors; trying to install all the same"
  for package in "${optional[@]}"; do
    if apt-cache show "$package" >/dev/null 2>&1; then candidates+=("$package"); fi
  done
  if [ $((${#missing[@]} + ${#candidates[@]})) -gt 0 ]; then
    "${runner[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      "${missing[@]}" "${candidates[@]}" </dev/null >/dev/null ||
      die "apt-get could not install: ${missing[*]} ${candidates[*]}"
  fi
  hash -r
  cmake_ok || die "cmake $cmake_minimum or newer is needed, this system has '$(cmake --version 2>/dev/null | head -n1)'"
  say "system packages: done ($(since "$start"))"
}

# Prints "<site-packages> <version>" of the torch that `python` sees; fails when there is none. Does not import torch.
torch_of() {
  "$1" - <<'PY' 2>/dev/null
import importlib.util, os, re, sys
spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit(1)
folder = spec.submodule_search_locations[0]
with open(os.path.join(folder, "version.py")) as source:
    version = re.search(r"__version__ = '([^']+)'", source.read()).group(1)
print(os.path.dirname(folder), version)
PY
}

# Sets torch_python and torch_site from HP_TORCH.
resolve_hp_torch() {
  local path=$HP_TORCH tag found
  if [ -d "$path" ] && [ -x "$path/bin/python" ]; then path=$path/bin/python; fi
  if [ -f "$path" ] && [ -x "$path" ]; then
    found=$(torch_of "$path") || die "HP_TORCH=$HP_TORCH: this python has no torch"
    torch_python=$path
    torch_site=${found% *}
    return
  fi
  if [ -f "$path/version.py" ] && [ -d "$path/share/cmake/Torch" ]; then path=$(dirname "$path"); fi
  [ -f "$path/torch/version.py" ] || die "HP_TORCH=$HP_TORCH: want a python, a site-packages folder that holds torch, or a torch folder of a wheel (torchrun comes from it, so a bare libtorch is not enough)"
  torch_site=$(cd "$path" && pwd)
  tag=$(ls "$torch_site/torch" | sed -n 's/^_C\.cpython-\([0-9]\)\([0-9]*\)-.*/\1.\2/p' | head -n1)
  torch_python=$(command -v "python${tag:-3}") || die "HP_TORCH=$HP_TORCH was built for python $tag, which is not on PATH"
}

make_venv() {
  rm -rf "$venv"
  "$1" -m venv "$venv" || die "$1 cannot make a virtual environment (on Debian: apt-get install python3-venv)"
}

# torchrun as a script of .venv, also when torch comes from elsewhere or the repository was moved.
ensure_torchrun() {
  local script=$venv/bin/torchrun
  if [ -x "$script" ] && [ -x "$(sed -n '1s/^#!//p' "$script")" ]; then return; fi
  printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n' >"$script"
  chmod +x "$script"
}

install_torch() {
  local start found torch_python torch_site
  start=$(now)
  if [ -n "${HP_TORCH:-}" ]; then
    resolve_hp_torch
    found=$(torch_of "$venv/bin/python" || true)
    if [ "${found% *}" != "$torch_site" ]; then
      make_venv "$torch_python"
      printf '%s\n' "$torch_site" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hp_torch.pth"
    fi
  elif ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "virtual environment: creating .venv"
    make_venv "${HP_PYTHON:-python3}"
  fi
  found=$(torch_of "$venv/bin/python" || true)
  if [ -z "$found" ]; then
    say "torch: pip install torch==$torch_version (200 MB; several GB where your package index serves the CUDA build)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$torch_version" </dev/null || die "pip could not install torch==$torch_version"
    found=$(torch_of "$venv/bin/python") || die "pip installed no usable torch"
  fi
  case ${found##* } in
    2.13.*) ;;
    *) die "torch ${found##* } in ${found% *}: this library is built on 2.13 (unset HP_TORCH and remove .venv to let this script install it)" ;;
  esac
  if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("numpy") is None)'; then
    say "numpy: pip install numpy"
    "$venv/bin/pip" install --quiet --disable-pip-version-check numpy </dev/null || die "pip could not install numpy"
  fi
  if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("safetensors") is None)'; then
    say "safetensors: pip install safetensors (a test compares our files with it)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check safetensors </dev/null || say "pip could not install safetensors: that test will skip"
  fi
  # The constraint keeps pip from bringing another torch.
  if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("transformers") is None)'; then
    say "transformers: pip install (tests compare models and tokenizers with it)"
    printf 'torch==%s\n' "${found##* }" >"$venv/.hp_constraints"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -c "$venv/.hp_constraints" 'transformers>=5,<6' </dev/null ||
      say "pip could not install transformers: those tests will fail"
  fi
  if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("pytest") is None)'; then
    say "pytest: pip install pytest (tests of the Python package)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check pytest </dev/null || die "pip could not install pytest"
  fi
  if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("mypy", "scikit_build_core"))))'; then
    say "mypy, scikit-build-core: pip install (types and wheel of the Python package)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check mypy 'scikit-build-core>=0.10' </dev/null || die "pip could not install mypy and scikit-build-core"
  fi
  ensure_torchrun
  say "torch ${found##* } from ${found% *} ($(since "$start"))"
}

main() {
  local start
  start=$(now)
  cd "$root"
  install_packages
  install_torch
  touch "$venv/.hp_optional_packages_tried"
  say "ready ($(since "$start"))"
}
main
