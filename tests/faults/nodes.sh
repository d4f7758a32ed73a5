#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A rehearsal of several nodes on this machine: network namespaces with host names and addresses of their own, on links
# of limited rate, that run the real program under torchrun (docs/use/reliability.md). Needs root; about ten minutes on 2
# cores. Where it cannot run, it says why.
#
#   bash tests/faults/nodes.sh            all
#   bash tests/faults/nodes.sh -k link    some; arguments are pytest's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON="${PYTHON:-$(bash scripts/setup.sh dev)}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 NODES="${NODES:-1}"
trap '"$PYTHON" -m tests.faults.network' EXIT  # processes and namespaces go, also on Ctrl-C
"$PYTHON" -m pytest -q -s -rs -n 0 --timeout 1200 tests/faults/test_nodes.py "$@"
