#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT 13B on sequences of 262,144 tokens, 4 nodes of 8 GPUs with 80 GB under Slurm:
# TP 2 x Ulysses 4 inside a node, Ring 4 across nodes. Submit it from the root of the repository:
#
#   DATA_PATH=data/text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       sbatch examples/gpt/pretrain_gpt_13b_slurm.sh
#
# Account, partition and container options come from your site. Without DATA_PATH it trains on random tokens. More nodes
# become data parallelism. When the time is up the run saves, and the job queues itself again until TRAIN_ITERS are done.
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
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270 # torchrun's own patience with a save is 30 seconds

CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_13b}
TENSORBOARD_DIR=${TENSORBOARD_DIR:-$CHECKPOINT_PATH/tensorboard}
DATA_PATH=${DATA_PATH:-}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}

TRAIN_ITERS=${TRAIN_ITERS:-10000}
GPUS_PER_NODE=8
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-6000}

TP_SIZE=2
ULYSSES_SIZE=4
RING_SIZE=4
SEQ_LENGTH=262144
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=16

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$SLURM_NNODES"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-backend c10d
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
)

# RoPE in place of GPT-3's learned positions, whose table would have more than a billion parameters at this length.
MODEL_ARGS=(
    --model gpt-13b
    --position-embedding-type rope
    --rotary-base 500000
    --max-position-embeddings "$SEQ_LENGTH"
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP_SIZE"
    --sequence-parallel
    --ulysses-parallel-size "$ULYSSES_SIZE"
    --ring-parallel-size "$RING_SIZE"
    --context-parallel-balance zigzag
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --bf16
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --seq-length "$SEQ_LENGTH"
    --train-iters "$TRAIN_ITERS"
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

if [ -n "$DATA_PATH" ]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --split 99,1,0
        --tokenizer-type GPT2BPETokenizer
        --vocab-file "$VOCAB_FILE"
        --merge-file "$MERGE_FILE"
        --num-workers 2
    )
else
    DATA_ARGS=(--mock-data)
fi

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --tensorboard-dir "$TENSORBOARD_DIR"
    --log-jsonl "$CHECKPOINT_PATH/log.jsonl"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 200
    --eval-interval 500
    --eval-iters 4
    --distributed-timeout-minutes 30
)

mkdir -p "$CHECKPOINT_PATH"
CODE=0
srun --kill-on-bad-exit=1 torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@" || CODE=$? # torchrun fails when it is told to stop, though all is saved

# Stopped by Slurm's warning, not by scancel, and not done yet: go on later.
DONE=$(cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$DONE" -lt "$TRAIN_ITERS" ] && [ $((${SLURM_JOB_END_TIME:-0} - $(date +%s))) -lt 360 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
