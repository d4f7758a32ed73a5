#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The long form of tests/faults: 100 kills, 20 hangs, 20 changes of the number of processes, a torchrun that loses an
# agent and gets it back, 200 bad inputs, a soak of 2,000 steps, 50 kills of a run with copies in memory, 50 times two
# jobs in one folder, 50 takeovers from a killed job, and, if possible, the rehearsal of several nodes (nodes.sh). All
# of it takes some hours on 2 cores.
#
#   bash tests/faults/run.sh              all
#   KILLS=10 HANGS=2 CHANGES=2 bash tests/faults/run.sh -k kill      fewer; other arguments are pytest's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON="$(bash scripts/setup.sh dev)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 KILLS="${KILLS:-100}" HANGS="${HANGS:-20}"
export CHANGES="${CHANGES:-20}" AGENTS="${AGENTS:-3}" BAD_INPUTS="${BAD_INPUTS:-200}" SOAK="${SOAK:-2000}" LOST_NODES="${LOST_NODES:-50}"
export OWNERS="${OWNERS:-50}" OWNER_ROUNDS="${OWNER_ROUNDS:-200}" NODES="${NODES:-1}"
exec "$PYTHON" -m pytest -q -s -n 0 --timeout 7200 --full tests/faults tests/unit/test_owner.py "$@"
