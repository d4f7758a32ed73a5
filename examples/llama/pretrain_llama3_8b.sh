#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B on sequences of 65,536 tokens, one node of 8 GPUs with 80 GB: TP 2 x Ulysses 4.
#
#   DATA_PATH=data/text_document TOKENIZER=path/to/Meta-Llama-3-8B bash examples/llama/pretrain_llama3_8b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama3_8b}
source examples/common/pretrain.sh

GPUS_PER_NODE=8
TP_SIZE=2
ULYSSES_SIZE=4
SEQ_LENGTH=65536

# The same as --model llama3-8b.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE" --sequence-parallel --ulysses-parallel-size "$ULYSSES_SIZE"
    "${ZERO_1_ARGS[@]}"
)
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 32 --seq-length "$SEQ_LENGTH" --train-iters 10000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    "${OPTIMIZER_ARGS[@]}" "${RECOMPUTE_ARGS[@]}"
)
MOCK_VOCABULARY=128255
choose_data 99,1,0 "${HUGGING_FACE_TOKENIZER[@]}"
LOGGING_ARGS=("${LOG_ARGS[@]}" "${TENSORBOARD_ARGS[@]}" --save-interval 500 --eval-interval 500 --eval-iters 10)

exec torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" pretrain_llama.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
