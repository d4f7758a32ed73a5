#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny Llama by FPDT on a laptop without a GPU: 2 processes (Ulysses 2), 4,096 tokens in 8 chunks, keys, values and
# layer inputs in host memory, random tokens, 5 steps. To see it run: bash examples/fpdt/pretrain_tiny_cpu.sh [FLAGS]
# FLAGS at the end win. Variables: SEQ_LENGTH, CHUNK; STREAM=1 keeps the hidden states in host memory too.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export OMP_NUM_THREADS=1

ULYSSES_SIZE=2
SEQ_LENGTH=${SEQ_LENGTH:-4096}
CHUNK=${CHUNK:-512}

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$ULYSSES_SIZE"
)

MODEL_ARGS=(
    --num-layers 2
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

PARALLEL_ARGS=(
    --ulysses-parallel-size "$ULYSSES_SIZE"
    --zero-stage 1
)

LONG_ARGS=(
    --fpdt
    --fpdt-chunk-size "$CHUNK"
)
if [ -n "${STREAM:-}" ]; then
    LONG_ARGS+=(--fpdt-stream-hidden)
else
    LONG_ARGS+=(--offload-checkpoints)
fi

TRAINING_ARGS=(
    --device cpu
    --micro-batch-size 1
    --global-batch-size 1
    --seq-length "$SEQ_LENGTH"
    --train-iters 5
    --lr 1e-3
    --lr-decay-style cosine
)

DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 1023
    --num-workers 0
)

LOGGING_ARGS=(
    --log-interval 1
    --eval-iters 0
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
