#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up, then lint and test:  bash tests/run.sh [arguments of pytest]
# Two processes share the tests, each with a pool of workers of its own; -n 0 runs all in one, as --pdb needs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="$(bash scripts/setup.sh dev)"
export PATH="${PYTHON%/*}:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

lint=0
"$PYTHON" -m ruff check --output-format concise . || lint=$?
tests=0
"$PYTHON" -m pytest -q -n 2 --dist worksteal "$@" || tests=$?
if ((lint)); then echo "ruff check found what is listed above the tests: exit code $lint" >&2; fi
exit $((tests ? tests : lint))
