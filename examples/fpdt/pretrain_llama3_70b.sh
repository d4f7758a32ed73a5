#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 70B on sequences of 4,194,304 tokens by FPDT, 4 nodes of 8 GPUs with 80 GB: Ulysses 8 x Ring 4.
# That is eight of the paper's nodes, and its longest sequence (table 1).
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/text_document \
#       TOKENIZER=path/to/tokenizer bash examples/fpdt/pretrain_llama3_70b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's. Variables: GPUS (of a node), NNODES, NODE_RANK, MASTER_ADDR, SEQ_LENGTH, CHUNK, ZERO_STAGE, and STREAM=1
# where the hidden states do not fit on the GPUs.
#
# Memory. Each of the 70.6B parameters takes 18 bytes (a bf16 weight; an fp32 gradient, main weight and Adam's two
# moments): 40 GB on a GPU under ZeRO 3, 450 GB under ZeRO 1. A hidden state takes 2 GiB of a GPU, and about six exist
# at a time. In the first forward pass, the queries, keys, values and fp32 sums of the current layer take 6.5 GiB. In
# host memory, the inputs of the layers take 1,280 KiB a token, 1,280 GiB a node, and the current layer in its backward
# pass takes 84 GiB. --recompute-num-layers 2 halves the inputs.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/fpdt_llama3_70b}
source examples/common/pretrain.sh

GPUS=${GPUS:-8}
NNODES=${NNODES:-4}
SEQ_LENGTH=${SEQ_LENGTH:-4194304}
CHUNK=${CHUNK:-65536}
ZERO_STAGE=${ZERO_STAGE:-3}
if [ -n "${STREAM:-}" ]; then HIDDEN_STATES=--fpdt-stream-hidden; else HIDDEN_STATES=--offload-checkpoints; fi

MODEL_ARGS=(--model llama3-70b --max-position-embeddings "$SEQ_LENGTH")
# All-to-all inside a node, a ring across nodes.
PARALLEL_ARGS=(--ulysses-parallel-size "$GPUS" --ring-parallel-size "$NNODES" --zero-stage "$ZERO_STAGE")
LONG_ARGS=(--fpdt --fpdt-chunk-size "$CHUNK" "${RECOMPUTE_ARGS[@]}" "$HIDDEN_STATES")

TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 1 --seq-length "$SEQ_LENGTH" --train-iters 1000
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    "${OPTIMIZER_ARGS[@]}"
)

if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --split 100,0,0 "${HUGGING_FACE_TOKENIZER[@]}" --num-workers 2)
else
    DATA_ARGS=(--mock-data)
fi

LOGGING_ARGS=(
    "${PROGRESS_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" --save-interval 100
    --eval-iters 0 --distributed-timeout-minutes 60
)

exec torchrun --nproc-per-node "$GPUS" --nnodes "$NNODES" "${NODE_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
