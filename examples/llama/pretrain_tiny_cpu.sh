#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny Llama on a laptop without a GPU: 4 processes as Ulysses 2 x Ring 2, random tokens, 10 steps. It runs the
# complete program. Flags at the end override the script's:  bash examples/llama/pretrain_tiny_cpu.sh --train-iters 50
set -euo pipefail
cd "$(dirname "$0")/../.."
ULYSSES_SIZE=2
RING_SIZE=2
SEQ_LENGTH=1024
source examples/common/tiny_cpu.sh

TRAINING_ARGS+=(--train-iters 10)

exec torchrun --standalone --nproc-per-node $((ULYSSES_SIZE * RING_SIZE)) pretrain_llama.py \
    "${LLAMA_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
