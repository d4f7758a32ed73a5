#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A small model learns to find needles in 16,384 tokens: bash examples/needle/quickstart.sh [OUT_DIR]
#
# The script makes data and trains at 256 tokens and at 2,048 on 2 processes, then at 16,384 on 4 (Ulysses 2 x Ring 2).
# It draws the needle's heat map after the first training and after the last. README.md in this folder says what was
# measured. MODEL_FLAGS adds flags of the model.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${1:-out/needle}
LONG=${LONG:-16384}
SHORT_ITERATIONS=${SHORT_ITERATIONS:-1400}
MIDDLE_ITERATIONS=${MIDDLE_ITERATIONS:-200}
LONG_ITERATIONS=${LONG_ITERATIONS:-40}
source examples/common/steps.sh

refuse_if_there "examples/needle/quickstart.sh OUT_DIR" short
WORDS=(--tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 1)
MODEL=( # half of each head has no positions, so that the model finds a name at any distance
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --kv-channels 32 --ffn-hidden-size 128
    --rotary-percent 0.5 --init-method-std 0.06 --max-position-embeddings "$LONG" ${MODEL_FLAGS:-}
)
train() { # NAME PROCESSES LENGTH BATCH ITERATIONS DOCUMENTS NEEDLES QUESTIONS LEARNING_RATE [flags]
    "$PYTHON" tools/make_needles.py --output-prefix "$OUT/$1" --length "$3" --documents "$6" --needles "$7" \
        --questions "$8" --tokenizer-type NullTokenizer --vocab-size 255
    launch "$2" pretrain_llama.py "${MODEL[@]}" "${WORDS[@]}" --seq-length "$3" --global-batch-size "$4" \
        --train-data-path "$OUT/$1_text_document" --eval-iters 0 --num-workers 0 \
        --train-iters "$5" --lr "$9" --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.98 \
        --log-interval 25 --log-jsonl "$OUT/$1.jsonl" --save "$OUT/$1" --no-save-optim "${@:10}"
}
evaluate() { # NAME
    launch 4 tools/evaluate.py --load "$OUT/$1" --seq-length "$LONG" --ulysses-parallel-size 2 --ring-parallel-size 2 \
        "${WORDS[@]}" --reset-attention-mask --reset-position-ids --eval-tasks needle ruler-multi-key --eval-samples 2 \
        --eval-output "$OUT/$1-evaluation"
}

train short 2 256 32 "$SHORT_ITERATIONS" 8000 6 0.6 4e-3 --micro-batch-size 16
evaluate short
# From here on, each question is asked once: if it were repeated, the model could copy the earlier answer.
train middle 2 2048 8 "$MIDDLE_ITERATIONS" $((8 * MIDDLE_ITERATIONS + 1)) 64 0 2e-3 --micro-batch-size 4 \
    --load "$OUT/short" --finetune
train long 4 "$LONG" 2 "$LONG_ITERATIONS" $((2 * LONG_ITERATIONS + 1)) 400 0 1e-3 --micro-batch-size 1 \
    --ulysses-parallel-size 2 --ring-parallel-size 2 --load "$OUT/middle" --finetune
evaluate long
