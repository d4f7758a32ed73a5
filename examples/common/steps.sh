# SPDX-License-Identifier: Apache-2.0
# Shared by the examples with several steps. A script sets OUT, its folder for results, and sources this file from the
# root of the repository. This file sets PYTHON, which can run the repository, and defines the functions below.
PYTHON=$(bash scripts/setup.sh)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
start=$SECONDS

say() { printf '\n=== %s\n' "$*"; }

# refuse_if_there COMMAND NAME...: stop if OUT has one of these files; COMMAND shows how to name another OUT.
refuse_if_there() {
    local command=$1 name
    for name in "${@:2}"; do
        if [ -e "$OUT/$name" ]; then
            echo "error: $OUT already holds a run; name another folder: bash $command" >&2
            exit 2
        fi
    done
    mkdir -p "$OUT"
}

# launch PROCESSES PROGRAM [FLAGS]
launch() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$@"; }

# The three functions that make data do nothing if their file exists. TOKENIZER_ARGS are the flags of the tokenizer.
TOKENIZER_ARGS=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model")

# collect_text BYTES: the sources of Python's standard library, as OUT/text.jsonl
collect_text() {
    [ -e "$OUT/text.jsonl" ] || "$PYTHON" tools/collect_text.py --output "$OUT/text.jsonl" --max-bytes "$1"
}

# train_tokenizer: SentencePiece with 2,048 pieces, trained on the text
train_tokenizer() {
    [ -e "$OUT/tokenizer.model" ] || "$PYTHON" tools/train_tokenizer.py --input "$OUT/text.jsonl" \
        --model-prefix "$OUT/tokenizer" --vocab-size 2048 --input-bytes 2000000
}

# preprocess TEXT PREFIX: OUT/TEXT.jsonl in tokens, as OUT/PREFIX_text_document.bin and .idx
preprocess() {
    [ -e "$OUT/$2_text_document.idx" ] || "$PYTHON" tools/preprocess_data.py --input "$OUT/$1.jsonl" \
        --output-prefix "$OUT/$2" --append-eod --workers 2 "${TOKENIZER_ARGS[@]}"
}
