#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A tiny DeepSeek V3 on a laptop without a GPU: latent attention, a dense layer and one with 8 experts in 4 groups, on 4
# processes as Ulysses 2 x Ring 2. Random tokens, 20 steps. Flags at the end override the script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
ULYSSES_SIZE=2
RING_SIZE=2
SEQ_LENGTH=512
source examples/common/tiny_cpu.sh

MODEL_ARGS=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --norm-epsilon 1e-6
    --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16
    --v-head-dim 32 --qk-layernorm --position-embedding-type rope --max-position-embeddings "$SEQ_LENGTH"
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
EXPERT_ARGS=(
    --num-experts 8 --moe-layer-freq '[0]+[1]' --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96
    --moe-router-score-function sigmoid --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
    --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
)
TRAINING_ARGS+=(--train-iters 20)

exec torchrun --standalone --nproc-per-node $((ULYSSES_SIZE * RING_SIZE)) pretrain_llama.py \
    "${MODEL_ARGS[@]}" "${EXPERT_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
