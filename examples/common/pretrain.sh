# SPDX-License-Identifier: Apache-2.0
# Shared by the launch scripts for GPUs. A script sets CHECKPOINT_PATH and sources this file from the root of the
# repository; then it builds its command from these arrays and from its own.
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$CHECKPOINT_PATH"

# For torchrun, if you start the script on each node by hand, with one MASTER_ADDR and a different NODE_RANK on each.
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

# choose_data SPLIT TOKENIZER_FLAGS...: sets DATA_ARGS to the files at DATA_PATH or, without DATA_PATH, to random tokens
# from MOCK_VOCABULARY ids or, if that is not set, from the vocabulary of --model.
choose_data() {
    if [ -n "${DATA_PATH:-}" ]; then
        DATA_ARGS=(--data-path "$DATA_PATH" --split "$1" "${@:2}" --num-workers 2)
    else
        DATA_ARGS=(--mock-data ${MOCK_VOCABULARY:+--tokenizer-type NullTokenizer --vocab-size "$MOCK_VOCABULARY"})
    fi
}
