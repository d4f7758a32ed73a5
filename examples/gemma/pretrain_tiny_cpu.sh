#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny Gemma 3 on a laptop without a GPU: five layers with a window and one without, on 4 processes as Ulysses 2 x
# Ring 2. Random tokens, 20 steps. Flags at the end override the script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
ULYSSES_SIZE=2
RING_SIZE=2
SEQ_LENGTH=512
source examples/common/tiny_cpu.sh

GEMMA_ARGS=(
    --num-layers 6 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --kv-channels 32
    --group-query-attention --num-query-groups 2 --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope
    --window-size 63,0 --window-attn-skip-freq 6 --rotary-base 1000000 --rotary-base-local 10000
    --normalization RMSNorm --apply-layernorm-1p --sandwich-norm --qk-layernorm --geglu --scale-embeddings
    --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAINING_ARGS+=(--train-iters 20)

exec torchrun --standalone --nproc-per-node $((ULYSSES_SIZE * RING_SIZE)) pretrain_gpt.py \
    "${GEMMA_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
