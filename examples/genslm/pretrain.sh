#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GenSLM 25B or 33B on genomes of the published length on 64 GPUs, 8 nodes of 8 GPUs with 40 GB: TP 8 with sequence
# parallelism inside a node, Ring 8 across nodes, learned positions split over all 64.
#
#   MODEL=genslm-25b NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/genomes_text_document \
#       bash examples/genslm/pretrain.sh [FLAGS]                                            # on each node
#
# DATA_PATH is what tools/preprocess_data.py makes of FASTA files; without it the run trains on random codons. FLAGS are
# added at the end of the command, where they override the script's. Variables: MODEL (genslm-25b or genslm-33b), GPUS
# (of a node), NNODES, NODE_RANK, MASTER_ADDR, SEQ_LENGTH, TOKENIZER_TYPE, ZERO_STAGE, and CHUNK, which turns on FPDT,
# for example CHUNK=131072 SEQ_LENGTH=4194304.
#
# Memory of a GPU. A parameter takes 18 bytes (a bf16 weight; an fp32 gradient, main weight and Adam's two moments) and
# is split by ZeRO 3. The position embedding has a row of 5,760 for each token. The layer that is being computed takes about 4 GiB.
#
#               tokens    parameters   states     positions, split (whole)   layer inputs
#   genslm-25b  524,288   25.5B        7.2 GB     0.85 GB (54 GB)            64 x 90 MiB = 5.6 GiB
#   genslm-33b  458,752   31.9B        9.0 GB     0.74 GB (48 GB)            80 x 79 MiB = 6.2 GiB
#
# With 4,194,304 tokens and FPDT, positions take 6.8 GB, hidden states take 720 MiB each on a GPU, about six at a time,
# and layer inputs take 360 GiB (25B) or 450 GiB (33B) in the memory of a node.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
MODEL=${MODEL:-genslm-25b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/${MODEL//-/_}}
source examples/common/pretrain.sh

GPUS=${GPUS:-8}
NNODES=${NNODES:-8}
case $MODEL in
    genslm-25b) SEQ_LENGTH=${SEQ_LENGTH:-524288} ;;
    genslm-33b) SEQ_LENGTH=${SEQ_LENGTH:-458752} ;;
    *) echo "error: MODEL=$MODEL: use genslm-25b or genslm-33b" >&2 && exit 2 ;;
esac
ZERO_STAGE=${ZERO_STAGE:-3}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-CodonTokenizer}

MODEL_ARGS=(--model "$MODEL" --max-position-embeddings "$SEQ_LENGTH" --partition-position-embedding)
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
choose_data 100,0,0
DATA_ARGS+=(--tokenizer-type "$TOKENIZER_TYPE")
LOGGING_ARGS=("${LOG_ARGS[@]}" --save-interval 100 --eval-iters 0 --distributed-timeout-minutes 60)

exec torchrun --nproc-per-node "$GPUS" --nnodes "$NNODES" "${NODE_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LONG_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
