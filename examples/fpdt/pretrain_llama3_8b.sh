#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B on sequences of 2,097,152 tokens by FPDT, one node of 4 GPUs with 80 GB: Ulysses 4.
# This is the paper's longest on 4 GPUs; with GPUS=8 SEQ_LENGTH=4194304 it is the run of its table 3.
#
#   DATA_PATH=data/text_document TOKENIZER=path/to/tokenizer bash examples/fpdt/pretrain_llama3_8b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's. Variables: GPUS (of a node), NNODES, NODE_RANK, MASTER_ADDR, SEQ_LENGTH, CHUNK, ZERO_STAGE, and STREAM=1
# where the hidden states do not fit on the GPUs.
#
# Memory. Each of the 8.0B parameters takes 18 bytes (a bf16 weight; an fp32 gradient, main weight and Adam's two
# moments): 36 GB on a GPU under ZeRO 3, 72 GB under ZeRO 1. A hidden state takes 4 GiB of a GPU, and about six exist at
# a time. In the first forward pass, the keys and values of the current layer take 2 GiB. In host memory, the inputs of
# the layers take 256 KiB a token, 512 GiB a node, and the current layer in its backward pass takes 56 GiB.
# --recompute-num-layers 2 halves the inputs.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/fpdt_llama3_8b}
source examples/common/pretrain.sh

GPUS=${GPUS:-4}
NNODES=${NNODES:-1}
SEQ_LENGTH=${SEQ_LENGTH:-2097152}
CHUNK=${CHUNK:-65536}
ZERO_STAGE=${ZERO_STAGE:-3}
if [ -n "${STREAM:-}" ]; then HIDDEN_STATES=--fpdt-stream-hidden; else HIDDEN_STATES=--offload-checkpoints; fi

MODEL_ARGS=(--model llama3-8b --max-position-embeddings "$SEQ_LENGTH")
# All-to-all inside a node, a ring across nodes.
PARALLEL_ARGS=(--ulysses-parallel-size "$GPUS" --ring-parallel-size "$NNODES" --zero-stage "$ZERO_STAGE")
LONG_ARGS=(--fpdt --fpdt-chunk-size "$CHUNK" "${RECOMPUTE_ARGS[@]}" "$HIDDEN_STATES")

TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 1 --seq-length "$SEQ_LENGTH" --train-iters 1000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
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
