#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on a genome, read in codons, on any machine with Python:  bash examples/genslm/quickstart.sh [FASTA [OUT_DIR]]
#
# Without FASTA the script takes the genome of phage lambda (48,502 bases) from Debian's package bowtie2-examples. It
# writes Megatron's .bin/.idx, and trains a small GPT with learned positions on sequences of 2,048 codons over 4
# processes as Ulysses 2 x Ring 2. The last step prints a table and draws the loss.
set -euo pipefail

given=${1:+$(realpath "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${2:-out/genslm}
ITERATIONS=${ITERATIONS:-150}
SEQ_LENGTH=${SEQ_LENGTH:-2048}
source examples/common/steps.sh
LAMBDA=/usr/share/doc/bowtie2/examples/reference/lambda_virus.fa.gz

refuse_if_there "examples/genslm/quickstart.sh FASTA OUT_DIR" log.jsonl

# Prints the path of the genome. If the package is not installed, it is downloaded and unpacked, but not installed.
find_lambda() {
    if [ -e "$LAMBDA" ]; then
        echo "$LAMBDA"
        return
    fi
    if [ ! -e "$OUT/package$LAMBDA" ]; then
        (cd "$OUT" && apt-get download -q bowtie2-examples &&
            dpkg -x bowtie2-examples_*.deb package) >&2 2>/dev/null || true
    fi
    if [ ! -e "$OUT/package$LAMBDA" ]; then
        echo "error: no genome: apt-get download bowtie2-examples brought none; name a file of your own:" \
            "bash examples/genslm/quickstart.sh genome.fa" >&2
        exit 2
    fi
    echo "$OUT/package$LAMBDA"
}

say "1/3 Genome"
FASTA=${given:-$(find_lambda)}
echo "$FASTA"

say "2/3 Data: codons, .bin and .idx"
"$PYTHON" tools/preprocess_data.py --input "$FASTA" --output-prefix "$OUT/genome" --append-eod --workers 1 \
    --tokenizer-type CodonTokenizer --overwrite

MODEL_ARGS=(
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
)
GRID_ARGS=(--ulysses-parallel-size 2 --ring-parallel-size 2 --zero-stage 1)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 2 --train-iters "$ITERATIONS"
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5
    --adam-beta2 0.95 --weight-decay 0.1 --eval-iters 0 --num-workers 1
)
DATA_ARGS=(--data-path "$OUT/genome_text_document" --split 100,0,0 --tokenizer-type CodonTokenizer)

say "3/3 Training on 4 processes, Ulysses 2 x Ring 2"
launch 4 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${GRID_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
    --log-interval 10 --log-jsonl "$OUT/log.jsonl"

say "Done in $((SECONDS - start)) s"
"$PYTHON" tools/plot_run.py "$OUT/log.jsonl" --output "$OUT/loss.png" --fell-by 0.15
