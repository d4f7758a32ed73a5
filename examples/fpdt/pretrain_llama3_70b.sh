#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 70B on sequences of 4,194,304 tokens by FPDT, 4 nodes of 8 GPUs with 80 GB: Ulysses 8 x Ring 4:
# eight of the paper's nodes, and its longest (table 1).
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/text_document \
#       TOKENIZER=path/to/tokenizer bash examples/fpdt/pretrain_llama3_70b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end and win. Variables: GPUS (of a node), NNODES,
# NODE_RANK, MASTER_ADDR, SEQ_LENGTH, CHUNK, ZERO_STAGE, and STREAM=1 where the hidden states do not fit on the GPUs.
#
# Memory. 70.6B parameters of 18 bytes (bf16 weight; fp32 gradient, main weight and Adam's two): 40 GB a GPU under ZeRO
# 3, 450 GB under ZeRO 1. Hidden states: 2 GiB each on a GPU, some six at a time. The layer at hand, in the pass before
# recompute: 6.5 GiB of queries, keys, values and fp32 sums. Host: layer inputs of 1280 KiB a token, 1,280 GiB a node,
# and 84 GiB for the layer in its backward pass. --recompute-num-layers 2 halves the inputs.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/fpdt_llama3_70b}
DATA_PATH=${DATA_PATH:-}
TOKENIZER=${TOKENIZER:-}

GPUS=${GPUS:-8}
NNODES=${NNODES:-4}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

# All-to-all inside a node, a ring across nodes.
ULYSSES_SIZE=$GPUS
RING_SIZE=$NNODES
SEQ_LENGTH=${SEQ_LENGTH:-4194304}
CHUNK=${CHUNK:-65536}
ZERO_STAGE=${ZERO_STAGE:-3}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

MODEL_ARGS=(
    --model llama3-70b
    --max-position-embeddings "$SEQ_LENGTH"
)

PARALLEL_ARGS=(
    --ulysses-parallel-size "$ULYSSES_SIZE"
    --ring-parallel-size "$RING_SIZE"
    --zero-stage "$ZERO_STAGE"
)

LONG_ARGS=(
    --fpdt
    --fpdt-chunk-size "$CHUNK"
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
if [ -n "${STREAM:-}" ]; then
    LONG_ARGS+=(--fpdt-stream-hidden)
else
    LONG_ARGS+=(--offload-checkpoints)
fi

TRAINING_ARGS=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 1
    --seq-length "$SEQ_LENGTH"
    --train-iters 1000
    --lr 1.5e-4
    --min-lr 1.5e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
)

if [ -n "$DATA_PATH" ]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --split 100,0,0
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
    --log-jsonl "$CHECKPOINT_PATH/log.jsonl"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 100
    --eval-iters 0
    --distributed-timeout-minutes 60
)

mkdir -p "$CHECKPOINT_PATH"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
