#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B over several nodes of 8 GPUs: TP 2 x Ulysses 4 inside a node, Ring across the nodes, so that every node
# adds 65,536 tokens to the sequence. Run it on each node, with the same MASTER_ADDR:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/llama/pretrain_llama3_8b_multinode.sh [FLAGS]
#
# Nodes talk over the interface on their route to MASTER_ADDR; --network-interface NAME takes another one. With a
# RING_SIZE below NNODES the sequences are shorter, and the other nodes become data parallelism. Without DATA_PATH it
# trains on random tokens. The folders must be on storage that all nodes share.
set -euo pipefail
cd "$(dirname "$0")/../.."
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama3_8b_multinode}
source examples/common/pretrain.sh

NNODES=${NNODES:-2}
GPUS_PER_NODE=8
TP_SIZE=2
ULYSSES_SIZE=4
RING_SIZE=${RING_SIZE:-$NNODES}
SEQ_LENGTH=$((65536 * RING_SIZE))
GLOBAL_BATCH_SIZE=$((16 * NNODES / RING_SIZE))

MODEL_ARGS=(--model llama3-8b --max-position-embeddings "$SEQ_LENGTH")
PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE" --sequence-parallel --ulysses-parallel-size "$ULYSSES_SIZE"
    --ring-parallel-size "$RING_SIZE" --context-parallel-balance zigzag
    "${ZERO_1_ARGS[@]}"
)
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH_SIZE" --seq-length "$SEQ_LENGTH" --train-iters 10000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    "${OPTIMIZER_ARGS[@]}" "${RECOMPUTE_ARGS[@]}"
)
choose_data 99,1,0 "${HUGGING_FACE_TOKENIZER[@]}"
LOGGING_ARGS=("${LOG_ARGS[@]}" "${TENSORBOARD_ARGS[@]}" --save-interval 500 --eval-interval 500 --eval-iters 10)

exec torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" "${NODE_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
