# SPDX-License-Identifier: Apache-2.0
# Shared by the loss curves of the papers. figure_6.sh, figure_8.sh and figure_14.sh set OUT, where to write, and
# source this file from the root of the repository. It makes data and a tokenizer, and defines `train`. ITERATIONS (100)
# is the number of steps of each run.
ITERATIONS=${ITERATIONS:-100}
DATA=${DATA:-out/reproduce/data} # shared by all curves
PYTHON=$(bash scripts/setup.sh)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
GPUS=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
DEVICE=${DEVICE:-$( ((GPUS >= 4)) && echo cuda || echo cpu)} # four processes need as many GPUs
mkdir -p "$OUT" "$DATA"

# Text: the sources of Python's standard library; a tokenizer with 1,024 tokens.
[ -e "$DATA/text.jsonl" ] || "$PYTHON" tools/collect_text.py --output "$DATA/text.jsonl" --max-bytes 4000000
[ -e "$DATA/tokenizer.model" ] || "$PYTHON" tools/train_tokenizer.py --input "$DATA/text.jsonl" \
    --model-prefix "$DATA/tokenizer" --vocab-size 1024 --input-bytes 1000000
[ -e "$DATA/python_text_document.idx" ] || "$PYTHON" tools/preprocess_data.py --input "$DATA/text.jsonl" \
    --output-prefix "$DATA/python" --append-eod --workers 2 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model"

# train NAME ENTRY FLAGS: one run of 4 processes; its losses are OUT/NAME.jsonl. All runs have the same seed and data.
train() {
    local name=$1 entry=$2
    shift 2
    echo "--- $name: $*"
    rm -f "$OUT/$name.jsonl"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$entry" \
        --num-layers 2 --hidden-size 128 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0 \
        --seq-length 512 --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 4 \
        --train-iters "$ITERATIONS" --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 \
        --data-path "$DATA/python_text_document" --split 100,0,0 --device "$DEVICE" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model" \
        --eval-iters 0 --num-workers 0 --no-progress --log-interval "$ITERATIONS" \
        --log-jsonl "$OUT/$name.jsonl" "$@" >"$OUT/$name.log" 2>&1 || {
        tail -n 20 "$OUT/$name.log" >&2
        exit 1
    }
}
