#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From nothing to a trained Llama, on any machine with Python:  bash examples/quickstart.sh [OUT_DIR]
#
# Sets everything up, then: collects the sources of Python's standard library, trains a SentencePiece tokenizer on them,
# writes Megatron's .bin/.idx, and trains a small Llama (GQA, SwiGLU, RMSNorm, RoPE) on sequences of 8,192 tokens over
# 4 processes as Ulysses 2 x Ring 2. Half-way it stops and resumes from its checkpoint. Closes with a table and a picture.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-out/quickstart}
ITERATIONS=${ITERATIONS:-50}
PYTHON=$(bash scripts/setup.sh)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
start=$SECONDS
say() { printf '\n=== %s\n' "$*"; }

if [ -e "$OUT/log.jsonl" ] || [ -e "$OUT/checkpoints" ]; then
    echo "error: $OUT already holds a run; name another folder: bash examples/quickstart.sh OUT_DIR" >&2
    exit 2
fi
mkdir -p "$OUT"

say "1/5 Text: the sources of Python's standard library"
[ -e "$OUT/text.jsonl" ] || "$PYTHON" tools/collect_text.py --output "$OUT/text.jsonl" --max-bytes 4000000

say "2/5 Tokenizer: SentencePiece, 2048 pieces"
[ -e "$OUT/tokenizer.model" ] || "$PYTHON" tools/train_tokenizer.py --input "$OUT/text.jsonl" \
    --model-prefix "$OUT/tokenizer" --vocab-size 2048 --input-bytes 2000000

say "3/5 Data: .bin and .idx"
[ -e "$OUT/python_text_document.idx" ] || "$PYTHON" tools/preprocess_data.py --input "$OUT/text.jsonl" \
    --output-prefix "$OUT/python" --append-eod --workers 2 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"

MODEL_ARGS=(
    --num-layers 2
    --hidden-size 256
    --num-attention-heads 4
    --group-query-attention --num-query-groups 2
    --seq-length 8192
    --max-position-embeddings 8192
)
GRID_ARGS=(
    --ulysses-parallel-size 2
    --ring-parallel-size 2
    --zero-stage 1
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1
    --train-iters "$ITERATIONS"
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 --init-method-std 0.04
    --adam-beta2 0.95 --weight-decay 0.1
    --eval-interval "$((ITERATIONS / 2))" --eval-iters 2
    --num-workers 1
)
DATA_ARGS=(
    --data-path "$OUT/python_text_document"
    --split 90,5,5
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"
)
OUTPUT_ARGS=(
    --save "$OUT/checkpoints" --load "$OUT/checkpoints"
    --log-interval 5 --log-throughput
    --log-jsonl "$OUT/log.jsonl"
    --tensorboard-dir "$OUT/tensorboard"
)
train() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_llama.py \
        "${MODEL_ARGS[@]}" "${GRID_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
}

say "4/5 Training on 4 processes, Ulysses 2 x Ring 2"
train --exit-interval "$((ITERATIONS / 2))"
say "4/5 Resuming from the checkpoint"
train

say "5/5 Done in $((SECONDS - start)) s"
"$PYTHON" tools/plot_run.py "$OUT/log.jsonl" --output "$OUT/loss.png" --resumed "$((ITERATIONS / 2))" --fell-by 1.5
