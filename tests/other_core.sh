#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run what depends on megatron-core with another version of it: 0.19 if .venv has 0.16, and the reverse.
#
#   bash tests/other_core.sh [ARGUMENTS OF PYTEST]      after tests/run.sh, which makes .venv
#
# The other environment is in ~/.cache/megatron-longcontext and is used again. Where it cannot be made, because the
# machine has no other Python, too little disk or no network, the script says so and ends with 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"

TESTS=(tests/unit/test_core_interface.py)
for name in core_versions core_findings training later_tokens checkpoint megatron_checkpoints experts linear_attention \
    gated_delta_net mamba2 hugging_face; do
    TESTS+=("tests/distributed/test_$name.py")
done

skip() { echo "megatron-core in another version was NOT tested: $*"; exit 0; }

if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    names=(python3.11 python3.10 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[01].*/bin/python3)
else
    names=(python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python3)
fi
other=""
for name in "${names[@]}"; do
    if [ -z "$other" ] && "$name" -c '' 2>/dev/null; then other="$name"; fi
done
[ -n "$other" ] || skip "no ${names[0]} here"
free=$(df -Pk "$HOME" | awk 'NR == 2 { print int($4 / 1048576) }')
version="$("$other" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
export VENV="${XDG_CACHE_HOME:-$HOME/.cache}/megatron-longcontext/$version"
[ -d "$VENV" ] || [ "$free" -ge 12 ] || skip "$free GiB are free in $HOME, 12 are needed"  # torch with CUDA
mkdir -p "${VENV%/*}"
SECONDS=0
PYTHON="$(PYTHON="$other" timeout 1500 bash scripts/setup.sh dev)" || skip "the environment for Python $version could not be made"
echo "the environment for Python $version took $((SECONDS / 60)) min $((SECONDS % 60)) s"

export PATH="${PYTHON%/*}:$PATH" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OTHER_PYTHON="$ROOT/.venv/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
SECONDS=0
tests=0
"$PYTHON" -m pytest -q -n 2 --dist worksteal "${TESTS[@]}" "$@" || tests=$?
echo "tests with $("$PYTHON" -c 'from megatron.core import __version__; print("megatron-core", __version__)') took" \
    "$((SECONDS / 60)) min $((SECONDS % 60)) s"
exit $tests
