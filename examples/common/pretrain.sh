# SPDX-License-Identifier: Apache-2.0
# What the launch scripts for GPUs share. A script sets CHECKPOINT_PATH and sources this file from the root of the
# repository; then it builds its command from these arrays and from its own.
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$CHECKPOINT_PATH"

# For torchrun, where the script is started on each node by hand, with the same MASTER_ADDR and its own NODE_RANK.
NODE_ARGS=(
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}"
)
# ZeRO 1, with communication hidden behind computation.
ZERO_1_ARGS=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
OPTIMIZER_ARGS=(--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0)
RECOMPUTE_ARGS=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
LOG_ARGS=(
    --log-interval 1 --log-throughput --log-jsonl "$CHECKPOINT_PATH/log.jsonl"
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH"
)
TENSORBOARD_ARGS=(--tensorboard-dir "${TENSORBOARD_DIR:-$CHECKPOINT_PATH/tensorboard}")

# The tokenizers that a script may name in addition to its data.
HUGGING_FACE_TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-}")
GPT2_TOKENIZER=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}"
)

# choose_data SPLIT TOKENIZER_FLAGS...: DATA_ARGS are the files at DATA_PATH or, without DATA_PATH, random tokens: of a
# vocabulary of MOCK_VOCABULARY, or of the vocabulary that --model names.
choose_data() {
    if [ -n "${DATA_PATH:-}" ]; then
        DATA_ARGS=(--data-path "$DATA_PATH" --split "$1" "${@:2}" --num-workers 2)
    else
        DATA_ARGS=(--mock-data ${MOCK_VOCABULARY:+--tokenizer-type NullTokenizer --vocab-size "$MOCK_VOCABULARY"})
    fi
}
