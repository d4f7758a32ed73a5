#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny Llama by FPDT on a laptop without a GPU: 2 processes (Ulysses 2), 4,096 tokens in 8 chunks, random tokens, 5
# steps. Keys, values and layer inputs are in host memory.
#
#   bash examples/fpdt/pretrain_tiny_cpu.sh [FLAGS]
#
# FLAGS at the end override the script's. Variables: SEQ_LENGTH, CHUNK; STREAM=1 keeps the hidden states in host memory
# too.
set -euo pipefail
cd "$(dirname "$0")/../.."
ULYSSES_SIZE=2
GLOBAL_BATCH_SIZE=1
SEQ_LENGTH=${SEQ_LENGTH:-4096}
CHUNK=${CHUNK:-512}
if [ -n "${STREAM:-}" ]; then HIDDEN_STATES=--fpdt-stream-hidden; else HIDDEN_STATES=--offload-checkpoints; fi
source examples/common/tiny_cpu.sh

PARALLEL_ARGS+=(--zero-stage 1)
LONG_ARGS=(--fpdt --fpdt-chunk-size "$CHUNK" "$HIDDEN_STATES")
TRAINING_ARGS+=(--train-iters 5)

exec torchrun --standalone --nproc-per-node "$ULYSSES_SIZE" pretrain_llama.py \
    "${LLAMA_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
