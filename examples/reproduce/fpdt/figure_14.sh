#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Figure 14 of the FPDT paper, small, on any machine: the loss of a GPT with and without FPDT, with and without offload.
#
#   bash examples/reproduce/fpdt/figure_14.sh [OUT_DIR]
#
# Trains three times on the sources of Python's standard library, 2,048 tokens a sample, 8 chunks; ITERATIONS (100).
# Draws the three curves into OUT_DIR/figure_14.png and prints how far they are apart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
OUT=${1:-out/reproduce/fpdt/figure_14}
ITERATIONS=${ITERATIONS:-100}
PYTHON=$(bash scripts/setup.sh)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"

[ -e "$OUT/text.jsonl" ] || "$PYTHON" tools/collect_text.py --output "$OUT/text.jsonl" --max-bytes 4000000
[ -e "$OUT/tokenizer.model" ] || "$PYTHON" tools/train_tokenizer.py --input "$OUT/text.jsonl" \
    --model-prefix "$OUT/tokenizer" --vocab-size 2048 --input-bytes 1000000
[ -e "$OUT/python_text_document.idx" ] || "$PYTHON" tools/preprocess_data.py --input "$OUT/text.jsonl" \
    --output-prefix "$OUT/python" --append-eod --workers 2 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"

train() { # name, flags
    local name=$1
    shift
    [ -e "$OUT/$name.jsonl" ] || "$PYTHON" pretrain_gpt.py \
        --num-layers 2 --hidden-size 256 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0 \
        --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 4 \
        --train-iters "$ITERATIONS" --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 \
        --data-path "$OUT/python_text_document" --split 90,5,5 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model" \
        --eval-iters 0 --num-workers 1 --log-interval 25 --log-jsonl "$OUT/$name.jsonl" "$@"
}
train baseline
train fpdt --fpdt --fpdt-chunk-size 256
train fpdt-offload-off --fpdt --fpdt-chunk-size 256 --no-fpdt-offload

PLOT="$PWD/tools/plot_run.py"
(cd "$OUT" && "$PYTHON" "$PLOT" baseline.jsonl fpdt.jsonl fpdt-offload-off.jsonl --output figure_14.png)
"$PYTHON" - "$OUT" <<'EOF'
import json, sys
from pathlib import Path

base, *others = (
    [json.loads(line)["lm_loss"] for line in (Path(sys.argv[1]) / f"{name}.jsonl").read_text().splitlines()]
    for name in ("baseline", "fpdt", "fpdt-offload-off")
)
for name, losses in zip(("fpdt with offload", "fpdt without offload"), others):
    apart = max(abs(a / b - 1) for a, b in zip(losses, base))
    print(f"{name}: {len(losses)} steps, at most {apart:.1e} of the loss away from the baseline")
EOF
