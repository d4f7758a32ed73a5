#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT 2.7B on sequences of 65,536 tokens, one node of 8 GPUs: Ulysses 8.
#
#   DATA_PATH=data/text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/gpt/pretrain_gpt_2.7b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's.
set -euo pipefail
cd "$(dirname "$0")/../.."
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_2.7b}
source examples/common/pretrain.sh

GPUS_PER_NODE=8
ULYSSES_SIZE=8
SEQ_LENGTH=65536

# The same as --model gpt-2.7b.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 2560 --num-attention-heads 32
    --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type learned_absolute
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.006
)
PARALLEL_ARGS=(--ulysses-parallel-size "$ULYSSES_SIZE" "${ZERO_1_ARGS[@]}")
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 16 --seq-length "$SEQ_LENGTH" --train-iters 10000
    --lr 1.6e-4 --min-lr 1.6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    "${OPTIMIZER_ARGS[@]}" "${RECOMPUTE_ARGS[@]}"
)
MOCK_VOCABULARY=50256
choose_data 99,1,0 "${GPT2_TOKENIZER[@]}"
LOGGING_ARGS=("${LOG_ARGS[@]}" "${TENSORBOARD_ARGS[@]}" --save-interval 500 --eval-interval 500 --eval-iters 10)

exec torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
