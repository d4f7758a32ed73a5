#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Figure 14 of the FPDT paper, small: the loss of a GPT on 4 processes, by TP and by FPDT with and without offload.
#
#   bash examples/reproduce/fpdt/figure_14.sh [OUT_DIR]
#
# A sample has 512 tokens, in 4 chunks. ITERATIONS is 100. The script fails if the curves differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
OUT=${1:-out/reproduce/fpdt/figure_14}
. examples/reproduce/convergence.sh

train baseline pretrain_gpt.py --tensor-model-parallel-size 4 --zero-stage 1
train fpdt pretrain_gpt.py --ulysses-parallel-size 4 --zero-stage 1 --fpdt --fpdt-chunk-size 128
train fpdt-without-offload pretrain_gpt.py --ulysses-parallel-size 4 --zero-stage 1 \
    --fpdt --fpdt-chunk-size 128 --no-fpdt-offload
"$PYTHON" examples/reproduce/convergence.py "$OUT" figure_14 "FPDT, figure 14, small: TP 4 against FPDT" \
    baseline fpdt fpdt-without-offload
