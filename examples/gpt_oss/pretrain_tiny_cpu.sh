#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny gpt-oss on a laptop without a GPU: sinks, a window in every second layer, and experts with biases, on 4
# processes as Ulysses 2 x Ring 2. Random tokens, 20 steps. Flags at the end override the script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
ULYSSES_SIZE=2
RING_SIZE=2
SEQ_LENGTH=512
source examples/common/tiny_cpu.sh

GPT_OSS_ARGS=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 32
    --group-query-attention --num-query-groups 2 --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type yarn --rotary-base 150000 --yarn-rotary-scaling-factor 32
    --no-yarn-correction-range-round-to-int --window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable
    --normalization RMSNorm --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
)
EXPERT_ARGS=(--num-experts 8 --moe-router-topk 4 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2)
TRAINING_ARGS+=(--train-iters 20)

exec torchrun --standalone --nproc-per-node $((ULYSSES_SIZE * RING_SIZE)) pretrain_gpt.py \
    "${GPT_OSS_ARGS[@]}" "${EXPERT_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
