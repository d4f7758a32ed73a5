#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From nothing to a trained Llama, on any machine with Python:  bash examples/quickstart.sh [OUT_DIR]
#
# The script sets everything up, collects the sources of Python's standard library, trains a SentencePiece tokenizer on
# them, writes Megatron's .bin/.idx, and trains a small Llama (GQA, SwiGLU, RMSNorm, RoPE) on sequences of 8,192 tokens
# over 4 processes as Ulysses 2 x Ring 2. Half-way the training stops and resumes from its checkpoint. The last step
# prints a table and draws the loss.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-out/quickstart}
ITERATIONS=${ITERATIONS:-50}
source examples/common/steps.sh

refuse_if_there "examples/quickstart.sh OUT_DIR" log.jsonl checkpoints

say "1/5 Text: the sources of Python's standard library"
collect_text 4000000

say "2/5 Tokenizer: SentencePiece, 2048 pieces"
train_tokenizer

say "3/5 Data: .bin and .idx"
preprocess text python

MODEL_ARGS=(
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 8192 --max-position-embeddings 8192
)
GRID_ARGS=(--ulysses-parallel-size 2 --ring-parallel-size 2 --zero-stage 1)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 1 --train-iters "$ITERATIONS"
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 --init-method-std 0.04
    --adam-beta2 0.95 --weight-decay 0.1
    --eval-interval "$((ITERATIONS / 2))" --eval-iters 2 --num-workers 1
)
DATA_ARGS=(--data-path "$OUT/python_text_document" --split 90,5,5 "${TOKENIZER_ARGS[@]}")
OUTPUT_ARGS=(
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --log-interval 5 --log-throughput
    --log-jsonl "$OUT/log.jsonl" --tensorboard-dir "$OUT/tensorboard"
)
train() {
    launch 4 pretrain_llama.py \
        "${MODEL_ARGS[@]}" "${GRID_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
}

say "4/5 Training on 4 processes, Ulysses 2 x Ring 2"
train --exit-interval "$((ITERATIONS / 2))"
say "4/5 Resuming from the checkpoint"
train

say "5/5 Done in $((SECONDS - start)) s"
"$PYTHON" tools/plot_run.py "$OUT/log.jsonl" --output "$OUT/loss.png" --resumed "$((ITERATIONS / 2))" --fell-by 1.5
