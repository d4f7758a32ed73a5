#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tune a model of Hugging Face on chats, and convert it back:  bash examples/sft/finetune.sh [OUT_DIR]
#
# The training uses four processes, Ulysses 2 x Ring 2. Chats are packed to SEQ_LENGTH, and the packed documents are
# split over the ring. By default a small random Llama learns facts about places that do not exist, in a few minutes on
# 2 cores. With your own model and chats:
#
#   MODEL=Llama-3.2-1B-Instruct CHATS=chats.jsonl SEQ_LENGTH=8192 ITERATIONS=500 LR=1e-5 \
#       bash examples/sft/finetune.sh OUT
#   LORA=16 LR=1e-4 bash examples/sft/finetune.sh OUT          # trains LoRA adapters only
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${1:-out/sft}
SEQ_LENGTH=${SEQ_LENGTH:-512}
ITERATIONS=${ITERATIONS:-150}
BATCH=${BATCH:-4}
LR=${LR:-3e-3}
LORA=${LORA:-}
PROCESSES=${PROCESSES:-4}
source examples/common/steps.sh
export TOKENIZERS_PARALLELISM=false

refuse_if_there "examples/sft/finetune.sh OUT_DIR" tuned checkpoints

if [ -z "${MODEL:-}" ]; then
    say "1/4 A small random Llama, and chats"
    MODEL=$OUT/model CHATS=${CHATS:-$OUT/chats.jsonl} QUESTIONS=yes
    "$PYTHON" examples/sft/make_model.py --model "$MODEL" --chats "$CHATS"
fi

say "2/4 From Hugging Face"
"$PYTHON" tools/convert_hf.py --from-hf "$MODEL" --to "$OUT/base"

say "3/4 Fine-tuning on $PROCESSES processes"
# The sizes of the model come from the checkpoint; its tokenizer is in the checkpoint's folder hf/.
launch "$PROCESSES" pretrain_gpt.py \
    --load "$OUT/base" --finetune --use-checkpoint-args --save "$OUT/checkpoints" \
    --sft --data-path "$CHATS" --split 98,2,0 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/base/hf" \
    --seq-length "$SEQ_LENGTH" --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters "$ITERATIONS" \
    --context-parallel-size "$PROCESSES" --zero-stage 1 \
    --lr "$LR" --min-lr 0 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0 \
    --eval-interval "$ITERATIONS" --eval-iters 2 --num-workers 0 --log-interval 20 --log-jsonl "$OUT/log.jsonl" \
    ${LORA:+--lora-rank "$LORA"}

say "4/4 Back to Hugging Face"
"$PYTHON" tools/convert_hf.py --from "$OUT/checkpoints" --to-hf "$OUT/tuned" --hf-files "$OUT/base/hf"
if [ -n "${QUESTIONS:-}" ]; then
    "$PYTHON" examples/sft/ask.py "$OUT/tuned" --chats "$CHATS"
fi
echo "done in $((SECONDS - start)) s: $OUT/tuned"
