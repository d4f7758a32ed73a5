#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT 2.7B on sequences of 2,097,152 tokens by FPDT, one node of 4 GPUs with 80 GB: Ulysses 4.
# The paper reaches 4M tokens on these GPUs (table 1).
#
#   DATA_PATH=data/text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/fpdt/pretrain_gpt_2.7b.sh [FLAGS]
#
# Without DATA_PATH it trains on random tokens. FLAGS are added at the end of the command, where they override the
# script's. Variables: GPUS (of a node), NNODES, NODE_RANK, MASTER_ADDR, SEQ_LENGTH, CHUNK, ZERO_STAGE, and STREAM=1
# where the hidden states do not fit on the GPUs.
#
# Memory. Each of the 2.6B parameters takes 18 bytes (a bf16 weight; an fp32 gradient, main weight and Adam's two
# moments): 12 GB on a GPU under ZeRO 3, 24 GB under ZeRO 1. A hidden state takes 2.5 GiB of a GPU, and about six exist
# at a time. In the first forward pass, the keys and values of the current layer take 5 GiB. In host memory, the inputs
# of the layers take 160 KiB a token, 320 GiB a node, and the current layer in its backward pass takes 70 GiB.
# --recompute-num-layers 2 halves the inputs.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/fpdt_gpt_2.7b}
source examples/common/pretrain.sh

GPUS=${GPUS:-4}
NNODES=${NNODES:-1}
SEQ_LENGTH=${SEQ_LENGTH:-2097152}
CHUNK=${CHUNK:-65536}
ZERO_STAGE=${ZERO_STAGE:-3}
if [ -n "${STREAM:-}" ]; then HIDDEN_STATES=--fpdt-stream-hidden; else HIDDEN_STATES=--offload-checkpoints; fi

# RoPE in place of GPT-3's learned positions, whose table would have 5 billion parameters at this length.
MODEL_ARGS=(--model gpt-2.7b --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope)
# All-to-all inside a node, a ring across nodes.
PARALLEL_ARGS=(--ulysses-parallel-size "$GPUS" --ring-parallel-size "$NNODES" --zero-stage "$ZERO_STAGE")
LONG_ARGS=(--fpdt --fpdt-chunk-size "$CHUNK" "${RECOMPUTE_ARGS[@]}" "$HIDDEN_STATES")

TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 1 --seq-length "$SEQ_LENGTH" --train-iters 1000
    --lr 1.6e-4 --min-lr 1.6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    "${OPTIMIZER_ARGS[@]}"
)

if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --split 100,0,0 "${GPT2_TOKENIZER[@]}" --num-workers 2)
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256)
fi

LOGGING_ARGS=(
    "${PROGRESS_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" --save-interval 100
    --eval-iters 0 --distributed-timeout-minutes 60
)

exec torchrun --nproc-per-node "$GPUS" --nnodes "$NNODES" "${NODE_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
