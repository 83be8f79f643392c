#!/usr/bin/env bash
# Installs Tandem into .venv: `install.sh runtime` for users, `install.sh dev` with what tests need.
#
# The compiler works while packages are downloaded and unpacked, because the CPU kernels need none
# of them. What is in the lock has to have one of its hashes. torch is not in it: its build is the
# user's choice.
set -euo pipefail

lock=$1
packages=(torch)
expected='about a minute'
if [ "$lock" = dev ]; then
  packages+=('triton<3.10')
  expected='about three minutes'
  export TANDEM_NATIVE=all # tests compare the instruction sets
fi
python=.venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check -qq "$@"; }
stage() { printf '%4d s  %s\n' "$SECONDS" "$1"; }

"$python" kernels/native_build.py --check
stage "1 of 3: downloading and unpacking packages, $expected; compiling the CPU kernels meanwhile"
"$python" kernels/native_build.py &
compiling=$!
trap 'kill "$compiling" 2>/dev/null || true' EXIT
pip install --require-hashes --no-deps -r "deploy/locks/$lock.txt"
pip install -c constraints.txt "${packages[@]}"
stage "2 of 3: waiting for the compiler, at most a minute"
wait "$compiling"
stage "3 of 3: installing Tandem, about 10 s"
pip install --no-deps --no-build-isolation -e .
stage "installed"
