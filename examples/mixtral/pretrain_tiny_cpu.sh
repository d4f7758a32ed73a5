#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny Mixtral on a laptop without a GPU: 8 experts, 2 for each token, on 4 processes as Ulysses 2 x Ring 2. Every
# two processes split the experts between them. Random tokens, 20 steps. Flags at the end override the script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
ULYSSES_SIZE=2
RING_SIZE=2
SEQ_LENGTH=512
source examples/common/tiny_cpu.sh

EXPERT_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 192 --moe-aux-loss-coeff 0.01
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
)
TRAINING_ARGS+=(--train-iters 20)

exec torchrun --standalone --nproc-per-node $((ULYSSES_SIZE * RING_SIZE)) pretrain_llama.py \
    "${LLAMA_ARGS[@]}" "${EXPERT_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
