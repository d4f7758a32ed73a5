#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train at 256 tokens, and extend to 4,096 in two stages, by RoPE's base and by YaRN:
#
#   bash examples/extend/extend.sh [OUT_DIR]
#
# Each stage makes the sequences four times as long and trains a few dozen steps on long documents. Then
# tools/evaluate.py shows the loss by position, before and after. This takes a few minutes on 2 cores. EXTRA=1 also
# extends to 4,096 tokens in one stage, for comparison.
#
# MODEL_FLAGS adds flags of the model: examples/hybrid/longer.sh extends a hybrid.
#
# For a real checkpoint, keep the stages and change the sizes: docs/use/position-embeddings.md.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${1:-out/extend}
ITERATIONS=${ITERATIONS:-300}
STAGE_ITERATIONS=${STAGE_ITERATIONS:-40}
source examples/common/steps.sh
SHORT=256 MIDDLE=1024 LONG=4096

refuse_if_there "examples/extend/extend.sh OUT_DIR" base

say "1/4 Text: the sources of Python's standard library; its long files are the data of the extension"
collect_text 12000000
[ -e "$OUT/long.jsonl" ] || "$PYTHON" examples/extend/long_texts.py "$OUT/text.jsonl" --at-least 24000 \
    --output "$OUT/long.jsonl"
train_tokenizer
for name in text long; do
    preprocess "$name" "$name"
done

MODEL=(
    --num-layers 3 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    ${MODEL_FLAGS:-}
)
train() { # PROCESSES SEQ_LENGTH [options]
    launch "$1" pretrain_llama.py "${MODEL[@]}" \
        "${TOKENIZER_ARGS[@]}" --seq-length "$2" --max-position-embeddings "$2" --num-workers 0 --log-interval 20 \
        --lr-decay-style cosine --adam-beta2 0.95 --weight-decay 0.1 --eval-iters 0 "${@:3}"
}
extend() { # FROM TO SEQ_LENGTH [options]: each step has as many tokens as before
    train 2 "$3" --load "$OUT/$1" --finetune --save "$OUT/$2" --data-path "$OUT/long_text_document" --split 90,10,0 \
        --micro-batch-size 1 --global-batch-size "$((LONG / $3))" --train-iters "$STAGE_ITERATIONS" \
        --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 5 "${@:4}"
}

say "2/4 Training at $SHORT tokens"
train 2 "$SHORT" --data-path "$OUT/text_text_document" --split 90,10,0 --save "$OUT/base" \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERATIONS" --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 20

# RoPE's base grows with the factor s as in NTK-aware scaling, base x s^(d / (d - 2)), here for heads of d = 32.
BASE_4=43900 BASE_16=192500
YARN=(--position-embedding-type yarn --yarn-original-max-position-embeddings "$SHORT" --yarn-rotary-scaling-factor)
say "3/4 $SHORT to $MIDDLE to $LONG tokens, by RoPE's base"
extend base rope-middle "$MIDDLE" --rotary-base "$BASE_4" --ulysses-parallel-size 2
extend rope-middle rope "$LONG" --rotary-base "$BASE_16" --ring-parallel-size 2
say "3/4 $SHORT to $MIDDLE to $LONG tokens, by YaRN"
extend base yarn-middle "$MIDDLE" "${YARN[@]}" 4 --ulysses-parallel-size 2
extend yarn-middle yarn "$LONG" "${YARN[@]}" 16 --ring-parallel-size 2
if [ -n "${EXTRA:-}" ]; then
    say "3/4 $SHORT to $LONG tokens in one stage"
    extend base rope-at-once "$LONG" --rotary-base "$BASE_16" --ring-parallel-size 2
fi

say "4/4 Loss by position, in documents that were held out"
evaluate() { # FOLDER NAME [options]
    launch 2 tools/evaluate.py --load "$OUT/$1" \
        --eval-tasks loss-by-position --eval-iters 16 --global-batch-size 1 --ring-parallel-size 2 \
        --data-path "$OUT/long_text_document" --split 90,10,0 "${TOKENIZER_ARGS[@]}" --num-workers 0 \
        --seq-length "$LONG" --eval-output "$OUT/$2" "${@:3}" >"$OUT/$2.log" 2>&1
    echo "$2: $(grep loss-by-position: "$OUT/$2.log")"
}
mkdir -p "$OUT/evaluation"
evaluate base evaluation/base
evaluate rope evaluation/rope
evaluate yarn evaluation/yarn
CURVES=(
    "trained at $SHORT=$OUT/evaluation/base"
    "RoPE base, two stages=$OUT/evaluation/rope"
    "YaRN, two stages=$OUT/evaluation/yarn"
)
if [ -n "${EXTRA:-}" ]; then
    evaluate rope-at-once evaluation/rope-at-once
    CURVES+=("RoPE base, at once=$OUT/evaluation/rope-at-once")
fi
"$PYTHON" examples/extend/picture.py "${CURVES[@]}" --trained "$SHORT" --output "$OUT/extension.png"
echo "done in $((SECONDS - start)) s: $OUT/extension.png"
