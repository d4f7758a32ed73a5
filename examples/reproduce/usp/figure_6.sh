#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Figure 6 of the USP paper, small: the loss of a Llama at global batch 4, by DP on 4 processes and by USP on 4.
#
#   bash examples/reproduce/usp/figure_6.sh [OUT_DIR]
#
# A sample has 512 tokens. ITERATIONS is 100; the paper trained 10,000. The script fails if the curves differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
OUT=${1:-out/reproduce/usp/figure_6}
. examples/reproduce/convergence.sh

train dp pretrain_llama.py --micro-batch-size 1
train usp pretrain_llama.py --ulysses-parallel-size 2 --ring-parallel-size 2
"$PYTHON" examples/reproduce/convergence.py "$OUT" figure_6 "USP, figure 6, small: DP 4 against Ulysses 2 x Ring 2" \
    dp usp
