#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 70B on sequences of 131,072 tokens, 16 nodes of 8 GPUs with 80 GB under Slurm:
# TP 4 x Ulysses 2 inside a node, Ring 4 across nodes, PP 4. Submit it from the root of the repository:
#
#   DATA_PATH=data/text_document TOKENIZER=path/to/Meta-Llama-3-70B sbatch examples/llama/pretrain_llama3_70b_slurm.sh
#
# Account, partition and container options come from your site. Without DATA_PATH it trains on random tokens. More nodes
# become data parallelism. When its time is nearly up, the run saves a checkpoint and the job queues itself again, until
# TRAIN_ITERS iterations are done.
#SBATCH --job-name=llama3-70b
#SBATCH --nodes=16
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
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama3_70b}
source examples/common/pretrain.sh
source examples/common/slurm_job.sh

TRAIN_ITERS=${TRAIN_ITERS:-10000}
TP_SIZE=4
ULYSSES_SIZE=2
RING_SIZE=4
PP_SIZE=4
SEQ_LENGTH=131072

MODEL_ARGS=(--model llama3-70b --max-position-embeddings "$SEQ_LENGTH")
PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE" --sequence-parallel --ulysses-parallel-size "$ULYSSES_SIZE"
    --ring-parallel-size "$RING_SIZE" --context-parallel-balance zigzag
    --pipeline-model-parallel-size "$PP_SIZE"
    "${ZERO_1_ARGS[@]}"
)
TRAINING_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 64 --seq-length "$SEQ_LENGTH" --train-iters "$TRAIN_ITERS"
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 500
    "${OPTIMIZER_ARGS[@]}" "${RECOMPUTE_ARGS[@]}"
)
choose_data 99,1,0 "${HUGGING_FACE_TOKENIZER[@]}"
LOGGING_ARGS=(
    "${LOG_ARGS[@]}" "${TENSORBOARD_ARGS[@]}" --save-interval 200 --eval-interval 500 --eval-iters 4
    --distributed-timeout-minutes 30
)

srun_and_requeue torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
