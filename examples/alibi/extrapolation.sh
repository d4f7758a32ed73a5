#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on short sequences and evaluate on longer ones, with ALiBi and with RoPE:
#
#   bash examples/alibi/extrapolation.sh [OUT_DIR]
#
# Both models see 256 tokens at a time in training, and 256 to 4,096 in evaluation (Ulysses 2). This takes a few minutes
# on 2 cores.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${1:-out/alibi}
ITERATIONS=${ITERATIONS:-300}
source examples/common/steps.sh

refuse_if_there "examples/alibi/extrapolation.sh OUT_DIR" losses.csv alibi
collect_text 8000000
train_tokenizer
preprocess text python

ARGS=(
    --num-layers 3 --hidden-size 128 --num-attention-heads 8
    --data-path "$OUT/python_text_document" --split 90,10,0
    "${TOKENIZER_ARGS[@]}"
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --num-workers 0
)
run() { # POSITIONS SEQ_LENGTH [options]
    launch 2 pretrain_llama.py "${ARGS[@]}" \
        --position-embedding-type "$1" --seq-length "$2" --max-position-embeddings "$2" "${@:3}"
}

for positions in alibi rope; do
    run "$positions" 256 --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERATIONS" --eval-iters 0 \
        --log-interval 50 --save "$OUT/$positions"
    for length in 256 512 1024 2048 4096; do
        # Every length is evaluated on equally many tokens.
        run "$positions" "$length" --ulysses-parallel-size 2 --micro-batch-size 1 --global-batch-size 1 \
            --skip-train --eval-iters $((65536 / length)) --load "$OUT/$positions" --finetune 2>&1 |
            tee "$OUT/evaluation.log" | grep "validation loss" |
            sed -E "s/.*lm loss ([^ ]+) .*/$positions,$length,\1/" >>"$OUT/losses.part.csv"
        tail -n 1 "$OUT/losses.part.csv"
    done
done
mv "$OUT/losses.part.csv" "$OUT/losses.csv"

"$PYTHON" - "$OUT" <<'PYTHON'
import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

rows = list(csv.reader(open(f"{sys.argv[1]}/losses.csv")))
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
print(f"{'positions':10}" + "".join(f"{length:>9}" for length in sorted({int(row[1]) for row in rows})))
for name in ("alibi", "rope"):
    points = sorted((int(length), float(loss)) for positions, length, loss in rows if positions == name)
    print(f"{name:10}" + "".join(f"{loss:9.3f}" for _, loss in points))
    axes.plot(*zip(*points), marker="o", label={"alibi": "ALiBi", "rope": "RoPE"}[name])
axes.axvline(256, color="grey", linestyle=":", label="length in training")
axes.set(xscale="log", xlabel="tokens a sequence in evaluation", ylabel="loss, nats")
axes.set_xticks([256, 512, 1024, 2048, 4096], ["256", "512", "1,024", "2,048", "4,096"], minor=False)
axes.minorticks_off()
axes.legend()
figure.savefig(f"{sys.argv[1]}/extrapolation.png", dpi=110)
PYTHON
