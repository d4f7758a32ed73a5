#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Hybrids whose sequences become 16 times as long: bash examples/hybrid/longer.sh [OUT_DIR]
#
# examples/extend with two layers of three that carry a state: the loss by position at 4,096 tokens, before and after
# training at that length. Then examples/needle with one of two: needles in 4,096 tokens, before and after.
#
# In November 2026, on 2 busy cores in 15 minutes: the loss at positions 2,048 to 4,095 fell from 3.619 to 3.529, that
# at positions below 512 rose by up to 0.04; answer tokens of needles alone rose from 91.5 to 100.0 %, of one of four
# needles from 88.1 to 100.0 %.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${1:-out/hybrid-longer}
STATES="--experimental-attention-variant gated_delta_net --linear-num-key-heads 2 --linear-num-value-heads 4
    --linear-key-head-dim 32 --linear-value-head-dim 32"

ITERATIONS=${ITERATIONS:-150} MODEL_FLAGS="$STATES --linear-attention-freq 3" bash examples/extend/extend.sh "$OUT/text"
LONG=4096 SHORT_ITERATIONS=${SHORT_ITERATIONS:-700} MIDDLE_ITERATIONS=100 LONG_ITERATIONS=${LONG_ITERATIONS:-60} \
    MODEL_FLAGS="$STATES --linear-attention-freq 2" bash examples/needle/quickstart.sh "$OUT/needle"
