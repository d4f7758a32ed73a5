#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B over several nodes of 8 GPUs: TP 2 x Ulysses 4 inside a node, Ring across the nodes, so that every node
# adds 65,536 tokens to the sequence. Run it on each node, with the same MASTER_ADDR:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/llama/pretrain_llama3_8b_multinode.sh [FLAGS]
#
# Nodes talk over the interface on their route to MASTER_ADDR; --network-interface NAME takes another one.
# RING_SIZE below NNODES gives shorter sequences and data parallelism over what is left. Without DATA_PATH it trains on
# random tokens. The folders must be on storage that all nodes share.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama3_8b_multinode}
TENSORBOARD_DIR=${TENSORBOARD_DIR:-$CHECKPOINT_PATH/tensorboard}
DATA_PATH=${DATA_PATH:-}
TOKENIZER=${TOKENIZER:-}

GPUS_PER_NODE=8
NNODES=${NNODES:-2}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

TP_SIZE=2
ULYSSES_SIZE=4
RING_SIZE=${RING_SIZE:-$NNODES}
SEQ_LENGTH=$((65536 * RING_SIZE))
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=$((16 * NNODES / RING_SIZE))

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

MODEL_ARGS=(
    --model llama3-8b
    --max-position-embeddings "$SEQ_LENGTH"
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE"
    --sequence-parallel
    --ulysses-parallel-size "$ULYSSES_SIZE"
    --ring-parallel-size "$RING_SIZE"
    --context-parallel-balance zigzag
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
    DATA_ARGS=(--mock-data)
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
exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
