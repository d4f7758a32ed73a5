#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up, then lint and test:
#
#   bash tests/run.sh --quick     most unit tests and a few grids: after every change
#   bash tests/run.sh             every feature, combinations by pairs: before a pull request, and in CI
#   bash tests/run.sh --lab       the laboratory (random inputs, faults, adversaries, planted errors, mutants): once a day
#   bash tests/run.sh --full      all of it, with complete matrices: before a release
#
# All other arguments are pytest's. Two processes share the tests, each with its own pool of workers; -n 0 runs all
# in one, which --pdb needs. --hypothesis-profile=explore looks for new counterexamples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="$(bash scripts/setup.sh dev)"
export PATH="${PYTHON%/*}:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE  # compiled modules save ten seconds of each later run

SECONDS=0
lint=0
"$PYTHON" -m ruff check --output-format concise . || lint=$?
tests=0
"$PYTHON" -m pytest -q -n 2 --dist worksteal --durations 20 --durations-min 0.1 "$@" || tests=$?
echo "lint and tests took $((SECONDS / 60)) min $((SECONDS % 60)) s"
if ((lint)); then echo "ruff check found what is listed above the tests: exit code $lint" >&2; fi
exit $((tests ? tests : lint))
