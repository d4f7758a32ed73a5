#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT 13B on sequences of 2,097,152 tokens by FPDT, one node of 8 GPUs with 80 GB: Ulysses 8:
# two of the paper's nodes; it goes to 3M tokens on 8 GPUs (table 1).
#
#   DATA_PATH=data/text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/fpdt/pretrain_gpt_13b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end and win. Variables: GPUS (of a node), NNODES,
# NODE_RANK, MASTER_ADDR, SEQ_LENGTH, CHUNK, ZERO_STAGE, and STREAM=1 where the hidden states do not fit on the GPUs.
#
# Memory. 12.8B parameters of 18 bytes (bf16 weight; fp32 gradient, main weight and Adam's two): 29 GB a GPU under ZeRO
# 3, 96 GB under ZeRO 1. Hidden states: 2.5 GiB each on a GPU, some six at a time. The layer at hand, in the pass
# before recompute: 5 GiB of keys and values. Host: layer inputs of 400 KiB a token, 800 GiB a node, and 140 GiB for
# the layer in its backward pass. --recompute-num-layers 2 halves the inputs.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/fpdt_gpt_13b}
DATA_PATH=${DATA_PATH:-}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}

GPUS=${GPUS:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

# All-to-all inside a node, a ring across nodes.
ULYSSES_SIZE=$GPUS
RING_SIZE=$NNODES
SEQ_LENGTH=${SEQ_LENGTH:-2097152}
CHUNK=${CHUNK:-65536}
ZERO_STAGE=${ZERO_STAGE:-3}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

# RoPE in place of GPT-3's learned positions, whose table would have 11 billion parameters at this length.
MODEL_ARGS=(
    --model gpt-13b
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
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
    --lr 1e-4
    --min-lr 1e-5
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
    --log-jsonl "$CHECKPOINT_PATH/log.jsonl"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 100
    --eval-iters 0
    --distributed-timeout-minutes 60
)

mkdir -p "$CHECKPOINT_PATH"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
