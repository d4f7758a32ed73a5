#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT 2.7B on sequences of 65,536 tokens, one node of 8 GPUs: Ulysses 8.
#
#   DATA_PATH=data/text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/gpt/pretrain_gpt_2.7b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end and win.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_2.7b}
TENSORBOARD_DIR=${TENSORBOARD_DIR:-$CHECKPOINT_PATH/tensorboard}
DATA_PATH=${DATA_PATH:-}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}

GPUS_PER_NODE=8
ULYSSES_SIZE=8
SEQ_LENGTH=65536
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=16

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS_PER_NODE"
)

# The same as --model gpt-2.7b.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 2560
    --num-attention-heads 32
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type learned_absolute
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.006
)

PARALLEL_ARGS=(
    --ulysses-parallel-size "$ULYSSES_SIZE"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --bf16
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --seq-length "$SEQ_LENGTH"
    --train-iters 10000
    --lr 1.6e-4
    --min-lr 1.6e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

if [ -n "$DATA_PATH" ]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --split 99,1,0
        --tokenizer-type GPT2BPETokenizer
        --vocab-file "$VOCAB_FILE"
        --merge-file "$MERGE_FILE"
        --num-workers 2
    )
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256)
fi

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --tensorboard-dir "$TENSORBOARD_DIR"
    --log-jsonl "$CHECKPOINT_PATH/log.jsonl"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 500
    --eval-interval 500
    --eval-iters 10
)

mkdir -p "$CHECKPOINT_PATH"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
