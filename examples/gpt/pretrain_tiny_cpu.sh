#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny GPT on a laptop without a GPU: 4 processes as TP 2 x Ring 2, random tokens, 10 steps. It runs the
# complete program. Flags at the end override the script's:  bash examples/gpt/pretrain_tiny_cpu.sh --train-iters 50
set -euo pipefail
cd "$(dirname "$0")/../.."
TP_SIZE=2
RING_SIZE=2
SEQ_LENGTH=1024
source examples/common/tiny_cpu.sh

MODEL_ARGS=(
    --num-layers 2 --hidden-size 128 --num-attention-heads 4
    --max-position-embeddings "$SEQ_LENGTH" --attention-dropout 0.0 --hidden-dropout 0.0
)
PARALLEL_ARGS=(--tensor-model-parallel-size "$TP_SIZE" --sequence-parallel --ring-parallel-size "$RING_SIZE")
TRAINING_ARGS+=(--train-iters 10)

exec torchrun --standalone --nproc-per-node $((TP_SIZE * RING_SIZE)) pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
