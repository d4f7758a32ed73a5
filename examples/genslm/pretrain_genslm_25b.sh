#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GenSLM 25B on genomes of 524,288 tokens, 8 nodes of 8 GPUs with 40 GB: TP 8 with sequence parallelism inside a node,
# Ring 8 across nodes, learned positions split over all 64. This is the published length on 64 GPUs.
#
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/genomes_text_document \
#       bash examples/genslm/pretrain_genslm_25b.sh [FLAGS]
#
# DATA_PATH is what tools/preprocess_data.py makes of FASTA files; without it the run trains on random codons. FLAGS are
# added at the end of the command, where they override the script's. Variables: GPUS (of a node), NNODES, NODE_RANK,
# MASTER_ADDR, SEQ_LENGTH, TOKENIZER_TYPE, ZERO_STAGE, and CHUNK, which turns on FPDT, for example CHUNK=131072
# SEQ_LENGTH=4194304.
#
# Memory of a GPU. Each of the 25.5B parameters takes 18 bytes (a bf16 weight; an fp32 gradient, main weight and Adam's
# two moments): 7.2 GB under ZeRO 3. The position embedding has 524,288 rows of 5,760: 54 GB if every GPU holds all of
# it, 0.85 GB if it is split. The inputs of 64 layers take 90 MiB each, 5.6 GiB, and the current layer takes about 4
# GiB. With 4,194,304 tokens and FPDT, positions take 6.8 GB, hidden states take 720 MiB each on a GPU, about six at a
# time, and layer inputs take 360 GiB in the memory of a node.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/genslm_25b}
source examples/common/pretrain.sh

GPUS=${GPUS:-8}
NNODES=${NNODES:-8}
SEQ_LENGTH=${SEQ_LENGTH:-524288}
ZERO_STAGE=${ZERO_STAGE:-3}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-CodonTokenizer}

MODEL_ARGS=(
    --model genslm-25b --max-position-embeddings "$SEQ_LENGTH" --partition-position-embedding
)
# What every layer sends stays inside a node; a ring goes across nodes.
PARALLEL_ARGS=(
    --tensor-model-parallel-size "$GPUS" --sequence-parallel
    --ring-parallel-size "$NNODES" --zero-stage "$ZERO_STAGE"
)
LONG_ARGS=("${RECOMPUTE_ARGS[@]}")
if [ -n "${CHUNK:-}" ]; then LONG_ARGS+=(--fpdt --fpdt-chunk-size "$CHUNK" --offload-checkpoints); fi

TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 1 --seq-length "$SEQ_LENGTH" --train-iters 1000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    "${OPTIMIZER_ARGS[@]}"
)

if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --split 100,0,0 --tokenizer-type "$TOKENIZER_TYPE" --num-workers 2)
else
    DATA_ARGS=(--mock-data --tokenizer-type "$TOKENIZER_TYPE")
fi

LOGGING_ARGS=(
    "${PROGRESS_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" --save-interval 100
    --eval-iters 0 --distributed-timeout-minutes 60
)

exec torchrun --nproc-per-node "$GPUS" --nnodes "$NNODES" "${NODE_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
