#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B on sequences of 65,536 tokens, one node of 8 GPUs with 80 GB: TP 2 x Ulysses 4.
#
#   DATA_PATH=data/text_document TOKENIZER=path/to/Meta-Llama-3-8B bash examples/llama/pretrain_llama3_8b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end and win.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama3_8b}
TENSORBOARD_DIR=${TENSORBOARD_DIR:-$CHECKPOINT_PATH/tensorboard}
DATA_PATH=${DATA_PATH:-}
TOKENIZER=${TOKENIZER:-}

GPUS_PER_NODE=8
TP_SIZE=2
ULYSSES_SIZE=4
SEQ_LENGTH=65536
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=32

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS_PER_NODE"
)

# The same as --model llama3-8b.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.02
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE"
    --sequence-parallel
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
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
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
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$TOKENIZER"
        --num-workers 2
    )
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128255)
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
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
