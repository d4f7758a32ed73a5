# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts for a tiny model on a CPU. A script sets SEQ_LENGTH, and perhaps ULYSSES_SIZE, RING_SIZE and
# GLOBAL_BATCH_SIZE, and sources this file from the root of the repository.
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export OMP_NUM_THREADS=1

LLAMA_ARGS=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
PARALLEL_ARGS=(--ulysses-parallel-size "${ULYSSES_SIZE:-1}" --ring-parallel-size "${RING_SIZE:-1}")
TRAINING_ARGS=(
    --device cpu --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH_SIZE:-2}" --seq-length "$SEQ_LENGTH"
    --lr 1e-3 --lr-decay-style cosine
)
DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0)
LOGGING_ARGS=(--log-interval 1 --eval-iters 0)
