#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 2 7B on sequences of 32,768 tokens, one node of 8 GPUs with 80 GB: Ulysses 8, no tensor parallelism.
#
#   DATA_PATH=data/text_document TOKENIZER=path/to/tokenizer.model bash examples/llama/pretrain_llama2_7b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama2_7b}
source examples/common/pretrain.sh

GPUS_PER_NODE=8
ULYSSES_SIZE=8
SEQ_LENGTH=32768

# The same as --model llama2-7b.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
)
PARALLEL_ARGS=(--ulysses-parallel-size "$ULYSSES_SIZE" "${ZERO_1_ARGS[@]}")
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 64 --seq-length "$SEQ_LENGTH" --train-iters 10000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    "${OPTIMIZER_ARGS[@]}" "${RECOMPUTE_ARGS[@]}"
)
MOCK_VOCABULARY=31999
choose_data 99,1,0 --tokenizer-type Llama2Tokenizer --tokenizer-model "${TOKENIZER:-}"
LOGGING_ARGS=("${LOG_ARGS[@]}" "${TENSORBOARD_ARGS[@]}" --save-interval 500 --eval-interval 500 --eval-iters 10)

exec torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" pretrain_llama.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
