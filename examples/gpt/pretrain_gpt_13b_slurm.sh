#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT 13B on sequences of 262,144 tokens, 4 nodes of 8 GPUs with 80 GB under Slurm:
# TP 2 x Ulysses 4 inside a node, Ring 4 across nodes. Submit it from the root of the repository:
#
#   DATA_PATH=data/text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       sbatch examples/gpt/pretrain_gpt_13b_slurm.sh
#
# Account, partition and container options come from your site. Without DATA_PATH it trains on random tokens. More nodes
# become data parallelism. When its time is nearly up, the run saves a checkpoint and the job queues itself again, until
# TRAIN_ITERS iterations are done.
#SBATCH --job-name=gpt-13b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_13b}
source examples/common/pretrain.sh
source examples/common/slurm_job.sh

TRAIN_ITERS=${TRAIN_ITERS:-10000}
TP_SIZE=2
ULYSSES_SIZE=4
RING_SIZE=4
SEQ_LENGTH=262144

# RoPE in place of GPT-3's learned positions, whose table would have more than a billion parameters at this length.
MODEL_ARGS=(
    --model gpt-13b --position-embedding-type rope --rotary-base 500000 --max-position-embeddings "$SEQ_LENGTH"
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE" --sequence-parallel --ulysses-parallel-size "$ULYSSES_SIZE"
    --ring-parallel-size "$RING_SIZE" --context-parallel-balance zigzag
    "${ZERO_1_ARGS[@]}"
)
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 16 --seq-length "$SEQ_LENGTH" --train-iters "$TRAIN_ITERS"
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    "${OPTIMIZER_ARGS[@]}" "${RECOMPUTE_ARGS[@]}"
)
choose_data 99,1,0 "${GPT2_TOKENIZER[@]}"
LOGGING_ARGS=(
    "${LOG_ARGS[@]}" "${TENSORBOARD_ARGS[@]}" --save-interval 200 --eval-interval 500 --eval-iters 4
    --distributed-timeout-minutes 30
)

srun_and_requeue torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
