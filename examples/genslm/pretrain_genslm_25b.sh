#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GenSLM 25B on genomes of 524,288 tokens, 8 nodes of 8 GPUs with 40 GB: TP 8 with sequence parallelism inside a node,
# Ring 8 across nodes, learned positions split over all 64. The published length on 64 GPUs.
#
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/genomes_text_document \
#       bash examples/genslm/pretrain_genslm_25b.sh [FLAGS]
#
# DATA_PATH is what tools/preprocess_data.py makes of FASTA; without it, random codons. FLAGS are added at the end and
# win. Variables: GPUS (of a node), NNODES, NODE_RANK, MASTER_ADDR, SEQ_LENGTH, TOKENIZER_TYPE, ZERO_STAGE, and CHUNK,
# which brings FPDT: CHUNK=131072 SEQ_LENGTH=4194304, for one.
#
# Memory of a GPU. 25.5B parameters of 18 bytes (bf16 weight; fp32 gradient, main weight and Adam's two): 7.2 GB
# under ZeRO 3. Positions: 524,288 rows of 5,760 in all, 54 GB where every GPU holds them, 0.85 GB split. Layer inputs:
# 64 of 90 MiB, 5.6 GiB. The layer at hand: some 4 GiB. With 4,194,304 tokens and FPDT: positions 6.8 GB,
# hidden states of 720 MiB each on a GPU, some six at a time, and layer inputs of 360 GiB in the memory of a node.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/genslm_25b}
DATA_PATH=${DATA_PATH:-}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-CodonTokenizer}

GPUS=${GPUS:-8}
NNODES=${NNODES:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

# All that is sent in every layer stays inside a node, a ring goes across nodes.
TP_SIZE=$GPUS
RING_SIZE=$NNODES
SEQ_LENGTH=${SEQ_LENGTH:-524288}
CHUNK=${CHUNK:-}
ZERO_STAGE=${ZERO_STAGE:-3}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

MODEL_ARGS=(
    --model genslm-25b
    --max-position-embeddings "$SEQ_LENGTH"
    --partition-position-embedding
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE"
    --sequence-parallel
    --ring-parallel-size "$RING_SIZE"
    --zero-stage "$ZERO_STAGE"
)

LONG_ARGS=(
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
if [ -n "$CHUNK" ]; then
    LONG_ARGS+=(
        --fpdt
        --fpdt-chunk-size "$CHUNK"
        --offload-checkpoints
    )
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
    DATA_ARGS=(--data-path "$DATA_PATH" --split 100,0,0 --tokenizer-type "$TOKENIZER_TYPE" --num-workers 2)
else
    DATA_ARGS=(--mock-data --tokenizer-type "$TOKENIZER_TYPE")
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
