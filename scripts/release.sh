#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build a release and try it as a stranger would, in a fresh environment:
#
#   bash scripts/release.sh [OUT_DIR]      default: out/release
#
# It builds the wheel and the documentation of this version, installs the wheel in a new virtual environment outside of
# this repository, and there plans a run, prints a memory table, prepares data, and trains a small model on two
# processes. It publishes nothing: at the end it prints what remains to be done by hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=$(mkdir -p "${1:-out/release}" && cd "${1:-out/release}" && pwd)
PYTHON=${PYTHON:-python3}
VERSION=$(sed -n 's/^    version="\(.*\)",$/\1/p' setup.py)
stop() { echo "error: $*" >&2; exit 1; }

[ -n "$VERSION" ] || stop "setup.py names no version"
grep -q "^## $VERSION " CHANGELOG.md || stop "CHANGELOG.md has no section \"## $VERSION (date)\": write one"
if [ -n "$(git status --porcelain --untracked-files=no)" ]; then stop "there are changes that are not committed"; fi

rm -rf "$OUT/wheel" "$OUT/environment" "$OUT/trial"
"$PYTHON" -m pip wheel -q --no-deps -w "$OUT/wheel" .
rm -rf build
WHEEL=$(echo "$OUT"/wheel/megatron_longcontext-"$VERSION"-*.whl)
[ -f "$WHEEL" ] || stop "no wheel of version $VERSION in $OUT/wheel"

"$PYTHON" -m venv "$OUT/environment"
BIN=$OUT/environment/bin
"$BIN/python" -m pip install -q torch==2.13.0
"$BIN/python" -m pip install -q "$WHEEL[triton]"

mkdir "$OUT/trial"
cd "$OUT/trial"
export OMP_NUM_THREADS=1 PYTHONPATH= PYTHONWARNINGS=ignore
PATH=$BIN:$PATH
try() { echo "\$ $*"; "$@" > last.txt 2>&1 || { tail -n 20 last.txt >&2; stop "this command failed: $*"; }; }
try longcontext --help
try longcontext plan --model llama3-8b --gpus 8 --gpu H100-80G --seq-length 128K
try longcontext memory --model llama3-8b --gpus 8 --gpu A100-80G --seq-length 32K
for number in $(seq 400); do echo "{\"text\": \"document $number: the same sentence, and another number $number\"}"; done > text.jsonl
try longcontext train-tokenizer --input text.jsonl --model-prefix tokenizer --vocab-size 300
try longcontext preprocess --input text.jsonl --output-prefix text --tokenizer-type SentencePieceTokenizer \
    --tokenizer-model tokenizer.model --append-eod
try torchrun --nproc-per-node 2 --no-python longcontext pretrain-llama --num-layers 2 --hidden-size 64 \
    --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --ulysses-parallel-size 2 \
    --micro-batch-size 1 --global-batch-size 2 --train-iters 20 --lr 3e-3 --eval-iters 0 --num-workers 0 \
    --data-path text_text_document --split 100,0,0 --tokenizer-type SentencePieceTokenizer \
    --tokenizer-model tokenizer.model --save checkpoints --log-jsonl log.jsonl
try longcontext plot-run log.jsonl --output loss.png --fell-by 0.5
cd - > /dev/null

bash scripts/docs.sh "$OUT/docs/$VERSION"

cat << TEXT
The wheel of $VERSION works in a fresh environment: $WHEEL
To be done by hand:
  1. bash tests/run.sh --full on a quiet machine, and bash benchmarks/gpu.sh on a GPU
  2. git tag -s v$VERSION and push the tag
  3. upload $WHEEL
  4. put $OUT/docs/$VERSION next to the pages of the earlier versions
TEXT
